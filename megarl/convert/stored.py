"""Tensors in files, read box by box into memory that is there already, cast or dequantized.

Owns where the bytes of a box lie. Nothing is mapped, and what has to pass through memory of its own
passes through a little of it: pages that are touched for the first time cost more than the copying.
"""

from __future__ import annotations

import math
import os
import zlib
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from megarl import float8
from megarl.convert.numbers import TORCH, Bits, bits_of, cast, tensor_of
from megarl.errors import CheckpointError
from megarl.float8 import BlockScaling
from megarl.reshard.execute import slices
from megarl.reshard.files import FLOAT8, STORED, StoredTensor
from megarl.reshard.layout import Box, whole

BAND_BYTES = 1 << 21  # of one read: a core's cache has it still when it is copied or summed up
SHORT_BYTES = 1 << 16  # runs of less are read with what lies between them,
MOST_BETWEEN = 16  # where that is not more than so many times as much


class Stored(Protocol):
    """A tensor that can be read."""

    shape: tuple[int, ...]

    def read(self, box: Box, out: Bits) -> None:
        """Put the bits of a box into an array of its extent. Raises CheckpointError."""


class FileTensor:
    """A tensor whose bits, of a type in `STORED`, lie in a file from byte `start` on."""

    def __init__(self, path: Path, start: int, bits: np.dtype[Any], shape: tuple[int, ...]) -> None:
        self.shape = shape
        self._path, self._start, self._bits = path, start, bits
        self._strides = tuple(
            math.prod(shape[dim + 1 :]) * bits.itemsize for dim in range(len(shape))
        )

    def reshaped(self, shape: tuple[int, ...]) -> FileTensor:
        """The same elements in another shape."""
        assert math.prod(shape) == math.prod(self.shape), (self.shape, shape)
        return FileTensor(self._path, self._start, self._bits, shape)

    def read(self, box: Box, out: Bits) -> None:
        """See `Stored`."""
        if out.size == 0:
            return
        lead = self._lead(box)
        with _Open(self._path) as file:
            for index in np.ndindex(out.shape[:lead]):
                at = [start + i for (start, _), i in zip(box, (*index, 0), strict=False)]
                first = sum(i * stride for i, stride in zip(at, self._strides, strict=False))
                self._read_rows(file, self._start + first, box[lead + 1 :], out[index])

    def _lead(self, box: Box) -> int:
        """The dim whose indices in the box are read together; those before it, one by one."""
        lead = len(box) - 1
        while lead > 0 and box[lead] == (0, self.shape[lead]):
            lead -= 1
        if lead == 0 or box[lead - 1][1] - box[lead - 1][0] == 1:
            return lead
        run_bytes = (box[lead][1] - box[lead][0]) * self._strides[lead]
        is_worth = run_bytes < SHORT_BYTES and self._strides[lead - 1] <= MOST_BETWEEN * run_bytes
        return lead - 1 if is_worth else lead

    def _read_rows(self, file: _Open, at: int, rest: Box, out: Bits) -> None:
        """Rows that follow each other from byte `at` on, of each the part in `rest`."""
        tail = self.shape[len(self.shape) - len(rest) :]
        if rest == whole(tail) and out.flags.c_contiguous:
            file.fill(at, out.data.cast("B"))
            return
        row_bytes = math.prod(tail) * self._bits.itemsize
        step = max(1, BAND_BYTES // row_bytes)
        for start in range(0, len(out), step):
            num_rows = min(step, len(out) - start)
            raw = _buffer(num_rows * row_bytes)
            file.fill(at + start * row_bytes, raw.data)
            rows = raw.view(self._bits).reshape(num_rows, *tail)
            out[start : start + num_rows] = rows[(slice(None), *slices(rest))]


def stored_in(path: Path, stored: StoredTensor) -> FileTensor:
    """A tensor of a safetensors file, of a type in `STORED`."""
    return FileTensor(path, stored.start, STORED[stored.dtype], stored.shape)


class Cast:
    """A tensor of type `dtype` read as another. Raises OverflowError as `cast` does."""

    def __init__(self, source: Stored, dtype: str, wanted: str) -> None:
        self.shape = source.shape
        self._source, self._dtype, self._wanted = source, dtype, wanted

    def read(self, box: Box, out: Bits) -> None:
        """See `Stored`."""
        if self._dtype == self._wanted:
            self._source.read(box, out)
            return
        bits = STORED[self._dtype]
        for band, index in bands(box, bits.itemsize):
            found = np.empty(tuple(end - start for start, end in band), bits)
            self._source.read(band, found)
            out[index] = cast(found, self._dtype, self._wanted)


class Dequantized:
    """A float8 tensor [R, C] in scaled blocks, read as the numbers that it stands for.

    Raises OverflowError as `cast` does.
    """

    def __init__(self, codes: Stored, scales: Stored, scaling: BlockScaling, wanted: str) -> None:
        self.shape = codes.shape
        self._codes, self._scales, self._scaling, self._wanted = codes, scales, scaling, wanted

    def read(self, box: Box, out: Bits) -> None:
        """See `Stored`."""
        for band, index in bands(box, 1, self._scaling.rows):
            out[index] = self._numbers(band)

    def _numbers(self, box: Box) -> Bits:
        """The numbers of rows and columns, from the whole blocks that they lie in."""
        units = (self._scaling.rows, self._scaling.columns)
        blocks = tuple(
            (start // unit, -(-end // unit)) for (start, end), unit in zip(box, units, strict=True)
        )
        outer = tuple(
            (first * unit, min(size, last * unit))
            for (first, last), unit, size in zip(blocks, units, self.shape, strict=True)
        )
        codes = tensor_of(whole_bits(self._codes, STORED[FLOAT8], outer), FLOAT8)
        scales = tensor_of(whole_bits(self._scales, STORED["F32"], blocks), "F32")
        numbers = float8.dequantize(codes, scales, self._scaling, TORCH["F32"])
        inner = tuple(
            slice(start - first, end - first)
            for (start, end), (first, _) in zip(box, outer, strict=True)
        )
        return cast(bits_of(numbers, "F32")[inner], "F32", self._wanted)


def whole_bits(source: Stored, bits: np.dtype[Any], box: Box | None = None) -> Bits:
    """A box of a tensor, or all of it, in memory of its own."""
    box = whole(source.shape) if box is None else box
    out = np.empty(tuple(end - start for start, end in box), bits)
    source.read(box, out)
    return out


def bands(
    box: Box, itemsize: int, unit: int = 1, num_bytes: int | None = None
) -> Iterator[tuple[Box, tuple[slice, ...]]]:
    """Parts of a box of about so many bytes, and where each lies in it; whole `unit`s of rows.

    Without a number they are of BAND_BYTES. The dim that is cut is the first that has more than one
    index.

    >>> [index for _, index in bands(((2, 3), (4, 9)), itemsize=4, num_bytes=8)]
    [(slice(0, 1, None), slice(0, 2, None)), (slice(0, 1, None), slice(2, 4, None)), \
(slice(0, 1, None), slice(4, 5, None))]
    """
    dim = next((d for d, (start, end) in enumerate(box) if end - start > 1), 0)
    row_bytes = itemsize * math.prod(end - start for start, end in box[dim + 1 :])
    step = max(1, (num_bytes or BAND_BYTES) // max(1, row_bytes) // unit) * unit
    first, last = box[dim]
    for start in range(first, last, step):
        end = min(start + step, last)
        band = (*box[:dim], (start, end), *box[dim + 1 :])
        yield band, slices(tuple((a - f, b - f) for (a, b), (f, _) in zip(band, box, strict=True)))


def parts(source: Stored, bits: np.dtype[Any], unit: int = 1) -> Iterator[Bits]:
    """A tensor in row-major order, whole `unit`s of rows at a time, all in the same memory.

    A part is valid until the next is asked for.
    """
    for box, _ in bands(whole(source.shape), bits.itemsize, unit):
        extent = tuple(end - start for start, end in box)
        raw = _buffer(math.prod(extent) * bits.itemsize, "part")
        part = raw.view(bits).reshape(extent)
        source.read(box, part)
        yield part


def crc32(path: Path, start: int, num_bytes: int) -> int:
    """The CRC-32 of bytes of a file. Raises CheckpointError where they cannot be read."""
    found = 0
    with _Open(path) as file:
        for at in range(0, num_bytes, BAND_BYTES):
            part = _buffer(min(BAND_BYTES, num_bytes - at))
            file.fill(start + at, part.data)
            found = zlib.crc32(part.data, found)
    return found


@cache
def _kept_buffer(use: str, num_bytes: int) -> np.ndarray[Any, Any]:
    return np.empty(num_bytes, np.uint8)


def _buffer(num_bytes: int, use: str = "read") -> np.ndarray[Any, Any]:
    """Memory of a process for one use, the same each time; of its own for rows that are longer."""
    if num_bytes > BAND_BYTES:
        return np.empty(num_bytes, np.uint8)
    return _kept_buffer(use, BAND_BYTES)[:num_bytes]


class _Open:
    """A file that is open while it is read."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __enter__(self) -> _Open:
        try:
            self._descriptor = os.open(self._path, os.O_RDONLY)
        except OSError as error:
            raise self._unreadable(error) from error
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._descriptor)

    def fill(self, at: int, out: memoryview) -> None:
        """Read as many bytes as there is room for."""
        done = 0
        while done < len(out):
            try:
                got = os.preadv(self._descriptor, [out[done:]], at + done)
            except OSError as error:
                raise self._unreadable(error) from error
            if got == 0:
                raise CheckpointError(
                    f"{self._path} was truncated while it was read; use another checkpoint"
                )
            done += got

    def _unreadable(self, error: OSError) -> CheckpointError:
        return CheckpointError(
            f"{self._path}: cannot be read ({error.strerror}); look at its disk and its rights"
        )
