"""The plan that takes one layout to another: which rank copies which box to which rank.

A plan is kept as cells and flows for each kind of block, and routes for each group of equal blocks,
so that its size and the time to make it hardly grow with the number of layers and of replicas. The
same two layouts give the same plan in every process, and no plan leaves `make_plan` without its
proof. Knows nothing of bytes in memory, transports or engines.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import cached_property

import numpy as np

from megarl.actor.parameters import element_bytes
from megarl.errors import LayoutError
from megarl.reshard.cells import Pairing, Pieces, pair
from megarl.reshard.layout import Ints, Layout, num_elements
from megarl.reshard.moves import LINKS, Link, Move, Operations, operations_from, operations_to
from megarl.reshard.placement import Placement
from megarl.reshard.proof import prove_plan
from megarl.reshard.proof_moves import prove_moves
from megarl.reshard.routes import Placed, Route, Segment, Traffic, route

__all__ = ["Move", "Plan", "make_plan", "minimum_bytes", "minimum_elements", "prove_moves"]

PLANNER = b"megarl planner 3"  # raise it when the same layouts would give another plan
MOST = 2**62  # bytes of a model: sums of a few of them are counted in 64 bits
CHUNK_BYTES = 64 << 20  # of one cell; larger ones are cut, so that they can be shared out


@dataclass(frozen=True, eq=False)
class Plan:
    """All copies from `source` to `destination`, both of whose ranks stand where `placement` says.

    `routes[s][f]` is how flow f of the pairing of segment s travels. Plans of one digest are equal.
    """

    source: Layout
    destination: Layout
    placement: Placement
    policy_bytes: int
    chunk_bytes: int
    pairings: tuple[Pairing, ...]
    segments: tuple[Segment, ...]
    routes: tuple[tuple[Route, ...], ...]
    traffic: Traffic

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Plan) and other.digest == self.digest

    def __hash__(self) -> int:
        return hash(self.digest)

    @cached_property
    def digest(self) -> str:
        """SHA-256 over all of it: processes that agree on it have the same plan."""
        total = hashlib.sha256(PLANNER)
        total.update(f"{self.source.digest} {self.destination.digest}".encode())
        total.update(f"{self.policy_bytes} {self.chunk_bytes}".encode())
        for side in (self.placement.source, self.placement.destination):
            total.update(repr(sorted(side.items())).encode())
        for pairing in self.pairings:
            for array in (
                *_arrays(pairing),
                *_arrays(pairing.source),
                *_arrays(pairing.destination),
            ):
                total.update(array.tobytes())
        for segment, routes in zip(self.segments, self.routes, strict=True):
            different = {id(route): route for route in routes}  # many flows share theirs
            numbers = {key: number for number, key in enumerate(different)}
            index = [numbers[id(route)] for route in routes]
            total.update(repr((segment, index, list(different.values()))).encode())
        for field in fields(self.traffic):
            total.update(repr(sorted(getattr(self.traffic, field.name).items())).encode())
        return total.hexdigest()

    @cached_property
    def moves(self) -> tuple[Move, ...]:
        """All moves written out, by destination rank: for plans of a few thousand."""
        return tuple(move for rank in self.destination.rank_ids for move in self.receives(rank))

    def operations_to(self, rank: int, links: Sequence[Link] = LINKS) -> Operations:
        """Destination rank `rank`'s part: the copies into it. LayoutError for no rank of it."""
        _check_rank(self.destination, rank)
        return operations_to(self, rank, links)

    def operations_from(self, rank: int) -> Operations:
        """Source rank `rank`'s part: all copies out of it. LayoutError for no rank of it."""
        _check_rank(self.source, rank)
        return operations_from(self, rank)

    def receives(self, rank: int) -> tuple[Move, ...]:
        """The moves into destination rank `rank`."""
        return self.operations_to(rank).moves(self)

    def sends(self, rank: int) -> tuple[Move, ...]:
        """The moves out of source rank `rank`."""
        return self.operations_from(rank).moves(self)

    def between(self, src: int, dst: int) -> tuple[Move, ...]:
        """The moves from source rank `src` to destination rank `dst`."""
        return tuple(m for m in self.receives(dst) if m.src == src and m.link != "fanout")

    def num_elements(self) -> int:
        """Elements written, over all destinations."""
        total = 0
        for segment in self.segments:
            pairing = self.pairings[segment.pairing]
            volume = (pairing.high - pairing.low).prod(axis=1)
            groups = pairing.destination.groups
            for flow in range(pairing.num_flows):
                members = len(groups[0][int(pairing.flow_destination[flow])])
                total += int(volume[pairing.cells(flow)].sum()) * members * len(segment.blocks)
        return total


def make_plan(
    source: Layout,
    destination: Layout,
    placement: Placement | None = None,
    policy_bytes: int = 2,
    chunk_bytes: int = CHUNK_BYTES,
    partial: bool = False,
) -> Plan:
    """The proved plan from one layout to another.

    Without a placement all ranks are on one node, each on a device of its own. `policy_bytes` are
    those of an element in the policy's precision. Both sides have the same parameters, but that a
    destination may lack MTP layers; with `partial` it may lack any (a draft model). Raises
    LayoutError where they have not, where nobody holds what is needed, and where the proof fails.
    """
    placement = placement or Placement.one_node(source, destination)
    placement.check(source, destination)
    for name, value, most in (
        ("policy_bytes", policy_bytes, 16),
        ("chunk_bytes", chunk_bytes, MOST),
    ):
        if not isinstance(value, int) or not 1 <= value <= most:
            raise LayoutError(f"{name} is {value}; give a whole number from 1 to {most}")
    _check_tables(source, destination, policy_bytes, partial)
    pairings, segments = _pairings(source, destination, policy_bytes, chunk_bytes)
    routes, traffic = route(pairings, segments, placement)
    plan = Plan(
        source,
        destination,
        placement,
        policy_bytes,
        chunk_bytes,
        pairings,
        segments,
        routes,
        traffic,
    )
    prove_plan(plan)
    return plan


