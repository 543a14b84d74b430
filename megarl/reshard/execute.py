"""Carry out moves between arrays of one process: numpy arrays and torch tensors alike.

Needs of an array only basic slices, and assignment into one; it imports neither.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from megarl.reshard.layout import Box, RankLayout, local_box
from megarl.reshard.proof import Move


def run(moves: Iterable[Move], sources: Mapping[str, Any], destinations: Mapping[str, Any]) -> None:
    """Copy each move's box from `sources` (one rank's arrays by local name) into `destinations`.

    All moves are of one source and one destination rank; `Plan.between` gives them. A torch
    destination that requires gradients needs `torch.no_grad()` around the call.
    """
    for move in moves:
        source = sources[move.src_local][slices(local_box(move.box, move.src_at))]
        destinations[move.dst_local][slices(local_box(move.box, move.dst_at))] = source


def clear_paddings(rank: RankLayout, arrays: Mapping[str, Any]) -> None:
    """Set to zero what belongs to no parameter."""
    for padding in rank.paddings:
        arrays[padding.local][slices(padding.box)] = 0


def slices(box: Box) -> tuple[slice, ...]:
    """A box as an index.

    >>> slices(((0, 2), (4, 8)))
    (slice(0, 2, None), slice(4, 8, None))
    """
    return tuple(slice(start, end) for start, end in box)
