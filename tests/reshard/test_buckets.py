"""Messages: both ends agree on them, they are bounded, and they hold every copy once."""

from __future__ import annotations

from graphlib import TopologicalSorter

import pytest

from megarl.errors import LayoutError
from megarl.reshard.buckets import Bucket, buckets
from megarl.reshard.megatron import megatron_layout
from megarl.reshard.mesh import LearnerMesh, ServerMesh
from megarl.reshard.moves import LINKS, Operations
from megarl.reshard.placement import Placement
from megarl.reshard.plan import make_plan
from megarl.reshard.sglang import sglang_layout
from tests.reshard.models import tiny_shape

SHAPE = tiny_shape(num_layers=4)
SOURCE = megatron_layout(SHAPE, LearnerMesh(tp=2, pp=2, dp=2))
DESTINATION = sglang_layout(SHAPE, ServerMesh(4, servers=2))
PLAN = make_plan(SOURCE, DESTINATION, Placement.apart(SOURCE, DESTINATION, 4), chunk_bytes=200)
LIMIT = 300

Message = tuple[int, int, int, int, tuple[object, ...]]


def messages(operations: Operations) -> set[Message]:
    """Each bucket by what is in it, in the words of both ends."""
    moves = operations.moves(PLAN)
    return {
        (b.source, b.destination, b.number, b.num_bytes, tuple((moves[r], o) for r, o in packed(b)))
        for b in buckets(PLAN, operations, LIMIT)
    }


def packed(bucket: Bucket) -> list[tuple[int, int]]:
    return list(zip(bucket.rows, bucket.offsets, strict=True))


def test_senders_and_receivers_make_the_same_buckets() -> None:
    sent = set().union(*(messages(PLAN.operations_from(rank)) for rank in SOURCE.rank_ids))
    received = set().union(*(messages(PLAN.operations_to(rank)) for rank in DESTINATION.rank_ids))
    assert sent == received
    assert len(sent) > 16


def test_every_network_copy_is_in_one_bucket_and_none_is_too_large() -> None:
    for rank in SOURCE.rank_ids:
        operations = PLAN.operations_from(rank)
        found = buckets(PLAN, operations, LIMIT)
        rows = sorted(row for bucket in found for row in bucket.rows)
        network = LINKS.index("network")
        assert rows == [i for i, link in enumerate(operations.link.tolist()) if link == network]
        assert sum(b.num_bytes for b in found) == PLAN.traffic.network_out.get(rank, 0)
        assert all(b.num_bytes <= LIMIT for b in found)


def test_offsets_follow_one_another_without_gaps() -> None:
    operations = PLAN.operations_to(0)
    sizes = (operations.num_elements * PLAN.policy_bytes).tolist()
    for bucket in buckets(PLAN, operations, LIMIT):
        end = 0
        for row, offset in packed(bucket):
            assert offset == end
            end += sizes[row]
        assert end == bucket.num_bytes


def test_bucket_ends_only_where_the_next_copy_does_not_fit() -> None:
    ends = 0
    for rank in SOURCE.rank_ids:
        found = buckets(PLAN, PLAN.operations_from(rank), LIMIT)
        by_number = {(b.source, b.destination, b.number): b for b in found}
        for bucket in found:
            after = by_number.get((bucket.source, bucket.destination, bucket.number + 1))
            if after is not None:
                first = (*after.offsets, after.num_bytes)[1]
                assert bucket.num_bytes + first > LIMIT
                ends += 1
    assert ends > 16


def test_bucket_may_be_filled_to_its_last_byte() -> None:
    operations = PLAN.operations_to(0)
    full = next(b for b in buckets(PLAN, operations, LIMIT) if len(b.rows) > 1 and b.number == 0)
    again = buckets(PLAN, operations, full.num_bytes)
    assert full.rows in [b.rows for b in again if b.source == full.source]


def test_copy_larger_than_a_bucket_has_one_of_its_own() -> None:
    operations = PLAN.operations_to(0)
    assert all(len(b.rows) == 1 for b in buckets(PLAN, operations, 1))


def test_bucket_of_nothing_is_refused() -> None:
    with pytest.raises(LayoutError, match="hold nothing"):
        buckets(PLAN, PLAN.operations_to(0), 0)


def test_every_rank_takes_its_messages_in_the_one_order_of_all() -> None:
    """So that no ring of ranks, each with its window full, can wait for each other."""
    lists = [
        [(b.source, b.destination, b.number) for b in buckets(PLAN, operations, LIMIT)]
        for operations in (
            *(PLAN.operations_from(rank) for rank in SOURCE.rank_ids),
            *(PLAN.operations_to(rank) for rank in DESTINATION.rank_ids),
        )
    ]
    waits: dict[object, set[object]] = {}  # message -> those that a rank puts before it
    for mine in lists:
        for before, after in zip(mine, mine[1:], strict=False):
            waits.setdefault(after, set()).add(before)
    assert len(list(TopologicalSorter(waits).static_order())) > 16  # raises CycleError for a ring