def minimum_elements(destination: Layout) -> int:
    """Elements that any plan must write: each destination element once."""
    return minimum_bytes(destination, 1, fixed=False)


def minimum_bytes(destination: Layout, policy_bytes: int, fixed: bool = True) -> int:
    """Bytes of these elements; without `fixed` as if all were in the policy's precision."""
    templates = []
    for template in destination.templates:
        width = {
            p.name: element_bytes(p, policy_bytes) if fixed else policy_bytes
            for p in destination.table.kinds[template.kind]
        }
        templates.append(
            sum(
                num_elements(piece.box) * width[piece.tensor] * len(shard.holders)
                for tensor in template.tensors
                for shard in tensor.shards
                for piece in shard.pieces
            )
        )
    return sum(templates[site.template] for site in destination.sites)


def _pairings(
    source: Layout, destination: Layout, policy_bytes: int, chunk_bytes: int
) -> tuple[tuple[Pairing, ...], tuple[Segment, ...]]:
    """One pairing for each pair of templates, one segment for each pair of stages it is used in."""
    given, taken = _sites_by_block(source), _sites_by_block(destination)
    numbers = {block: number for number, block in enumerate(source.table.blocks)}
    found: dict[tuple[str, tuple[int, ...], tuple[int, ...]], int] = {}
    pairings: list[Pairing] = []
    blocks: dict[
        tuple[int, tuple[int, ...], tuple[int, ...]],
        list[Placed],
    ] = {}
    for number, block in enumerate(destination.table.blocks):
        ours, theirs = given[numbers[block]], taken[number]
        if not theirs:
            continue
        left = tuple(source.sites[site].template for site in ours)
        right = tuple(destination.sites[site].template for site in theirs)
        key = (block.kind, left, right)
        if key not in found:
            found[key] = len(pairings)
            pairings.append(
                pair(
                    destination.table.kinds[block.kind],
                    [source.templates[t] for t in left],
                    [destination.templates[t] for t in right],
                    policy_bytes,
                    chunk_bytes,
                )
            )
        stages = (
            found[key],
            tuple(source.sites[site].stage for site in ours),
            tuple(destination.sites[site].stage for site in theirs),
        )
        blocks.setdefault(stages, []).append(Placed(number, ours, theirs))
    segments = tuple(
        Segment(
            pairing,
            tuple(source.stages[s] for s in left),
            tuple(destination.stages[s] for s in right),
            tuple(members),
        )
        for (pairing, left, right), members in blocks.items()
    )
    return tuple(pairings), segments


def _check_tables(source: Layout, destination: Layout, policy_bytes: int, partial: bool) -> None:
    """Raise LayoutError unless both lay out the same parameters, in the same precision."""
    have, want = source.table, destination.table

    def refuse(found: str) -> LayoutError:
        return LayoutError(
            f"{source.kind} and {destination.kind} lay out different parameters: {found}; build "
            "both from one model shape"
        )

    for block in want.blocks:
        if block not in set(have.blocks):
            raise refuse(f"the first has no block {block.kind} {block.layer}")
    lacking = [b for b in have.blocks if b not in set(want.blocks) and b.kind != "mtp"]
    if lacking and not partial:
        raise refuse(f"the second has no block {lacking[0].kind} {lacking[0].layer}")
    for kind, parameters in want.kinds.items():
        ours = {parameter.name: parameter for parameter in have.kinds.get(kind, ())}
        for parameter in parameters:
            other = ours.pop(parameter.name, None)
            if other is None or (other.shape, other.precision) != (
                parameter.shape,
                parameter.precision,
            ):
                first = "is missing" if other is None else f"{list(other.shape)} {other.precision}"
                raise refuse(
                    f"{parameter.name} {first} in the first, {list(parameter.shape)} "
                    f"{parameter.precision} in the second"
                )
        if ours and not partial:
            raise refuse(f"{next(iter(ours))} is missing in the second")
    sizes = [(p.num_elements, element_bytes(p, policy_bytes)) for p in destination.parameters]
    total = sum(number * width for number, width in sizes)
    if not min((number for number, _ in sizes), default=1) > 0 or total > MOST:
        raise LayoutError(
            f"{destination.kind}: parameters of {total} bytes in all cannot be planned; each needs "
            f"at least one element, and all together at most {MOST} bytes"
        )


def _check_rank(layout: Layout, rank: int) -> None:
    if rank not in layout.rank_set:
        raise LayoutError(
            f"{layout.kind} has no rank {rank}; its {len(layout.rank_ids)} ranks are "
            f"{layout.rank_ids[0]} to {layout.rank_ids[-1]}"
        )


def _sites_by_block(layout: Layout) -> list[tuple[int, ...]]:
    found: list[list[int]] = [[] for _ in layout.table.blocks]
    for number, site in enumerate(layout.sites):
        found[site.block].append(number)
    return [tuple(sites) for sites in found]


def _arrays(part: Pairing | Pieces) -> list[Ints]:
    """All columns of a pairing or of its pieces."""
    values = [getattr(part, field.name) for field in fields(part)]
    return [value for value in values if isinstance(value, np.ndarray)]
