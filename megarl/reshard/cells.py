"""The common cells of two layouts of one kind of block: what the plan moves, once per block.

A cell is a box of one parameter that has one set of holders on the source side and one on the
destination side. Owns the intersection, vectorised over pieces. Knows nothing of ranks, nodes or
who sends: holders are positions in stages.

Boxes are arrays [n, D] of first and end indices, padded on the left to D dims with [0, 1).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from megarl.actor.parameters import Parameter, element_bytes
from megarl.reshard.layout import BlockLayout, Box, Ints, cut

Holder = tuple[int, int, int]
"""(which of the block's sites, position in that site's stage, which copy of the box it holds)."""

BATCH = 512  # boxes compared at a time with all of the other side, to bound memory


def _freeze(part: object) -> None:
    """Make the arrays read-only: plans are kept and shared."""
    for value in vars(part).values():
        if isinstance(value, np.ndarray):
            value.setflags(write=False)


@dataclass(frozen=True)
class Pieces:
    """One side's pieces of one kind of block, a row each.

    `box` numbers the distinct boxes; rows of one number are copies of one another. `site` counts
    the block's sites; `tensor`, `shard` and `piece` index into the site's template.
    """

    parameter: Ints
    low: Ints
    high: Ints
    at: Ints
    site: Ints
    tensor: Ints
    shard: Ints
    piece: Ints
    box: Ints
    holders: tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        _freeze(self)

    @cached_property
    def first_row(self) -> Ints:
        """For each box the first of its rows."""
        return np.unique(self.box, return_index=True)[1].astype(np.int64)

    @cached_property
    def groups(self) -> tuple[tuple[tuple[Holder, ...], ...], Ints]:
        """(the distinct sets of holders, the set of each box)."""
        held: list[list[Holder]] = [[] for _ in self.first_row]
        seen: dict[tuple[int, int, int], int] = {}
        for row, box in enumerate(self.box.tolist()):
            site = int(self.site[row])
            for position in self.holders[row]:
                copy = seen.get((box, site, position), 0)
                seen[box, site, position] = copy + 1
                held[box].append((site, position, copy))
        ids: dict[tuple[Holder, ...], int] = {}
        of_box = [ids.setdefault(tuple(sorted(holders)), len(ids)) for holders in held]
        return tuple(ids), np.array(of_box, np.int64)

    @cached_property
    def _rows_by_holder(self) -> Mapping[tuple[int, Holder], int]:
        found: dict[tuple[int, Holder], int] = {}
        for row, box in enumerate(self.box.tolist()):
            site = int(self.site[row])
            for position in self.holders[row]:
                copy = 0
                while (box, (site, position, copy)) in found:
                    copy += 1
                found[box, (site, position, copy)] = row
        return found

    @cached_property
    def single(self) -> bool:
        """Whether each box has one row, so that all of its holders hold it in the same piece."""
        return len(self.first_row) == len(self.box)

    def rows(self, boxes: Ints, holder: Holder) -> Ints:
        """For each of `boxes`, the row by which `holder` holds it."""
        if self.single:
            return self.first_row[boxes]
        found = self._rows_by_holder
        return np.array([found[box, holder] for box in boxes.tolist()], np.int64)


@dataclass(frozen=True)
class Pairing:
    """The cells of one kind of block between two layouts, ordered by flow.

    A flow is a run of cells of one parameter with the same holders on both sides, or the n-th
    chunks of those that were cut; flow f has the cells [start[f], start[f + 1]). `flow_bytes`
    counts its bytes on the wire.
    """

    parameters: tuple[Parameter, ...]
    source: Pieces
    destination: Pieces
    parameter: Ints
    low: Ints
    high: Ints
    source_box: Ints
    destination_box: Ints
    start: Ints
    flow_source: Ints
    flow_destination: Ints
    flow_bytes: Ints

    def __post_init__(self) -> None:
        _freeze(self)

    @property
    def num_flows(self) -> int:
        """Number of flows."""
        return len(self.flow_bytes)

    @cached_property
    def group_pairs(self) -> tuple[list[tuple[int, int]], list[int], list[int]]:
        """(distinct pairs of source and destination groups, each pair's bytes, each flow's pair).

        Flows of one pair may always travel alike.
        """
        groups = 1 + int(self.flow_destination.max(initial=0))
        keys, of_flow = np.unique(
            self.flow_source * groups + self.flow_destination, return_inverse=True
        )
        total = np.zeros(len(keys), np.int64)
        np.add.at(total, of_flow, self.flow_bytes)
        return [divmod(key, groups) for key in keys.tolist()], total.tolist(), of_flow.tolist()

    def cells(self, flow: int) -> slice:
        """The cells of a flow."""
        return slice(int(self.start[flow]), int(self.start[flow + 1]))


def pair(
    parameters: Sequence[Parameter],
    source: Sequence[BlockLayout],
    destination: Sequence[BlockLayout],
    policy_bytes: int,
    chunk_bytes: int,
) -> Pairing:
    """The cells between the sites of one kind of block on both sides.

    `parameters` are the destination's. Cells of more than `chunk_bytes` are cut along their first
    dims until none is larger, so that all can be shared out. Elements that nobody holds on the
    source side are in no cell: the proof names them.
    """
    shapes = [parameter.shape for parameter in parameters]
    shapes += [t.shape for template in (*source, *destination) for t in template.tensors]
    dims = max(map(len, shapes), default=1)
    numbers = {parameter.name: i for i, parameter in enumerate(parameters)}
    ours, theirs = _pieces(source, numbers, dims), _pieces(destination, numbers, dims)
    width = widths(parameters, policy_bytes)
    owner, low, high, left, right = _intersections(len(parameters), ours, theirs)
    owner, low, high, left, right, chunk = _chunked(
        owner, low, high, left, right, width, chunk_bytes
    )
    source_group, destination_group = ours.groups[1][left], theirs.groups[1][right]
    order = np.lexsort((left, right, chunk, destination_group, source_group, owner))
    keys = np.stack([owner, source_group, destination_group, chunk], axis=1)[order]
    new = np.ones(len(keys), bool)
    new[1:] = (keys[1:] != keys[:-1]).any(axis=1)
    start = np.append(np.flatnonzero(new), len(keys)).astype(np.int64)
    low, high = low[order], high[order]
    size = (high - low).prod(axis=1) * width[owner[order]]
    total = np.concatenate([[0], np.cumsum(size)])
    first = start[:-1]
    return Pairing(
        parameters=tuple(parameters),
        source=ours,
        destination=theirs,
        parameter=owner[order],
        low=low,
        high=high,
        source_box=left[order],
        destination_box=right[order],
        start=start,
        flow_source=keys[first, 1],
        flow_destination=keys[first, 2],
        flow_bytes=total[start[1:]] - total[first],
    )


def widths(parameters: Sequence[Parameter], policy_bytes: int) -> Ints:
    """Bytes of an element of each parameter."""
    return np.array([element_bytes(p, policy_bytes) for p in parameters], np.int64)


def padded(box: Box, dims: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(first, end) indices of a box, with leading dims of one index put in front.

    >>> padded(((2, 4), (0, 8)), 3)
    ((0, 2, 0), (1, 4, 8))
    """
    lacking = dims - len(box)
    return (0,) * lacking + tuple(a for a, _ in box), (1,) * lacking + tuple(b for _, b in box)


