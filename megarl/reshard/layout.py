"""A layout: for each rank, which box of which global tensor it holds, in which local tensor, where.

Owns boxes, pieces and what follows from them alone: digest, atoms, disjoint cover. Knows nothing of
Megatron, SGLang or files; to this module they are all layouts.
"""

from __future__ import annotations

import hashlib
import itertools
import math
from bisect import bisect_left
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property

from megarl.actor.parameters import Parameter

Box = tuple[tuple[int, int], ...]
"""Half-open intervals, one for each dim."""


@dataclass(frozen=True, slots=True)
class LocalTensor:
    """One tensor that a rank holds, under the rank's own name for it."""

    name: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Piece:
    """Global `box` of parameter `tensor` lies in tensor `local` from offset `at` on, per dim."""

    tensor: str
    box: Box
    local: str
    at: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Padding:
    """Elements of `local` (a local box) that belong to no parameter: they must be zero."""

    local: str
    box: Box


@dataclass(frozen=True, slots=True)
class RankLayout:
    """All that one rank holds; pieces and paddings tile its tensors exactly."""

    rank: int
    tensors: tuple[LocalTensor, ...]
    pieces: tuple[Piece, ...]
    paddings: tuple[Padding, ...] = ()


@dataclass(frozen=True)
class Layout:
    """`parameters` laid out over `ranks`, in rank order. `kind` says whose layout it is."""

    kind: str
    parameters: tuple[Parameter, ...]
    ranks: tuple[RankLayout, ...]

    @cached_property
    def digest(self) -> str:
        """SHA-256 over everything in the layout: equal digests are equal layouts."""
        total = hashlib.sha256(repr((self.kind, self.parameters)).encode())
        seen: dict[int, bytes] = {}  # replicas share their tuples
        for rank in self.ranks:
            total.update(b"rank %d" % rank.rank)
            for part in (rank.tensors, rank.pieces, rank.paddings):
                if id(part) not in seen:
                    seen[id(part)] = hashlib.sha256(repr(part).encode()).digest()
                total.update(seen[id(part)])
        return total.hexdigest()


def overlap(a: Box, b: Box) -> Box | None:
    """The region that two boxes share, or None.

    >>> overlap(((0, 4), (0, 8)), ((2, 6), (0, 8)))
    ((2, 4), (0, 8))
    >>> overlap(((0, 2),), ((2, 4),)) is None
    True
    """
    shared = []
    for (a_start, a_end), (b_start, b_end) in zip(a, b, strict=True):
        start, end = max(a_start, b_start), min(a_end, b_end)
        if start >= end:
            return None
        shared.append((start, end))
    return tuple(shared)


def num_elements(box: Box) -> int:
    """Elements in a box.

    >>> num_elements(((2, 4), (0, 8)))
    16
    """
    return math.prod(end - start for start, end in box)


def whole(shape: tuple[int, ...]) -> Box:
    """The box of a whole tensor."""
    return tuple((0, size) for size in shape)


def local_box(box: Box, at: tuple[int, ...]) -> Box:
    """Where `box` lies in a local tensor that holds it from offset `at` on.

    >>> local_box(((6, 8), (0, 4)), (1, 0))
    ((1, 3), (0, 4))
    """
    return tuple((o, o + end - start) for (start, end), o in zip(box, at, strict=True))


def offset_in(piece: Piece, box: Box) -> tuple[int, ...]:
    """The local offset of `box`, a part of `piece.box`."""
    return tuple(
        at + start - origin
        for at, (start, _), (origin, _) in zip(piece.at, box, piece.box, strict=True)
    )


@dataclass(frozen=True, slots=True)
class Holder:
    """One place that holds an atom: tensor `local` of `rank` from offset `at` on."""

    rank: int
    local: str
    at: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Atom:
    """A box of one tensor whose elements all have the same holders, and those holders."""

    tensor: str
    box: Box
    holders: tuple[Holder, ...]


def atoms(layout: Layout) -> dict[str, tuple[Atom, ...]]:
    """For each parameter, its pieces cut so that they are equal or disjoint, with their holders."""
    found: dict[str, dict[Box, list[tuple[int, Piece]]]] = {
        parameter.name: {} for parameter in layout.parameters
    }
    for rank in layout.ranks:
        for piece in rank.pieces:
            found[piece.tensor].setdefault(piece.box, []).append((rank.rank, piece))
    result = {}
    for tensor, by_box in found.items():
        cells: dict[Box, list[Holder]] = {}
        for cell, box in cut(by_box):
            for rank_id, piece in by_box[box]:
                cells.setdefault(cell, []).append(
                    Holder(rank_id, piece.local, offset_in(piece, cell))
                )
        result[tensor] = tuple(Atom(tensor, box, tuple(cells[box])) for box in sorted(cells))
    return result


def cut(boxes: Iterable[Box]) -> Iterator[tuple[Box, Box]]:
    """(cell, box) pairs: each box cut where any box begins or ends; cells are equal or disjoint.

    >>> list(cut([((0, 4),), ((2, 6),)]))
    [(((0, 2),), ((0, 4),)), (((2, 4),), ((0, 4),)), (((2, 4),), ((2, 6),)), (((4, 6),), ((2, 6),))]
    """
    boxes = list(boxes)
    if not boxes:
        return
    cuts = [sorted({edge for box in boxes for edge in box[dim]}) for dim in range(len(boxes[0]))]
    for box in boxes:
        spans = []
        for edges, (start, end) in zip(cuts, box, strict=True):
            part = edges[bisect_left(edges, start) : bisect_left(edges, end) + 1]
            spans.append(list(itertools.pairwise(part)))
        for cell in itertools.product(*spans):
            yield cell, box


def disjoint_cover(layout: Layout) -> tuple[tuple[Piece, ...], ...]:
    """For each rank, pieces such that every global element is in exactly one piece of one rank.

    Replicas take turns, so that work done over the cover (a checksum) is shared among them.
    """
    position = {rank.rank: index for index, rank in enumerate(layout.ranks)}
    cover: list[list[Piece]] = [[] for _ in layout.ranks]
    turns: dict[tuple[int, ...], int] = {}
    for tensor_atoms in atoms(layout).values():
        for atom in tensor_atoms:
            group = tuple(holder.rank for holder in atom.holders)
            turn = turns.get(group, 0)
            turns[group] = turn + 1
            holder = atom.holders[turn % len(group)]
            piece = Piece(atom.tensor, atom.box, holder.local, holder.at)
            cover[position[holder.rank]].append(piece)
    return tuple(tuple(pieces) for pieces in cover)


def full_layout(parameters: tuple[Parameter, ...], kind: str = "whole tensors") -> Layout:
    """One rank that holds every parameter whole, under its Hugging Face name."""
    tensors = tuple(LocalTensor(p.name, p.shape) for p in parameters)
    pieces = tuple(Piece(p.name, whole(p.shape), p.name, (0,) * len(p.shape)) for p in parameters)
    return Layout(kind, parameters, (RankLayout(0, tensors, pieces),))
