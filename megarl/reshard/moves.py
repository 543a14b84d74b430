"""One rank's part of a plan, written out: as arrays for executors, as moves for readers.

Owns the way from flows and routes to single copies. Builds nothing for other ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Literal

import numpy as np
from numpy.typing import NDArray

from megarl.reshard.layout import Box, Ints, Layout
from megarl.reshard.routes import Delivery, Route, Segment, group_ranks

if TYPE_CHECKING:
    from megarl.reshard.plan import Plan

Link = Literal["local", "node", "network", "fanout"]
"""local: on one GPU. node: between GPUs of one node. network: between nodes. fanout: from a
destination rank of the same node, which got it by network."""

LINKS: tuple[Link, ...] = ("local", "node", "network", "fanout")
_LOCAL, _NODE, _NETWORK, _FANOUT = range(4)


@dataclass(frozen=True, slots=True)
class Move:
    """Copy global `box` of `tensor` from rank `src` to rank `dst`.

    It lies in `src_local` from offset `src_at` on and goes into `dst_local` from `dst_at` on. With
    link "fanout" `src` is a rank of the destination, and `src_local` a tensor of its layout.
    """

    src: int
    dst: int
    tensor: str
    box: Box
    src_local: str
    src_at: tuple[int, ...]
    dst_local: str
    dst_at: tuple[int, ...]
    link: Link = "node"


@dataclass(frozen=True)
class Operations:
    """Copies as columns, one row each; boxes and offsets are [n, D], padded on the left.

    `block` numbers the destination's blocks, `parameter` counts those of its kind, `link` indexes
    LINKS. Sites are numbers in their layouts (of the destination's where the link is fanout), and
    tensors index into the sites' templates.
    """

    block: Ints
    parameter: Ints
    low: Ints
    high: Ints
    link: Ints
    source: Ints
    destination: Ints
    source_site: Ints
    source_tensor: Ints
    source_at: Ints
    destination_site: Ints
    destination_tensor: Ints
    destination_at: Ints

    def __len__(self) -> int:
        return len(self.block)

    @property
    def num_elements(self) -> Ints:
        """Elements of each row."""
        sizes: Ints = (self.high - self.low).prod(axis=1)
        return sizes

    @property
    def near(self) -> NDArray[np.bool_]:
        """Whether each row stays on its node, read from the source's own memory."""
        found: NDArray[np.bool_] = (self.link == _LOCAL) | (self.link == _NODE)
        return found

    def where(self, rows: NDArray[np.bool_]) -> Operations:
        """The chosen rows, in their order."""
        kept = np.flatnonzero(rows)
        return Operations(*(getattr(self, column.name)[kept] for column in fields(self)))

    def source_tensors(self, plan: Plan, rows: NDArray[np.bool_]) -> frozenset[str]:
        """Names of the source's local tensors that the chosen rows read; not of fan-outs."""
        pairs = np.stack([self.source_site[rows], self.source_tensor[rows]], axis=1)
        sites, templates = plan.source.sites, plan.source.templates
        return frozenset(
            sites[site].name(templates[sites[site].template].tensors[tensor].name)
            for site, tensor in np.unique(pairs, axis=0).tolist()
        )

    def moves(self, plan: Plan) -> tuple[Move, ...]:
        """The rows as moves, with names."""
        source, destination = plan.source, plan.destination
        columns = (
            getattr(self, name).tolist()
            for name in (
                "block parameter low high link source destination source_site source_tensor "
                "source_at destination_site destination_tensor destination_at"
            ).split()
        )
        moves = []
        for b, p, low, high, link, src, dst, ss, st, s_at, ds, dt, d_at in zip(
            *columns, strict=True
        ):
            block = destination.table.blocks[b]
            parameter = destination.table.kinds[block.kind][p]
            dims = len(parameter.shape)
            box = tuple(zip(low, high, strict=True))[len(low) - dims :]
            side = destination if LINKS[link] == "fanout" else source
            src_local, src_at = _local(side, ss, st, s_at)
            dst_local, dst_at = _local(destination, ds, dt, d_at)
            name = block.name(parameter.name)
            moves.append(
                Move(src, dst, name, box, src_local, src_at, dst_local, dst_at, LINKS[link])
            )
        return tuple(moves)


def _local(layout: Layout, site: int, tensor: int, at: list[int]) -> tuple[str, tuple[int, ...]]:
    place = layout.sites[site]
    found = layout.templates[place.template].tensors[tensor]
    return place.name(found.name), tuple(at[len(at) - len(found.shape) :])


def operations_to(plan: Plan, rank: int, links: Sequence[Link] = LINKS) -> Operations:
    """The copies over `links` into one destination rank, by block, tensor and place in it."""
    writer = _Writer(plan, tuple(LINKS.index(link) for link in links))
    for number, segment in enumerate(plan.segments):
        if not any(rank in stage for stage in segment.destination):
            continue
        pairing = plan.pairings[segment.pairing]
        groups = pairing.destination.groups[0]
        mine = {
            g: [i for i, r in enumerate(group_ranks(group, segment.destination)) if r == rank]
            for g, group in enumerate(groups)
        }
        for flow, group in enumerate(pairing.flow_destination.tolist()):
            for member in mine[group]:
                writer.receive(number, segment, flow, member)
    return writer.done()


def operations_from(plan: Plan, rank: int) -> Operations:
    """All copies out of one source rank, by destination rank and then as that one has them."""
    writer = _Writer(plan)
    for number, segment in enumerate(plan.segments):
        if not any(rank in stage for stage in segment.source):
            continue
        pairing = plan.pairings[segment.pairing]
        groups = pairing.source.groups[0]
        mine = {
            g: {i for i, r in enumerate(group_ranks(group, segment.source)) if r == rank}
            for g, group in enumerate(groups)
        }
        for flow, group in enumerate(pairing.flow_source.tolist()):
            if mine[group]:
                writer.send(number, segment, flow, mine[group])
    return writer.done()


def operations_of(plan: Plan, block: int, parameter: int) -> Operations:
    """All copies of one parameter of one block, to all ranks."""
    writer = _Writer(plan)
    for number, segment in enumerate(plan.segments):
        ks = [k for k, placed in enumerate(segment.blocks) if placed.block == block]
        if not ks:
            continue
        pairing = plan.pairings[segment.pairing]
        groups = pairing.destination.groups[0]
        mine = np.flatnonzero(pairing.parameter[pairing.start[:-1]] == parameter)
        for flow in mine.tolist():
            for member in range(len(groups[int(pairing.flow_destination[flow])])):
                writer.receive(number, segment, flow, member, ks)
    return writer.done()


_Unit = tuple[int, int, int, int]
"""(block of the segment, link, holder that gives, holder that takes) of one flow."""


class _Writer:
    """Rows being collected, as columns by name."""

    def __init__(self, plan: Plan, links: tuple[int, ...] = tuple(range(len(LINKS)))) -> None:
        self.plan, self.links = plan, links
        self.parts: list[dict[str, Ints]] = []

    def receive(
        self,
        number: int,
        segment: Segment,
        flow: int,
        member: int,
        blocks: Sequence[int] | None = None,
    ) -> None:
        """What one holder of a flow's destination gets, over some of the segment's blocks."""
        found: Route = self.plan.routes[number][flow]
        if blocks is None:
            blocks = range(len(segment.blocks))
        j = -1
        for delivery in found.deliveries:
            j += not delivery.near
            if member not in delivery.members:
                continue
            place = delivery.members.index(member)
            units: list[_Unit] = []
            for k in blocks:
                if delivery.near:
                    link, giver = _near_link(delivery, place), delivery.source(place, k)
                elif delivery.ingress[k] == member:
                    link, giver = _NETWORK, found.sender(k, j)
                else:
                    link, giver = _FANOUT, delivery.ingress[k]
                units.append((k, link, giver, member))
            self._write(segment, flow, units)
            return

    def send(self, number: int, segment: Segment, flow: int, holders: set[int]) -> None:
        """What some holders of a flow's source give, over all blocks."""
        found: Route = self.plan.routes[number][flow]
        j = -1
        units: list[_Unit] = []
        for delivery in found.deliveries:
            j += not delivery.near
            for k in range(len(segment.blocks)):
                if not delivery.near:
                    sender = found.sender(k, j)
                    if sender in holders:
                        units.append((k, _NETWORK, sender, delivery.ingress[k]))
                    continue
                for place, member in enumerate(delivery.members):
                    source = delivery.source(place, k)
                    if source in holders:
                        units.append((k, _near_link(delivery, place), source, member))
        self._write(segment, flow, units)

    def _write(self, segment: Segment, flow: int, units: Sequence[_Unit]) -> None:
        """Rows of all cells of a flow for each unit; units that hold alike are written together."""
        pairing = self.plan.pairings[segment.pairing]
        alike: dict[tuple[bool, int, int], list[_Unit]] = {}
        for unit in units:
            _, link, giver, taker = unit
            if link not in self.links:
                continue
            side = pairing.destination if link == _FANOUT else pairing.source
            key = (
                link == _FANOUT,
                -1 if side.single else giver,
                -1 if pairing.destination.single else taker,
            )
            alike.setdefault(key, []).append(unit)
        for same in alike.values():
            self._rows(segment, flow, same)

    def _rows(self, segment: Segment, flow: int, units: Sequence[_Unit]) -> None:
        """Rows of all cells of a flow for units whose holders hold them in the same pieces."""
        pairing = self.plan.pairings[segment.pairing]
        cells = pairing.cells(flow)
        low, right = pairing.low[cells], pairing.destination_box[cells]
        into = pairing.destination.groups[0][int(pairing.flow_destination[flow])]
        of = pairing.source.groups[0][int(pairing.flow_source[flow])]
        _, link, giver, taker = units[0]
        fanout = link == _FANOUT
        side = pairing.destination if fanout else pairing.source
        group, stages = (into, segment.destination) if fanout else (of, segment.source)
        given = side.rows(right if fanout else pairing.source_box[cells], group[giver])
        taken = pairing.destination.rows(right, into[taker])
        n, m = len(low), len(units)
        blocks = [segment.blocks[k] for k, _, _, _ in units]
        givers = [group[unit[2]] for unit in units]
        takers = [into[unit[3]] for unit in units]

        def per_unit(values: list[int]) -> Ints:
            return np.repeat(np.array(values, np.int64), n)

        def per_cell(values: Ints) -> Ints:
            return np.tile(values, (m, 1)) if values.ndim == 2 else np.tile(values, m)

        self.parts.append(
            {
                "block": per_unit([b.block for b in blocks]),
                "parameter": per_cell(pairing.parameter[cells]),
                "low": per_cell(low),
                "high": per_cell(pairing.high[cells]),
                "link": per_unit([unit[1] for unit in units]),
                "source": per_unit([stages[site][position] for site, position, _ in givers]),
                "destination": per_unit(
                    [segment.destination[site][position] for site, position, _ in takers]
                ),
                "source_site": per_unit(
                    [
                        (b.destination if fanout else b.source)[site]
                        for b, (site, _, _) in zip(blocks, givers, strict=True)
                    ]
                ),
                "source_tensor": per_cell(side.tensor[given]),
                "source_at": per_cell(side.at[given] + low - side.low[given]),
                "destination_site": per_unit(
                    [b.destination[site] for b, (site, _, _) in zip(blocks, takers, strict=True)]
                ),
                "destination_tensor": per_cell(pairing.destination.tensor[taken]),
                "destination_at": per_cell(
                    pairing.destination.at[taken] + low - pairing.destination.low[taken]
                ),
            }
        )

    def done(self) -> Operations:
        """All rows in one order: by destination rank, block, tensor and place in it."""
        dims = max((part["low"].shape[1] for part in self.parts), default=1)
        columns: dict[str, Ints] = {}
        for name in (field.name for field in fields(Operations)):
            parts = [part[name] for part in self.parts]
            if name in _PADDED:
                parts = [_widened(part, dims, _PADDED[name]) for part in parts]
                parts = parts or [np.zeros((0, dims), np.int64)]
            columns[name] = np.concatenate(parts or [np.zeros(0, np.int64)])
        at = columns["destination_at"]
        order = np.lexsort(
            (
                *(at[:, d] for d in reversed(range(dims))),
                columns["destination_tensor"],
                columns["destination_site"],
                columns["block"],
                columns["destination"],
            )
        )
        return Operations(**{name: column[order] for name, column in columns.items()})


_PADDED = {"low": 0, "high": 1, "source_at": 0, "destination_at": 0}
"""The columns [n, D], and what they are padded with on the left."""


def _near_link(delivery: Delivery, place: int) -> int:
    return _LOCAL if delivery.local[place] >= 0 else _NODE


def _widened(boxes: Ints, dims: int, fill: int) -> Ints:
    lacking = dims - boxes.shape[1]
    if not lacking:
        return boxes
    return np.concatenate([np.full((len(boxes), lacking), fill, np.int64), boxes], axis=1)