class _Row(NamedTuple):
    """One piece of one shard."""

    parameter: int
    low: tuple[int, ...]
    high: tuple[int, ...]
    at: tuple[int, ...]
    site: int
    tensor: int
    shard: int
    piece: int
    holders: tuple[int, ...]


def _pieces(sites: Sequence[BlockLayout], numbers: Mapping[str, int], dims: int) -> Pieces:
    """All pieces of the parameters in `numbers`; overlapping boxes are cut to be equal or apart."""
    found: dict[int, list[_Row]] = {}
    for site, template in enumerate(sites):
        for t, tensor in enumerate(template.tensors):
            for s, shard in enumerate(tensor.shards):
                for p, piece in enumerate(shard.pieces):
                    number = numbers.get(piece.tensor)
                    if number is not None:
                        low, high = padded(piece.box, dims)
                        at = (0,) * (dims - len(piece.at)) + piece.at
                        found.setdefault(number, []).append(
                            _Row(number, low, high, at, site, t, s, p, shard.holders)
                        )
    rows = [row for number in sorted(found) for row in _disjoint(found[number])]
    count = len(rows)
    boxes: dict[tuple[int, tuple[int, ...], tuple[int, ...]], int] = {}
    box = [boxes.setdefault((r.parameter, r.low, r.high), len(boxes)) for r in rows]

    def column(values: list[int]) -> Ints:
        return np.array(values, np.int64)

    def table(values: list[tuple[int, ...]]) -> Ints:
        return np.array(values, np.int64).reshape(count, dims)

    return Pieces(
        parameter=column([r.parameter for r in rows]),
        low=table([r.low for r in rows]),
        high=table([r.high for r in rows]),
        at=table([r.at for r in rows]),
        site=column([r.site for r in rows]),
        tensor=column([r.tensor for r in rows]),
        shard=column([r.shard for r in rows]),
        piece=column([r.piece for r in rows]),
        box=column(box),
        holders=tuple(r.holders for r in rows),
    )


