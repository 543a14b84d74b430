"""The additive checksum of many boxes in host memory, and whether all of it is finite: one pass.

Owns the tables that the compiled loop reads, and their division among threads. The sum is
`checksum`'s, whose numpy form is the oracle of this one, and what is used where nothing was
compiled.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from megarl.weight_sync import compiled, parts
from megarl.weight_sync.checksum import runs, tensor_id
from megarl.weight_sync.checksum_triton import BoxValues, check_box

_EXPONENTS = {torch.float32: 0x7F80_0000, torch.bfloat16: 0x7F80}
"""Bits that are all set in an infinity and in what is no number; not asked of other types."""
_ROW_BYTES = 1 << 20  # at most, of what is in a table's row
_ROWS = 4  # that a thread takes at once


def pays(device: torch.device) -> bool:
    """Whether the compiled loop sums what is on `device`."""
    return device.type == "cpu" and compiled.find() is not None


def is_readable(values: torch.Tensor) -> bool:
    """Whether the loop can read values where they lie, without a copy."""
    return values.shape[-1:].numel() < 2 or values.stride(-1) == 1


class Summation:
    """The checksums of some boxes, as often as wanted while no tensor moves, by so many threads.

    Raises ShapeError where values have not the shape of their box.
    """

    def __init__(self, boxes: Sequence[BoxValues], threads: int = 1) -> None:
        self._threads = threads
        self._num_boxes = len(boxes)
        self._kept: list[object] = []  # so that what the table points to stays
        rows: list[tuple[int, ...]] = []
        owners: list[int] = []
        for number, box in enumerate(boxes):
            rows += self._rows(box)
            owners += [number] * (len(rows) - len(owners))
        self._table = np.array(rows, np.uint64).reshape(-1, compiled.FIELDS)
        self._owners = np.array(owners, np.int64)

    def run(self) -> list[int]:
        """The checksum of what each box holds now, modulo 2^64."""
        return self.look()[0]

    def look(self) -> tuple[list[int], list[int]]:
        """The same, and the numbers of the boxes that hold something that is not finite."""
        library = compiled.find()
        assert library is not None, "ask `pays` first"
        sums, not_finite = self._in_parts(library)
        totals = np.zeros(self._num_boxes, np.uint64)
        np.add.at(totals, self._owners, sums)
        return totals.tolist(), np.unique(self._owners[not_finite]).tolist()

    def _in_parts(
        self, library: compiled.Library
    ) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.bool_]]:
        """Each row's sum, and whether it has something that is not finite."""
        if self._threads == 1:
            return library.sum_boxes(self._table)
        sums = np.empty(len(self._table), np.uint64)
        not_finite = np.empty(len(self._table), np.bool_)

        def sum_part(at: int) -> None:
            rows = slice(at, at + _ROWS)
            sums[rows], not_finite[rows] = library.sum_boxes(self._table[rows])

        starts = range(0, len(self._table), _ROWS)
        parts.run([partial(sum_part, at) for at in starts], self._threads)
        return sums, not_finite

    def _rows(self, box: BoxValues) -> Iterator[tuple[int, ...]]:
        """One box as rows of the table, none of them larger than `_ROW_BYTES`."""
        check_box(box)
        if 0 in box.values.shape:
            return
        values = box.values if is_readable(box.values) else box.values.contiguous()
        starts, length = runs(box.shape, box.box, values.stride())
        places, apart = _places(values, length)
        size, identity = values.element_size(), tensor_id(box.name)
        together = max(1, _ROW_BYTES // (length * size))  # runs in a row
        columns = min(length, _ROW_BYTES // size)
        begins = [np.ascontiguousarray(starts + np.uint64(c)) for c in range(0, length, columns)]
        self._kept += [values, *begins]
        exponent = _EXPONENTS.get(values.dtype, 0)
        for first, address in places:
            for run in range(0, apart.runs, together):
                for number, begin in enumerate(begins):
                    column = number * columns
                    yield (
                        address + (run * apart.stride + column) * size,
                        min(together, apart.runs - run),
                        min(columns, length - column),
                        apart.stride % 2**64,
                        begin.ctypes.data + 8 * (first + run),
                        identity,
                        size,
                        exponent,
                    )


class _Apart(NamedTuple):
    """So many runs, each so many elements of memory after the one before."""

    runs: int
    stride: int


def _places(values: torch.Tensor, length: int) -> tuple[list[tuple[int, int]], _Apart]:
    """Stretches of equally spaced runs: the first run's number and its address; and the spacing."""
    outer, together = values.dim(), 1
    while together < length:
        outer -= 1
        together *= values.shape[outer]
    while outer and values.shape[outer - 1] == 1:
        outer -= 1
    if outer == 0:
        return [(0, values.data_ptr())], _Apart(1, length)
    apart = _Apart(values.shape[outer - 1], values.stride(outer - 1))
    offsets = np.zeros(1, np.int64)
    for dim in range(outer - 1):
        steps = np.arange(values.shape[dim], dtype=np.int64) * values.stride(dim)
        offsets = (offsets[:, None] + steps[None, :]).reshape(-1)
    size, base = values.element_size(), values.data_ptr()
    return [(i * apart.runs, base + size * at) for i, at in enumerate(offsets.tolist())], apart
