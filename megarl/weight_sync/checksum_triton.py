"""The additive checksum of many boxes on a GPU: every element is read once, in a few launches.

Owns the way from boxes to tiles, and the tables that a launch reads. The sum is `checksum`'s, whose
torch form is the oracle of this one, and what is used where Triton is absent or only a placeholder
of it is there (`compat.placeholders`). Triton is imported at the first use.
"""

# R rows of a part, L elements of a row, which are contiguous in memory and in global order

from __future__ import annotations

import importlib
import importlib.util
import itertools
import math
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache
from types import ModuleType

import numpy as np
import numpy.typing as npt
import torch

from megarl.errors import ShapeError
from megarl.weight_sync.checksum import CHUNK, box_checksum, tensor_id

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
_VECTOR_BYTES = 16  # the widest load of one thread
# For rows of at most so many elements: rows and columns of a tile, loops that are unrolled, and
# the most columns of a tile. Longer rows are cut where chunks begin.
_TILES = ((256, 16, 128, 1, 256), (4096, 4, 512, 1, 4096), (1 << 62, 1, 2048, 2, CHUNK))
_MAX_PARTS = 4096  # of one box: beyond, it is copied into one piece first

Int64Array = npt.NDArray[np.int64]
Dim = tuple[int, int, int]  # size, stride in memory, step in global order


@dataclass(frozen=True, slots=True)
class BoxValues:
    """The values, of any strides, of one box of the global tensor `name` of `shape`."""

    values: torch.Tensor
    name: str
    shape: tuple[int, ...]
    box: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Shape:
    """What a launch is compiled for: the kernel's constants, by their meaning there."""

    itemsize: int
    rows: int
    columns: int
    unroll: int
    loops: int
    is_full: bool
    crosses: bool
    is_aligned: bool


@dataclass(frozen=True, slots=True)
class Part:
    """R rows of L elements of box `number`: where they lie in memory, and in global order."""

    itemsize: int
    address: int
    rows: int
    length: int
    stride: int
    first: int
    row_step: int
    identity: int
    number: int


@dataclass(frozen=True, slots=True)
class Launch:
    """The tables of one launch, on the device."""

    shape: Shape
    tiles: torch.Tensor
    parts: torch.Tensor


@dataclass(frozen=True, slots=True)
class Tables:
    """The launches for some boxes. `anchor` is where offsets count from.

    `copies` are (copy, values) for values that are summed in one piece.
    """

    anchor: torch.Tensor
    launches: tuple[Launch, ...]
    copies: tuple[tuple[torch.Tensor, torch.Tensor], ...]


@cache
def is_available() -> bool:
    """Whether Triton itself is installed: a placeholder is no file, and the kernel needs one."""
    if importlib.util.find_spec("triton") is None:
        return False
    return "__file__" in vars(importlib.import_module("triton"))


@cache
def _kernel() -> ModuleType:
    return importlib.import_module("megarl.weight_sync.checksum_kernel")


def pays(device: torch.device) -> bool:
    """Whether the kernel sums what is on `device`."""
    return device.type == "cuda" and is_available()


def box_checksums(boxes: Sequence[BoxValues]) -> list[int]:
    """`checksum.box_checksum` of each box: on a GPU with Triton all of them together."""
    if boxes and pays(boxes[0].values.device):
        return sums(boxes)
    return [box_checksum(b.values, b.name, b.shape, b.box) for b in boxes]


def sums(boxes: Sequence[BoxValues]) -> list[int]:
    """The checksum of each box by the kernel. All are on one device, which is waited for once.

    Raises ShapeError where values have not the shape of their box.
    """
    return Summation(boxes).run()


class Summation:
    """The checksums of some boxes by the kernel, as often as wanted while no tensor moves.

    Raises ShapeError where values have not the shape of their box.
    """

    def __init__(self, boxes: Sequence[BoxValues]) -> None:
        for each in boxes:
            check_box(each)
        self._num_boxes, self._device = len(boxes), boxes[0].values.device
        self._boxes = tuple(boxes)  # so that what the tables point to stays
        self._tables = _tables(boxes, self._device)

    def run(self) -> list[int]:
        """The checksum of what each box holds now, modulo 2^64."""
        found = torch.zeros(self._num_boxes, dtype=torch.int64, device=self._device)
        for copy, values in self._tables.copies:
            copy.copy_(values)
        for launch in self._tables.launches:
            _launch(launch, self._tables.anchor, found)
        return [int(total) & (2**64 - 1) for total in found.tolist()]


def check_box(each: BoxValues) -> None:
    """Raise ShapeError where values have not the shape of their box."""
    extent = tuple(stop - start for start, stop in each.box)
    if tuple(each.values.shape) != extent or len(each.box) != len(each.shape):
        raise ShapeError(
            f"{each.name}: values of shape {tuple(each.values.shape)} for box {each.box} of "
            f"{each.shape}; a checksum needs exactly the elements of the box"
        )


def _launch(launch: Launch, anchor: torch.Tensor, found: torch.Tensor) -> None:
    shape = launch.shape
    with torch.cuda.device(found.device) if found.is_cuda else nullcontext():
        _kernel().sum_tiles[(launch.tiles.shape[0],)](
            launch.tiles,
            launch.parts,
            anchor.view(_INTEGERS[shape.itemsize]),
            found,
            ITEMSIZE=shape.itemsize,
            ROWS=shape.rows,
            COLUMNS=shape.columns,
            UNROLL=shape.unroll,
            LOOPS=shape.loops,
            IS_FULL=shape.is_full,
            CROSSES=shape.crosses,
            DIVISOR=_VECTOR_BYTES // shape.itemsize if shape.is_aligned else 1,
            CHUNK=CHUNK,
            num_warps=4,
        )


