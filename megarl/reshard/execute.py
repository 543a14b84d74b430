"""Carry out moves between arrays of one process: numpy arrays and torch tensors alike.

Needs of an array only basic slices, and assignment into one; it imports neither.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from megarl.reshard.layout import Box, Piece, RankLayout, local_box
from megarl.reshard.moves import Move


def run(moves: Iterable[Move], sources: Mapping[str, Any], destinations: Mapping[str, Any]) -> None:
    """Copy each move's box from `sources` (one rank's arrays by local name) into `destinations`.

    All moves are of one source and one destination rank; `Plan.between` gives them. A torch
    destination that requires gradients needs `torch.no_grad()` around the call. Where the tensors
    of one expert have fewer dims than those of several, the leading dim comes or goes.
    """
    for move in moves:
        written(move, destinations)[...] = read(move, sources)


def read(move: Move, sources: Mapping[str, Any]) -> Any:
    """The view of the source's array that a move copies from."""
    box, spare = local_box(move.box, move.src_at), len(move.src_at) - len(move.dst_at)
    return sources[move.src_local][_indexed(slices(box), spare)]


def written(move: Move, destinations: Mapping[str, Any]) -> Any:
    """The view of the destination's array that a move copies into, of the shape of `read`'s."""
    box, spare = local_box(move.box, move.dst_at), len(move.dst_at) - len(move.src_at)
    return destinations[move.dst_local][_indexed(slices(box), spare)]


def held(piece: Piece, arrays: Mapping[str, Any]) -> Any:
    """The view of one rank's array that holds a piece, of the shape of the piece's box."""
    view = arrays[piece.local][slices(local_box(piece.box, piece.at))]
    return view.reshape(tuple(end - start for start, end in piece.box))


def clear_paddings(rank: RankLayout, arrays: Mapping[str, Any]) -> None:
    """Set to zero what belongs to no parameter."""
    for padding in rank.paddings:
        arrays[padding.local][slices(padding.box)] = 0


def _indexed(index: tuple[slice, ...], spare: int) -> tuple[slice | int, ...]:
    """The index with its first `spare` dims, each of one element, left out of the result."""
    return tuple(part.start if dim < spare else part for dim, part in enumerate(index))


def slices(box: Box) -> tuple[slice, ...]:
    """A box as an index.

    >>> slices(((0, 2), (4, 8)))
    (slice(0, 2, None), slice(4, 8, None))
    """
    return tuple(slice(start, end) for start, end in box)
