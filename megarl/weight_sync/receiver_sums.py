"""The checksums of what a server rank's live tensors hold after a sync, piece by piece.

Owns what of summing is kept between syncs. Knows nothing of how the weights came.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from megarl.errors import WeightSyncError
from megarl.reshard import execute
from megarl.reshard.layout import Piece
from megarl.weight_sync import checksum_triton
from megarl.weight_sync.batches import addresses
from megarl.weight_sync.checksum_triton import BoxValues, Summation
from megarl.weight_sync.route import Route


class LiveSums:
    """Sums of a route's pieces. On a GPU its tables are made once for tensors that stay."""

    def __init__(self) -> None:
        self._kept: tuple[object, dict[int, None], Summation] | None = None

    def of(self, tensors: Mapping[str, torch.Tensor], route: Route) -> list[int]:
        """The sum of each piece, in order, in the types in which they travel.

        Raises WeightSyncError where a server's wider type holds what that type cannot.
        """
        if not checksum_triton.pays(next(iter(tensors.values())).device):
            return checksum_triton.box_checksums([_sent(p, tensors, route) for p in route.pieces])
        key = (route.digest, addresses(tensors))
        if self._kept is None or self._kept[0] != key:
            self._kept = (key, *_prepare(tensors, route))
        _, lasting, summation = self._kept
        found = dict(zip(lasting, summation.run(), strict=True))
        others = [i for i in range(len(route.pieces)) if i not in found]
        boxes = [_sent(route.pieces[i], tensors, route) for i in others]
        found.update(zip(others, checksum_triton.box_checksums(boxes), strict=True))
        return [found[i] for i in range(len(route.pieces))]


def _prepare(
    tensors: Mapping[str, torch.Tensor], route: Route
) -> tuple[dict[int, None], Summation]:
    """The pieces that are summed where they lie, without a copy, and their summation."""
    lasting: dict[int, BoxValues] = {}
    for index, piece in enumerate(route.pieces):
        box, whole = _sent(piece, tensors, route), tensors[piece.local]
        if box.values.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr():
            lasting[index] = box
    return dict.fromkeys(lasting), Summation(list(lasting.values()))


def _sent(piece: Piece, tensors: Mapping[str, torch.Tensor], route: Route) -> BoxValues:
    """What one piece now is, in the type in which it travels.

    Raises WeightSyncError where the server's wider type holds what that type cannot.
    """
    values = execute.held(piece, tensors)
    sent = values.to(route.wire.of(piece.tensor))
    if sent.dtype != values.dtype and not torch.equal(sent.to(values.dtype), values):
        raise WeightSyncError(
            f"{piece.tensor} {piece.box}: the server holds {values.dtype} values that did not "
            f"come as {sent.dtype}; nothing else may write to {piece.local}"
        )
    return BoxValues(sent, piece.tensor, route.shapes[piece.tensor], piece.box)
