"""The proof of a plan: every destination element once, from who holds it, without writing it out.

Owns the proof, which looks at the plan's cells, routes and blocks and at the two layouts, never at
how the plan was made. What is shown of the cells of one kind of block holds for each such block;
routes are shown for each group of blocks that share stages; and each site of the destination is in
one such group. Cost: a few sorts of the cells of each kind of block. Writing a rank's part out
(`moves.py`) is not in it: `proof_moves.py` and `simulate.py` prove what is written out.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from megarl.errors import LayoutError
from megarl.reshard.cells import Pairing, Pieces, padded, widths
from megarl.reshard.layout import (
    Box,
    Ints,
    Layout,
    Shard,
    ShardedTensor,
    local_box,
    whole,
)
from megarl.reshard.proof_routes import prove_routes
from megarl.reshard.tiling import first_defect, inside, shown, untiled

if TYPE_CHECKING:
    from megarl.reshard.plan import Plan
    from megarl.reshard.routes import Segment


def prove_plan(plan: Plan) -> None:
    """Raise LayoutError naming tensor, interval and ranks unless the plan is exactly-once.

    Shown: both layouts tile their local tensors with pieces and paddings; every cell is within a
    piece of everybody who may send it, at the place where it is read, and within a piece of
    everybody who gets it; the cells that are written into each local tensor tile it together with
    its paddings, so nothing is left out, written twice or written into padding; every holder of a
    flow gets it once, over the network at most once per node and only where no rank of the node
    holds it; and the bytes of each rank are what cells and routes say.
    """
    prove_layout(plan.source)
    prove_layout(plan.destination)
    prove_blocks(plan)
    first: dict[int, Segment] = {}
    for segment in plan.segments:
        first.setdefault(segment.pairing, segment)
    for number, pairing in enumerate(plan.pairings):
        _Cells(plan, pairing, first[number]).prove()
    prove_routes(plan)


def prove_layout(layout: Layout) -> None:
    """Raise LayoutError unless pieces and paddings tile each local tensor of each rank exactly."""
    kinds = layout.table.kinds
    shapes = {kind: {p.name: p.shape for p in parameters} for kind, parameters in kinds.items()}
    stages: dict[int, tuple[int, ...]] = {}  # for each template the smallest stage that has it
    names: dict[str, list[tuple[int, ShardedTensor]]] = {}
    for site in layout.sites:
        stage, template = layout.stages[site.stage], layout.templates[site.template]
        stages[site.template] = min(stages.get(site.template, stage), stage, key=len)
        if layout.table.blocks[site.block].kind != template.kind:
            raise LayoutError(
                f"{layout.kind}: a {layout.table.blocks[site.block].kind} block is laid out as "
                f"{template.kind}"
            )
        for tensor in template.tensors:
            names.setdefault(site.name(tensor.name), []).append((site.stage, tensor))
    for number, stage in stages.items():
        template = layout.templates[number]
        for tensor in template.tensors:
            for shard in tensor.shards:
                _check_shard(layout, tensor, shard, shapes[template.kind], stage)
    _check_names(layout, names)


def _check_names(layout: Layout, names: dict[str, list[tuple[int, ShardedTensor]]]) -> None:
    """Raise LayoutError where a rank has two tensors of one name, or one tensor twice."""
    for stage in layout.stages:
        if len(set(stage)) != len(stage):
            raise LayoutError(f"{layout.kind}: a rank stands twice in stage {list(stage)[:8]}")
    different = {id(tensor): tensor for places in names.values() for _, tensor in places}
    for tensor in different.values():
        holders = [position for shard in tensor.shards for position in shard.holders]
        if len(set(holders)) != len(holders):
            raise LayoutError(f"{layout.kind}: a rank of a stage has {tensor.name} twice")
    apart = sum(map(len, layout.stages)) == len(layout.rank_ids)  # no rank is in two stages
    for name, places in names.items():
        if apart and len({number for number, _ in places}) == len(places):
            continue
        held: set[int] = set()
        for number, tensor in places:
            stage = layout.stages[number]
            ranks = {stage[position] for shard in tensor.shards for position in shard.holders}
            if not held.isdisjoint(ranks):
                raise LayoutError(f"{layout.kind}: rank {min(held & ranks)} has {name} twice")
            held |= ranks


def _check_shard(
    layout: Layout,
    tensor: ShardedTensor,
    shard: Shard,
    shapes: dict[str, tuple[int, ...]],
    stage: tuple[int, ...],
) -> None:
    if not shard.holders or not 0 <= min(shard.holders) <= max(shard.holders) < len(stage):
        raise LayoutError(
            f"{layout.kind}: {tensor.name} is held by positions {list(shard.holders)} of a stage "
            f"of {len(stage)} ranks"
        )
    where = f"{layout.kind}: rank {stage[shard.holders[0]]}"
    boxes = []
    for piece in shard.pieces:
        if piece.tensor not in shapes or not inside(piece.box, whole(shapes[piece.tensor])):
            raise LayoutError(
                f"{where} holds {shown(piece.box)} of {piece.tensor}, which is not within that "
                f"parameter ({shapes.get(piece.tensor, 'unknown')})"
            )
        boxes.append((local_box(piece.box, piece.at), piece.tensor))
    boxes += [(padding.box, "padding") for padding in shard.paddings]
    defect = first_defect(boxes, whole(tensor.shape))
    if defect is not None:
        raise LayoutError(f"{where}: {tensor.name} {shown(defect[0])} {_found(defect[1])}")


def _found(names: Sequence[str]) -> str:
    if not names:
        return "is written by nothing"
    return f"is written {len(names)} times ({'; '.join(names)})"


def prove_blocks(plan: Plan) -> None:
    """Raise LayoutError unless the segments take each destination site once, and as it is."""
    source, destination = plan.source, plan.destination
    seen: set[int] = set()
    templates: dict[int, tuple[tuple[int, ...], tuple[int, ...]]] = {}
    for segment in plan.segments:
        if not 0 <= segment.pairing < len(plan.pairings):
            raise LayoutError(f"plan: there is no pairing {segment.pairing}")
        for placed in segment.blocks:
            numbers = (
                (placed.block, len(destination.table.blocks)),
                *((site, len(source.sites)) for site in placed.source),
                *((site, len(destination.sites)) for site in placed.destination),
            )
            if not all(0 <= number < count for number, count in numbers):
                raise LayoutError(f"plan: {placed} is not of these layouts")
            ours, theirs = placed.source, placed.destination
            block = destination.table.blocks[placed.block]
            for layout, sites, stages in (
                (source, ours, segment.source),
                (destination, theirs, segment.destination),
            ):
                for site, stage in zip(sites, stages, strict=True):
                    place = layout.sites[site]
                    if layout.table.blocks[place.block] != block:
                        raise LayoutError(
                            f"plan: block {block.kind} {block.layer} is taken from or to a place "
                            f"of {layout.table.blocks[place.block]} in {layout.kind}"
                        )
                    if layout.stages[place.stage] != stage:
                        raise LayoutError(
                            f"plan: block {block.kind} {block.layer} is in stage {place.stage} of "
                            f"{layout.kind}, not on ranks {list(stage)[:8]}"
                        )
            used = (
                tuple(source.sites[site].template for site in ours),
                tuple(destination.sites[site].template for site in theirs),
            )
            if templates.setdefault(segment.pairing, used) != used:
                raise LayoutError(
                    f"plan: block {block.kind} {block.layer} is planned as if it were laid out "
                    "like another block"
                )
            for site in theirs:
                if site in seen:
                    raise LayoutError(
                        f"plan: block {block.kind} {block.layer} is written twice to ranks "
                        f"{list(destination.stages[destination.sites[site].stage])[:8]}"
                    )
                seen.add(site)
    for number, place in enumerate(destination.sites):
        if number not in seen:
            block = destination.table.blocks[place.block]
            raise LayoutError(
                f"plan: block {block.kind} {block.layer} is written by nothing on ranks "
                f"{list(destination.stages[place.stage])[:8]}"
            )


class _Cells:
    """The proof of one pairing's cells; errors name its first block."""

    def __init__(self, plan: Plan, pairing: Pairing, segment: Segment) -> None:
        self.plan, self.pairing, self.segment = plan, pairing, segment
        first = segment.blocks[0]
        self.ours, self.theirs = first.source, first.destination
        self.block = plan.destination.table.blocks[first.block]

    def prove(self) -> None:
        """Raise LayoutError where a cell is not held, not wanted, written twice or missing."""
        pairing = self.pairing
        if pairing.parameters != self.plan.destination.table.kinds[self.block.kind]:
            raise LayoutError(f"plan: cells of other parameters than those of {self.block.kind}")
        for side, layout, sites, boxes in (
            (pairing.source, self.plan.source, self.ours, pairing.source_box),
            (pairing.destination, self.plan.destination, self.theirs, pairing.destination_box),
        ):
            self._check_numbers(side, boxes)
            self._check_rows(side, layout, sites)
            self._check_inside(side, layout, sites, boxes)
        self._check_groups()
        self._check_tilings()
        self._check_bytes()

    def _check_numbers(self, side: Pieces, boxes: Ints) -> None:
        """Boxes are numbered from 0 on, in the rows and in the cells: they are found by number."""
        num_boxes = len(np.unique(side.box))
        known = np.array_equal(np.unique(side.box), np.arange(num_boxes))
        if not known or (boxes < 0).any() or (boxes >= num_boxes).any():
            raise LayoutError(f"plan: boxes of {self.block.kind} are not numbered from 0 on")

    def _check_rows(self, side: Pieces, layout: Layout, sites: tuple[int, ...]) -> None:
        """Each row is (a part of) a piece of the layout, at its place, with its holders."""
        dims = side.low.shape[1]
        columns = (side.parameter, side.site, side.tensor, side.shard, side.piece, side.holders)
        low, high, at = side.low.tolist(), side.high.tolist(), side.at.tolist()
        for i, (number, s, t, h, p, holders) in enumerate(zip(*columns, strict=True)):
            if min(number, s, t, h, p) < 0:
                raise LayoutError(f"plan: row {i} of {self.block.kind} blocks counts from behind")
            tensor = layout.templates[layout.sites[sites[s]].template].tensors[t]
            shard = tensor.shards[h]
            piece = shard.pieces[p]
            first, end = padded(piece.box, dims)
            start = [0] * (dims - len(piece.at)) + list(piece.at)
            right = (
                self.pairing.parameters[number].name == piece.tensor
                and holders == shard.holders
                and all(
                    a <= b < c <= d for a, b, c, d in zip(first, low[i], high[i], end, strict=True)
                )
                and all(
                    x - b == y - a for x, b, y, a in zip(at[i], low[i], start, first, strict=True)
                )
            )
            if not right:
                raise LayoutError(
                    f"plan: {self.block.name(piece.tensor)} "
                    f"{shown(tuple(zip(low[i], high[i], strict=True)))} is not where {layout.kind} "
                    f"has it ({tensor.name}, {shown(piece.box)} at {list(piece.at)})"
                )

    def _check_inside(
        self, side: Pieces, layout: Layout, sites: tuple[int, ...], boxes: Ints
    ) -> None:
        """Each cell is within every row of the box it is said to be of."""
        cell, row = _pairs(boxes, side.box)
        wrong = (
            (self.pairing.parameter[cell] != side.parameter[row])
            | (self.pairing.low[cell] < side.low[row]).any(axis=1)
            | (self.pairing.low[cell] >= self.pairing.high[cell]).any(axis=1)
            | (self.pairing.high[cell] > side.high[row]).any(axis=1)
        )
        if wrong.any():
            i = int(wrong.argmax())
            tensor = self._tensor(layout, sites, side, int(row[i]))
            raise LayoutError(
                f"plan: {self._cell(int(cell[i]))} is not within what {tensor.name} of "
                f"{layout.kind} holds"
            )

    def _check_groups(self) -> None:
        """Each flow's cells have the holders that the flow is routed by."""
        pairing = self.pairing
        counts, num_cells = np.diff(pairing.start), len(pairing.parameter)
        ends = pairing.start[[0, -1]].tolist()
        if ends != [0, num_cells] or (counts < 1).any():
            raise LayoutError(f"plan: cells of {self.block.kind} are in no flow or in several")
        for side, boxes, flows in (
            (pairing.source, pairing.source_box, pairing.flow_source),
            (pairing.destination, pairing.destination_box, pairing.flow_destination),
        ):
            groups, of_box = side.groups
            held: dict[int, list[tuple[int, int]]] = {}
            for row, box in enumerate(side.box.tolist()):
                site = int(side.site[row])
                held.setdefault(box, []).extend((site, i) for i in side.holders[row])
            for box, holders in held.items():
                if sorted(holders) != [(s, i) for s, i, _ in groups[int(of_box[box])]]:
                    raise LayoutError(f"plan: a box of {self.block.kind} is given other holders")
            wrong = of_box[boxes] != np.repeat(flows, counts)
            if wrong.any():
                raise LayoutError(
                    f"plan: {self._cell(int(wrong.argmax()))} travels with cells of other holders"
                )

    def _check_tilings(self) -> None:
        """The cells written into each local tensor, and its paddings, tile it."""
        pairing, side = self.pairing, self.pairing.destination
        dims = side.low.shape[1]
        cells, rows = _pairs(pairing.destination_box, side.box)
        low = pairing.low[cells] - side.low[rows] + side.at[rows]
        high = pairing.high[cells] - side.low[rows] + side.at[rows]
        tensors = side.site[rows] * (1 << 32) + side.tensor[rows]
        order = np.argsort(tensors, kind="stable")
        kinds, starts = np.unique(tensors[order], return_index=True)
        slices = (
            dict(zip(kinds.tolist(), np.split(order, starts[1:].tolist()), strict=True))
            if len(order)
            else {}
        )
        for s, site in enumerate(self.theirs):
            template = self.plan.destination.sites[site].template
            for t, tensor in enumerate(self.plan.destination.templates[template].tensors):
                mine = slices.get(s * (1 << 32) + t, np.zeros(0, np.int64))
                part, first, end = side.shard[rows[mine]], low[mine], high[mine]
                paddings = [
                    (h, padded(padding.box, dims))
                    for h, shard in enumerate(tensor.shards)
                    for padding in shard.paddings
                ]
                if paddings:
                    part = np.append(part, [h for h, _ in paddings])
                    first = np.concatenate([first, np.array([b[0] for _, b in paddings])])
                    end = np.concatenate([end, np.array([b[1] for _, b in paddings])])
                shape = (1,) * (dims - len(tensor.shape)) + tensor.shape
                bad = untiled(part, first, end, shape, len(tensor.shards))
                if bad is not None:
                    self._say_untiled(
                        s, tensor, bad, mine[part[: len(mine)] == bad], cells, low, high
                    )

    def _check_bytes(self) -> None:
        """The bytes of each flow are those of its cells."""
        pairing = self.pairing
        size = (pairing.high - pairing.low).prod(axis=1)
        size *= widths(pairing.parameters, self.plan.policy_bytes)[pairing.parameter]
        total = np.add.reduceat(size, pairing.start[:-1]) if len(size) else size
        if not np.array_equal(total, pairing.flow_bytes):
            raise LayoutError(f"plan: bytes of flows of {self.block.kind} blocks are counted wrong")

    def _say_untiled(
        self,
        site: int,
        tensor: ShardedTensor,
        bad: int,
        mine: Ints,
        cells: Ints,
        low: Ints,
        high: Ints,
    ) -> None:
        shard = tensor.shards[bad]
        lacking = low.shape[1] - len(tensor.shape)
        boxes: list[tuple[Box, str]] = []
        for i in mine.tolist():
            box = tuple(zip(low[i].tolist(), high[i].tolist(), strict=True))[lacking:]
            boxes.append((box, self._cell(int(cells[i]))))
        boxes += [(padding.box, "padding") for padding in shard.paddings]
        defect = first_defect(boxes, whole(tensor.shape))
        assert defect is not None
        stage = self.segment.destination[site]
        name = self.plan.destination.sites[self.theirs[site]].name(tensor.name)
        wanted = ", ".join(
            self.block.name(piece.tensor)
            for piece in shard.pieces
            if inside(defect[0], local_box(piece.box, piece.at))
        )
        raise LayoutError(
            f"plan: destination ranks {[stage[i] for i in shard.holders[:8]]}: {name} "
            f"{shown(defect[0])} ({wanted or 'no parameter'}) {_found(defect[1])}; "
            f"{self.plan.source.kind} to {self.plan.destination.kind}"
        )

    def _tensor(
        self, layout: Layout, sites: tuple[int, ...], side: Pieces, row: int
    ) -> ShardedTensor:
        site = layout.sites[sites[int(side.site[row])]]
        return layout.templates[site.template].tensors[int(side.tensor[row])]

    def _cell(self, cell: int) -> str:
        parameter = self.pairing.parameters[int(self.pairing.parameter[cell])]
        low, high = self.pairing.low[cell].tolist(), self.pairing.high[cell].tolist()
        box = tuple(zip(low, high, strict=True))[len(low) - len(parameter.shape) :]
        return f"{self.block.name(parameter.name)} {shown(box)}"


def _pairs(boxes: Ints, of_row: Ints) -> tuple[Ints, Ints]:
    """(cell, row) for every row of each cell's box, once."""
    order = np.argsort(of_row, kind="stable").astype(np.int64)
    begin = np.searchsorted(of_row[order], boxes, "left")
    count = np.searchsorted(of_row[order], boxes, "right") - begin
    cells = np.repeat(np.arange(len(boxes), dtype=np.int64), count)
    within = np.arange(len(cells)) - np.repeat(np.cumsum(count) - count, count)
    return cells, order[np.repeat(begin, count) + within]
