"""The checksums of what a rank's live tensors hold, piece by piece, sync after sync.

Owns what of summing is kept between syncs. Knows nothing of learners, servers or transports.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from megarl.reshard.layout import Piece
from megarl.weight_sync import checksum_triton
from megarl.weight_sync.batches import addresses
from megarl.weight_sync.checksum_triton import BoxValues, Summation


class LiveSums:
    """Sums of pieces of one set of tensors. On a GPU tables are made once for what stays."""

    def __init__(self) -> None:
        self._kept: tuple[object, dict[int, int], Summation | None] | None = None

    def of(
        self,
        pieces: Sequence[Piece],
        tensors: Mapping[str, torch.Tensor],
        box_of: Callable[[Piece], BoxValues],
        key: object = None,
    ) -> list[int]:
        """The sum of each piece, in order; `box_of` gives its values as they travel.

        They are asked for one after the other where they are copies. Equal keys stand for equal
        pieces.
        """
        if not checksum_triton.pays(next(iter(tensors.values())).device):
            return [checksum_triton.box_checksums([box_of(piece)])[0] for piece in pieces]
        here = (key, addresses(tensors))
        if self._kept is None or self._kept[0] != here:
            self._kept = (here, *_prepare(pieces, tensors, box_of))
        _, lasting, summation = self._kept
        found = summation.run() if summation is not None else []
        return [
            found[lasting[index]]
            if index in lasting
            else checksum_triton.box_checksums([box_of(piece)])[0]
            for index, piece in enumerate(pieces)
        ]


def _prepare(
    pieces: Sequence[Piece],
    tensors: Mapping[str, torch.Tensor],
    box_of: Callable[[Piece], BoxValues],
) -> tuple[dict[int, int], Summation | None]:
    """Which pieces are summed where they lie, without a copy, and their summation."""
    lasting: dict[int, int] = {}
    boxes: list[BoxValues] = []
    for index, piece in enumerate(pieces):
        box, whole = box_of(piece), tensors[piece.local]
        if box.values.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr():
            lasting[index] = len(boxes)
            boxes.append(box)
    return lasting, Summation(boxes) if boxes else None
