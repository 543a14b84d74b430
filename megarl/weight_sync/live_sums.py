"""The checksums of what a rank's live tensors hold, piece by piece, sync after sync.

Owns what of summing is kept between syncs. Knows nothing of learners, servers or transports.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from megarl.reshard.layout import Piece
from megarl.weight_sync import checksum_host, checksum_triton
from megarl.weight_sync.batches import addresses
from megarl.weight_sync.checksum_triton import BoxValues

BoxOf = Callable[[Piece], BoxValues]
AnySummation = checksum_host.Summation | checksum_triton.Summation


@dataclass(frozen=True, slots=True)
class Sums:
    """The sum of each piece, in order, and the numbers of those that are not all finite.

    `not_finite` is None where the sums were made in a way that does not tell.
    """

    totals: tuple[int, ...]
    not_finite: tuple[int, ...] | None


class LiveSums:
    """Sums of pieces of one set of tensors. Tables are made once for what stays.

    On a host `threads` share the work.
    """

    def __init__(self, threads: int = 1) -> None:
        self._threads = threads
        self._kept: tuple[object, dict[int, int], AnySummation | None] | None = None

    def of(
        self,
        pieces: Sequence[Piece],
        tensors: Mapping[str, torch.Tensor],
        box_of: BoxOf,
        key: object = None,
    ) -> Sums:
        """The sums of all pieces; `box_of` gives the values of one as they travel.

        They are asked for one after the other where they are copies. Equal keys stand for equal
        pieces.
        """
        device = next(iter(tensors.values())).device
        on_gpu = checksum_triton.pays(device)
        on_host = not on_gpu and checksum_host.pays(device)
        if not on_host and not on_gpu:
            one_by_one = (checksum_triton.box_checksums([box_of(piece)])[0] for piece in pieces)
            return Sums(tuple(one_by_one), None)
        here = (key, addresses(tensors))
        if self._kept is None or self._kept[0] != here:
            self._kept = (here, *self._prepare(pieces, tensors, box_of, on_host))
        _, lasting, summation = self._kept
        totals: dict[int, int] = {}
        wrong: set[int] = set()
        if summation is not None:
            found, bad = _look(summation)
            totals = {index: found[number] for index, number in lasting.items()}
            wrong = {index for index, number in lasting.items() if number in bad}
        for index, piece in enumerate(pieces):
            if index not in lasting:
                found, bad = _look(self._summation([box_of(piece)], on_host))
                totals[index] = found[0]
                wrong |= {index} if bad else set()
        in_order = tuple(totals[index] for index in range(len(pieces)))
        return Sums(in_order, tuple(sorted(wrong)) if on_host else None)

    def _summation(self, boxes: Sequence[BoxValues], on_host: bool) -> AnySummation:
        if on_host:
            return checksum_host.Summation(boxes, self._threads)
        return checksum_triton.Summation(boxes)

    def _prepare(
        self,
        pieces: Sequence[Piece],
        tensors: Mapping[str, torch.Tensor],
        box_of: BoxOf,
        on_host: bool,
    ) -> tuple[dict[int, int], AnySummation | None]:
        """Which pieces are summed where they lie, without a copy, and their summation."""
        lasting: dict[int, int] = {}
        boxes: list[BoxValues] = []
        for index, piece in enumerate(pieces):
            box, whole = box_of(piece), tensors[piece.local]
            in_place = box.values.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr()
            if in_place and not (on_host and not checksum_host.is_readable(box.values)):
                lasting[index] = len(boxes)
                boxes.append(box)
        return lasting, self._summation(boxes, on_host) if boxes else None


def _look(summation: AnySummation) -> tuple[list[int], frozenset[int]]:
    if isinstance(summation, checksum_host.Summation):
        totals, not_finite = summation.look()
        return totals, frozenset(not_finite)
    return summation.run(), frozenset()