def _disjoint(rows: list[_Row]) -> list[_Row]:
    """The rows of one parameter, cut where boxes overlap that are not equal."""
    boxes = list(dict.fromkeys((row.low, row.high) for row in rows))
    low = np.array([low for low, _ in boxes], np.int64)
    high = np.array([high for _, high in boxes], np.int64)
    if sum(len(i) for i, _ in _overlaps(low, high, low, high)) == len(boxes):  # with themselves
        return rows
    parts: dict[Box, list[Box]] = {}
    for cell, box in cut(tuple(zip(low, high, strict=True)) for low, high in boxes):
        parts.setdefault(box, []).append(cell)
    finer = []
    for row in rows:
        for cell in parts[tuple(zip(row.low, row.high, strict=True))]:
            first = tuple(a for a, _ in cell)
            at = tuple(o + a - b for o, a, b in zip(row.at, first, row.low, strict=True))
            finer.append(row._replace(low=first, high=tuple(b for _, b in cell), at=at))
    return finer


def _overlaps(low: Ints, high: Ints, lower: Ints, higher: Ints) -> Iterator[tuple[Ints, Ints]]:
    """(i, j) for which box i of the first and box j of the second overlap, some i at a time."""
    for start in range(0, len(low), BATCH):
        first, end = low[start : start + BATCH, None], high[start : start + BATCH, None]
        shared = (np.minimum(end, higher[None]) > np.maximum(first, lower[None])).all(axis=2)
        i, j = np.nonzero(shared)
        yield i + start, j


def _intersections(
    num_parameters: int, ours: Pieces, theirs: Pieces
) -> tuple[Ints, Ints, Ints, Ints, Ints]:
    """(parameter, low, high, source box, destination box) of every overlap of distinct boxes."""
    left, right = ours.first_row, theirs.first_row
    parts = []
    for number in range(num_parameters):
        a = left[ours.parameter[left] == number]
        b = right[theirs.parameter[right] == number]
        for i, j in _overlaps(ours.low[a], ours.high[a], theirs.low[b], theirs.high[b]):
            x, y = a[i], b[j]
            low = np.maximum(ours.low[x], theirs.low[y])
            high = np.minimum(ours.high[x], theirs.high[y])
            owner = np.full(len(i), number, np.int64)
            parts.append((owner, low, high, ours.box[x], theirs.box[y]))
    if not parts:
        empty, boxes = np.zeros(0, np.int64), np.zeros((0, ours.low.shape[1]), np.int64)
        return empty, boxes, boxes, empty, empty
    owner, low, high, i, j = (np.concatenate(part) for part in zip(*parts, strict=True))
    return owner, low, high, i, j


def _chunked(
    owner: Ints, low: Ints, high: Ints, left: Ints, right: Ints, width: Ints, chunk_bytes: int
) -> tuple[Ints, Ints, Ints, Ints, Ints, Ints]:
    """Cells of more than `chunk_bytes` cut into even parts, dim by dim from the first on.

    The last array numbers the chunks of a cell.
    """
    cell = np.arange(len(owner), dtype=np.int64)
    for dim in range(low.shape[1]):
        extent = high[:, dim] - low[:, dim]
        one_index = (high - low).prod(axis=1) // extent * width[owner[cell]]
        most = np.maximum(chunk_bytes // one_index, 1)
        parts = -(-extent // most)
        if not len(parts) or parts.max() <= 1:
            continue
        index = np.repeat(np.arange(len(parts)), parts)
        number = np.arange(len(index)) - np.repeat(np.cumsum(parts) - parts, parts)
        first, span, count = low[index, dim], extent[index], parts[index]
        cell, low, high = cell[index], low[index], high[index]
        low[:, dim] = first + number * span // count
        high[:, dim] = first + (number + 1) * span // count
    begin = np.searchsorted(cell, cell)  # chunks of a cell stand in a row
    chunk = np.arange(len(cell), dtype=np.int64) - begin
    return owner[cell], low, high, left[cell], right[cell], chunk
