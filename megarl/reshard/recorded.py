"""Layouts read off an engine's own loader: from where each element came to pieces.

Owns the way from arrays of numbers to boxes. The loader is run elsewhere
(megarl.compat.sglang_loader_map) with checkpoint tensors that hold their elements' numbers
(`numbering.py`); what it leaves on a rank says where each element came from. This serves models
that have no family table, and checks the tables of those that have.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from megarl.actor.parameters import Parameter
from megarl.errors import LayoutError
from megarl.reshard.execute import slices
from megarl.reshard.explicit import explicit_layout, one_block
from megarl.reshard.layout import Box, Layout, LocalTensor, Padding, Piece, RankLayout
from megarl.reshard.numbering import PADDING, UNWRITTEN, Numbering, Numbers

MAX_PIECES = 4096  # of one local tensor; a transposed one would have a piece for each element


def recorded_rank(rank: int, held: Mapping[str, Numbers], numbering: Numbering) -> RankLayout:
    """What a rank holds, from the numbers in each of its local tensors.

    Raises LayoutError where the loader left elements as they were, and where a tensor does not fall
    into boxes.
    """
    tensors: list[LocalTensor] = []
    pieces: list[Piece] = []
    paddings: list[Padding] = []
    for name, numbers in held.items():
        more, rest = boxes(name, numbers, numbering)
        tensors.append(LocalTensor(name, numbers.shape))
        pieces += more
        paddings += rest
    return RankLayout(rank, tuple(tensors), tuple(pieces), tuple(paddings))


def boxes(
    local: str, numbers: Numbers, numbering: Numbering
) -> tuple[tuple[Piece, ...], tuple[Padding, ...]]:
    """The fewest boxes found greedily that say where each element of `numbers` came from.

    A box is grown from the first element that is in none, along the last dim first. They tile the
    tensor by construction.

    >>> numbering = Numbering({"up": (4, 2)})
    >>> numbers = np.array([[5, 6], [7, 8], [0, 0]])
    >>> boxes("fc1", numbers, numbering)[0]
    (Piece(tensor='up', box=((2, 4), (0, 2)), local='fc1', at=(0, 0)),)
    """
    free = np.ones(numbers.shape, bool)
    pieces: list[Piece] = []
    paddings: list[Padding] = []
    while free.any():
        if len(pieces) + len(paddings) == MAX_PIECES:
            raise LayoutError(
                f"{local} {numbers.shape} does not fall into {MAX_PIECES} boxes of checkpoint "
                "tensors; the loader transposes or permutes it, which a layout cannot say"
            )
        at = tuple(int(i) for i in np.unravel_index(int(free.argmax()), free.shape))
        number = int(numbers[at])
        if number == UNWRITTEN:
            raise LayoutError(
                f"{local}: the loader left the element at {at} as it was; leave the tensor out, or "
                "give it a checkpoint that has it"
            )
        if number == PADDING:
            sizes = _grow(numbers, free, at, (0,) * len(at), numbers.shape)
            paddings.append(Padding(local, _span(at, sizes)))
        else:
            piece, sizes = _piece(local, numbers, free, at, numbering)
            pieces.append(piece)
        free[slices(_span(at, sizes))] = False
    return tuple(pieces), tuple(paddings)


def _piece(
    local: str,
    numbers: Numbers,
    free: np.ndarray[Any, np.dtype[np.bool_]],
    at: tuple[int, ...],
    numbering: Numbering,
) -> tuple[Piece, tuple[int, ...]]:
    """The largest piece from `at` on, and its size along the local dims."""
    found = numbering.find(int(numbers[at]))
    if found is None:
        raise LayoutError(
            f"{local}: {numbers[at]} is the number of no element: they go from 1 to "
            f"{numbering.last}. The loader computes with what it loads, so that it cannot be "
            "recorded"
        )
    name, index = found
    shape = numbering.shapes[name]
    shared = min(len(at), len(shape))
    lacking, added = len(shape) - shared, len(at) - shared
    strides = tuple(math.prod(shape[dim + 1 :]) for dim in range(lacking, len(shape)))
    left = tuple(shape[dim] - index[dim] for dim in range(lacking, len(shape)))
    sizes = _grow(numbers, free, at, (0,) * added + strides, (1,) * added + left)
    box = (*((i, i + 1) for i in index[:lacking]), *_span(index[lacking:], sizes[added:]))
    return Piece(name, box, local, at), sizes


def _grow(
    numbers: Numbers,
    free: np.ndarray[Any, np.dtype[np.bool_]],
    at: tuple[int, ...],
    strides: Sequence[int],
    limits: Sequence[int],
) -> tuple[int, ...]:
    """How far the numbers go on from `at` by `strides` through free elements, up to `limits`."""
    sizes = [1] * len(at)
    for dim in reversed(range(len(at))):
        most = min(limits[dim], numbers.shape[dim] - at[dim])
        sizes[dim] = most
        place = slices(_span(at, tuple(sizes)))
        slab = np.moveaxis(numbers[place], dim, 0)
        steps = np.arange(most, dtype=np.int64).reshape(-1, *(1,) * (slab.ndim - 1))
        goes_on = (slab == slab[:1] + steps * strides[dim]) & np.moveaxis(free[place], dim, 0)
        stops = ~goes_on.reshape(most, -1).all(axis=1)
        sizes[dim] = int(stops.argmax()) if stops.any() else most
    return tuple(sizes)


def _span(at: Sequence[int], sizes: Sequence[int]) -> Box:
    return tuple((start, start + size) for start, size in zip(at, sizes, strict=True))


def to_json(kind: str, numbering: Numbering, ranks: Sequence[RankLayout]) -> str:
    """A recorded layout as text; `from_json` is the inverse."""
    return json.dumps(
        {
            "kind": kind,
            "shapes": numbering.shapes,
            "ranks": [
                {
                    "rank": rank.rank,
                    "tensors": [[t.name, t.shape] for t in rank.tensors],
                    "pieces": [[p.tensor, p.box, p.local, p.at] for p in rank.pieces],
                    "paddings": [[p.local, p.box] for p in rank.paddings],
                }
                for rank in ranks
            ],
        }
    )


def from_json(text: str) -> Layout:
    """The layout in a text of `to_json`; its parameters are one block."""
    found = json.loads(text)
    ranks = [
        RankLayout(
            rank["rank"],
            tuple(LocalTensor(name, tuple(shape)) for name, shape in rank["tensors"]),
            tuple(Piece(t, _box(box), local, tuple(at)) for t, box, local, at in rank["pieces"]),
            tuple(Padding(local, _box(box)) for local, box in rank["paddings"]),
        )
        for rank in found["ranks"]
    ]
    parameters = tuple(Parameter(name, tuple(s), name) for name, s in found["shapes"].items())
    return explicit_layout(found["kind"], one_block(parameters), ranks)


def _box(found: Sequence[Sequence[int]]) -> Box:
    return tuple((start, end) for start, end in found)
