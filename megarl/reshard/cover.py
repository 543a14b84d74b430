"""What a rank holds, cut so that pieces of different ranks are equal or disjoint.

Owns the cuts, and whose turn it is where several ranks hold the same. They are made once for each
kind of block and written out for one rank at a time: layers are alike, and a sync asks for a few
ranks of hundreds. The order is the same in every process.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from megarl.reshard.layout import BlockLayout, Box, Layout, Piece, cut, offset_in


@dataclass(frozen=True, slots=True)
class _Holder:
    """Who holds a cell: a position in the stage of one of the block's sites, and in what."""

    site: int
    position: int
    local: str
    at: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Cell:
    """A box of one parameter of a kind of block. It is cell `turn` of `turns` with its holders."""

    tensor: str
    box: Box
    holders: tuple[_Holder, ...]
    turn: int
    turns: int


@dataclass(frozen=True, slots=True)
class _Cells:
    """The cells of a kind of block, by parameter and box; and by (site, position) what is there:
    (number of the cell, place among its holders)."""

    cells: tuple[_Cell, ...]
    at: Mapping[tuple[int, int], Sequence[tuple[int, int]]]


class Cover:
    """The cells of a layout, of which ranks hold one whole or not at all."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._sites: list[list[int]] = [[] for _ in layout.table.blocks]
        for number, site in enumerate(layout.sites):
            self._sites[site.block].append(number)
        self._cells: dict[tuple[str, tuple[int, ...]], _Cells] = {}

    def held(self, rank: int) -> tuple[Piece, ...]:
        """All that a rank holds, by block, parameter and box."""
        return tuple(piece for piece, _ in self._of(rank))

    def share(self, rank: int) -> tuple[Piece, ...]:
        """A rank's part of everything: each element is in one piece of the share of one rank.

        Copies take turns, so that work done over shares (a checksum) is divided among them.
        """
        return tuple(piece for piece, mine in self._of(rank) if mine)

    def _of(self, rank: int) -> Iterator[tuple[Piece, bool]]:
        """A rank's pieces, and for each whether it is this rank's turn."""
        layout = self._layout
        stages = [[i for i, r in enumerate(stage) if r == rank] for stage in layout.stages]
        for number, block in enumerate(layout.table.blocks):
            sites = [layout.sites[site] for site in self._sites[number]]
            here = [
                (i, position) for i, site in enumerate(sites) for position in stages[site.stage]
            ]
            if not here:
                continue
            known = self._cells_of(number)
            for index, place in sorted(found for at in here for found in known.at.get(at, ())):
                cell = known.cells[index]
                holder = cell.holders[place]
                local = sites[holder.site].name(holder.local)
                turn = (number * cell.turns + cell.turn) % len(cell.holders)
                yield Piece(block.name(cell.tensor), cell.box, local, holder.at), place == turn

    def _cells_of(self, number: int) -> _Cells:
        """The cells of a block: those of all blocks of its kind that are held by like sites."""
        layout = self._layout
        kind = layout.table.blocks[number].kind
        key = (kind, tuple(layout.sites[site].template for site in self._sites[number]))
        if key not in self._cells:
            names = [parameter.name for parameter in layout.table.kinds[kind]]
            self._cells[key] = _cells(names, [layout.templates[template] for template in key[1]])
        return self._cells[key]


def _cells(names: Sequence[str], sites: Sequence[BlockLayout]) -> _Cells:
    """The cells of a kind of block; `names` are its parameters."""
    boxes: dict[str, dict[Box, list[tuple[tuple[int, int], Piece]]]] = {name: {} for name in names}
    for number, template in enumerate(sites):
        for tensor in template.tensors:
            for shard in tensor.shards:
                for piece in shard.pieces:
                    held = boxes[piece.tensor].setdefault(piece.box, [])
                    held += (((number, position), piece) for position in shard.holders)
    found: list[tuple[str, Box, tuple[_Holder, ...]]] = []
    for name, by_box in boxes.items():
        holders: dict[Box, list[_Holder]] = {}
        for part, box in cut(by_box):
            holders.setdefault(part, []).extend(
                _Holder(*at, piece.local, offset_in(piece, part)) for at, piece in by_box[box]
            )
        found += ((name, box, tuple(holders[box])) for box in sorted(holders))
    turns: dict[tuple[tuple[int, int], ...], int] = {}
    keys = [tuple((holder.site, holder.position) for holder in who) for _, _, who in found]
    numbers = []
    for key in keys:
        numbers.append(turns.get(key, 0))
        turns[key] = numbers[-1] + 1
    cells = tuple(
        _Cell(*cell, turn, turns[key]) for cell, turn, key in zip(found, numbers, keys, strict=True)
    )
    at: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for number, cell in enumerate(cells):
        for place, holder in enumerate(cell.holders):
            at.setdefault((holder.site, holder.position), []).append((number, place))
    return _Cells(cells, at)
