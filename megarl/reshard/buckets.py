"""How one rank's copies over a link are packed into messages: buckets of at most so many bytes.

Owns bucket boundaries and offsets inside a bucket. Sender and receiver work them out from their own
parts of the plan, and get the same: the copies between two ranks have one order on both sides.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from megarl.errors import LayoutError
from megarl.reshard.cells import widths
from megarl.reshard.layout import Ints
from megarl.reshard.moves import LINKS, Link, Operations
from megarl.reshard.plan import Plan


@dataclass(frozen=True, slots=True)
class Bucket:
    """One message from rank `source` to rank `destination`: rows of the rank's operations.

    Row rows[i] lies packed (C order, no gaps) at byte offsets[i]; `num_bytes` in all. `number`
    counts the buckets between the two ranks.
    """

    source: int
    destination: int
    number: int
    rows: tuple[int, ...]
    offsets: tuple[int, ...]
    num_bytes: int


def buckets(
    plan: Plan, operations: Operations, bucket_bytes: int, link: Link = "network"
) -> tuple[Bucket, ...]:
    """The messages of one rank's `operations` over `link`, those that go out first in front.

    The n-th buckets between all pairs come before the n + 1-th, and a rank begins with the peer
    after it in a ring, so that ranks do not all send to one at the same time. A copy is never
    divided: one larger than `bucket_bytes` is a bucket of its own (make_plan's chunk_bytes bounds
    them). Raises LayoutError for a bucket size below 1.
    """
    if bucket_bytes < 1:
        raise LayoutError(f"buckets of {bucket_bytes} bytes hold nothing; give 1 or more")
    rows = np.flatnonzero(operations.link == LINKS.index(link))
    sizes = operations.num_elements[rows] * _row_widths(plan, operations)[rows]
    pairs: dict[tuple[int, int], list[int]] = {}
    ends = zip(operations.source[rows].tolist(), operations.destination[rows].tolist(), strict=True)
    for i, pair in enumerate(ends):
        pairs.setdefault(pair, []).append(i)
    found = []
    for (source, destination), mine in pairs.items():
        found += _packed(
            source, destination, rows[mine].tolist(), sizes[mine].tolist(), bucket_bytes
        )
    return tuple(sorted(found, key=message_order(plan)))


def message_order(plan: Plan) -> Callable[[Bucket], tuple[int, int, int]]:
    """The one order of all messages of a plan over a link, as a sort key.

    Every rank takes its own in this order, so that the first one that is under way always has both
    of its ends waiting for it: no ring of ranks can wait for each other.
    """
    span = 1 + max(*plan.source.rank_ids, *plan.destination.rank_ids)

    def key(bucket: Bucket) -> tuple[int, int, int]:
        return bucket.number, (bucket.destination - bucket.source) % span, bucket.source

    return key


def _row_widths(plan: Plan, operations: Operations) -> Ints:
    """Bytes of an element of each row's parameter."""
    table = plan.destination.table
    kinds = {kind: i for i, kind in enumerate(table.kinds)}
    most = max((len(parameters) for parameters in table.kinds.values()), default=0)
    known = np.zeros((len(kinds), most), np.int64)
    for kind, parameters in table.kinds.items():
        known[kinds[kind], : len(parameters)] = widths(parameters, plan.policy_bytes)
    of_block = np.array([kinds[block.kind] for block in table.blocks], np.int64)
    found: Ints = known[of_block[operations.block], operations.parameter]
    return found


def _packed(
    source: int, destination: int, rows: list[int], sizes: list[int], limit: int
) -> list[Bucket]:
    found: list[Bucket] = []
    held: list[int] = []
    offsets: list[int] = []
    total = 0

    def close() -> None:
        found.append(Bucket(source, destination, len(found), tuple(held), tuple(offsets), total))

    for row, size in zip(rows, sizes, strict=True):
        if held and total + size > limit:
            close()
            held, offsets, total = [], [], 0
        held.append(row)
        offsets.append(total)
        total += size
    if held:
        close()
    return found