def _tables(boxes: Sequence[BoxValues], device: torch.device) -> Tables:
    anchor = torch.zeros(_VECTOR_BYTES, dtype=torch.uint8, device=device)
    copies: list[tuple[torch.Tensor, torch.Tensor]] = []
    parts: list[Part] = []
    for number, box in enumerate(boxes):
        values = box.values
        dims = _dims(values, box.shape)
        if math.prod(size for size, _, _ in dims[:-2]) > _MAX_PARTS:
            values = values.contiguous()
            copies.append((values, box.values))
            dims = _dims(values, box.shape)
        parts += _parts(values, box, number, dims)
    return Tables(anchor, tuple(_launches(parts, anchor)), tuple(copies))


def _dims(values: torch.Tensor, shape: Sequence[int]) -> list[Dim]:
    """The box's dims, put together where memory and global order allow; the last is a row."""
    dims: list[Dim] = []
    step = 1
    for size, stride, extent in reversed(
        list(zip(values.shape, values.stride(), shape, strict=True))
    ):
        if dims and (stride, step) == (dims[0][0] * dims[0][1], dims[0][0] * dims[0][2]):
            dims[0] = (size * dims[0][0], dims[0][1], dims[0][2])
        elif size > 1:
            dims.insert(0, (size, stride, step))
        step *= extent
    if not dims or dims[-1][1:] != (1, 1):
        dims.append((1, 1, 1))
    return dims


def _parts(
    values: torch.Tensor, box: BoxValues, number: int, dims: Sequence[Dim]
) -> Iterator[Part]:
    """The box as rows: the last dim is their length, the one before counts them."""
    if 0 in values.shape:
        return
    first = 0
    for (start, _), extent in zip(box.box, box.shape, strict=True):
        first = first * extent + start
    itemsize = values.element_size()
    rows, stride, row_step = dims[-2] if len(dims) > 1 else (1, 0, 0)
    for index in itertools.product(*(range(size) for size, _, _ in dims[:-2])):
        address = values.data_ptr() + itemsize * sum(
            i * dim[1] for i, dim in zip(index, dims, strict=False)
        )
        begin = first + sum(i * dim[2] for i, dim in zip(index, dims, strict=False))
        length = dims[-1][0]
        yield Part(
            itemsize, address, rows, length, stride, begin, row_step, tensor_id(box.name), number
        )


def _launches(parts: Sequence[Part], anchor: torch.Tensor) -> Iterator[Launch]:
    """One launch for each shape of tile that the parts are cut into."""
    fields = np.array([_fields(part, anchor.data_ptr()) for part in parts], np.int64)
    table = torch.from_numpy(fields.reshape(-1, 8)).to(anchor.device)
    grouped: dict[Shape, list[Int64Array]] = {}
    for number, part in enumerate(parts):
        for shape, tiles in _tiles(part, number):
            grouped.setdefault(shape, []).append(tiles)
    for shape, found in grouped.items():
        yield Launch(shape, torch.from_numpy(np.concatenate(found)).to(anchor.device), table)


def _fields(part: Part, anchor: int) -> tuple[int, ...]:
    """A row of the kernel's table of parts."""
    identity = part.identity - (1 << 64) if part.identity >> 63 else part.identity
    offset = (part.address - anchor) // part.itemsize
    return (offset, part.rows, part.stride, part.first, part.row_step, identity, part.number, 0)


def _tiles(part: Part, number: int) -> Iterator[tuple[Shape, Int64Array]]:
    """The part's tiles [n, 4] (part, row, first column, column after the last), by shape."""
    _, rows, columns, unroll, span = next(tile for tile in _TILES if part.length <= tile[0])
    row, begin, end = _cut(part, rows, span)
    starts = part.first + part.row_step * (row[:, None] + np.arange(rows)) + begin[:, None]
    is_there = row[:, None] + np.arange(rows) < part.rows
    width = end - begin
    loops = 1 << np.ceil(np.log2(np.maximum(width / (columns * unroll), 1))).astype(np.int64)
    crosses = ((starts % CHUNK + width[:, None] > CHUNK) & is_there).any(axis=1)
    is_full = is_there.all(axis=1) & (width == columns * unroll * loops)
    vector = _VECTOR_BYTES // part.itemsize
    is_aligned = (begin % vector == 0) & (width % vector == 0)
    is_aligned &= part.address % _VECTOR_BYTES == 0 and part.stride % vector == 0
    tiles = np.stack([np.full_like(row, number), row, begin, end], axis=1)
    flags = loops * 8 + is_full * 4 + crosses * 2 + is_aligned
    for flag in np.unique(flags).tolist():
        shape = Shape(
            part.itemsize,
            rows,
            columns,
            unroll,
            flag // 8,
            *(bool(flag & bit) for bit in (4, 2, 1)),
        )
        yield shape, tiles[flags == flag]


def _cut(part: Part, rows: int, span: int) -> tuple[Int64Array, Int64Array, Int64Array]:
    """First row, first column and column after the last of each tile."""
    first_rows = np.arange(0, part.rows, rows, dtype=np.int64)
    if span == CHUNK:
        begins = part.first + part.row_step * first_rows
        low, high = begins // span, (begins + part.length - 1) // span + 1
    else:
        begins = np.zeros_like(first_rows)
        low, high = begins, begins + -(-part.length // span)
    counts = high - low
    row = np.repeat(first_rows, counts)
    before = np.repeat(np.cumsum(counts) - counts, counts)
    cut = (np.repeat(low, counts) + np.arange(len(row)) - before) * span
    offset = np.repeat(begins, counts)
    begin, end = np.maximum(cut - offset, 0), np.minimum(cut + span - offset, part.length)
    return row, begin, end
