"""A tensor as `torch.save` has it: found in such an archive, and written as one, part by part.

Owns the form: a zip archive that is not compressed, with a pickle of how the tensor is made and a
storage, so that elements lie in the file as they are. Source: torch 2.13, serialization.py and
caffe2/serialize/inline_container.cc.
"""

from __future__ import annotations

import io
import math
import pickle
import struct
import zipfile
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, BinaryIO, Protocol

import torch
from torch._utils import _rebuild_tensor_v2

TOP = "archive"  # the folder in an archive that `torch.save` writes to an open file
STORAGE = "data/0"
ALIGNMENT = 64  # of a storage's first byte
STORAGE_TYPES: dict[str, type] = {
    "F32": torch.FloatStorage,
    "F16": torch.HalfStorage,
    "BF16": torch.BFloat16Storage,
}
_HEADER_BYTES = 30  # of an entry, APPNOTE.TXT of zip, 4.3.7, before its name
_ZIP64_BYTES = 20  # of the extra field that gives long sizes
_DATE = (1980, 1, 1, 0, 0, 0)


class Sink(Protocol):
    """What is written to."""

    def write(self, data: Any, /) -> int:
        """Take bytes; how many."""


def write_tensor(out: Sink, dtype: str, shape: tuple[int, ...], parts: Iterable[memoryview]) -> int:
    """Write the archive of a tensor whose bytes in row-major order are `parts`; its own bytes.

    `dtype` is one of STORAGE_TYPES. Raises OSError.
    """
    counted = _Counted(out)
    with zipfile.ZipFile(counted, "w", zipfile.ZIP_STORED) as archive:  # type: ignore[call-overload]

        def record(name: str, content: bytes) -> None:
            archive.writestr(zipfile.ZipInfo(f"{TOP}/{name}", _DATE), content)

        record("data.pkl", recipe(dtype, shape))
        record(".format_version", b"1")
        record(".storage_alignment", str(ALIGNMENT).encode())
        record("byteorder", b"little")
        entry = zipfile.ZipInfo(f"{TOP}/{STORAGE}", _DATE)
        head = counted.num_bytes + _HEADER_BYTES + len(entry.filename) + _ZIP64_BYTES
        padding = -(head + 4) % ALIGNMENT
        entry.extra = struct.pack("<2sH", b"FB", padding) + bytes(padding)
        with archive.open(entry, "w", force_zip64=True) as storage:
            for part in parts:
                storage.write(part)
        record("version", b"3\n")
    return counted.num_bytes


class _Counted:
    """A file that can only be appended to, and counts what is: `zipfile` begins at its byte 0."""

    def __init__(self, out: Sink) -> None:
        self._out, self.num_bytes = out, 0

    def write(self, data: Any, /) -> int:
        size = len(data)
        self._out.write(data)
        self.num_bytes += size
        return size

    def flush(self) -> None:
        """Nothing is held back."""


def recipe(dtype: str, shape: tuple[int, ...]) -> bytes:
    """The pickle of a contiguous tensor of a storage of its own, byte for byte torch's."""
    out = io.BytesIO()
    _Writer(out, STORAGE_TYPES[dtype], math.prod(shape)).dump(_Tensor(shape))
    return out.getvalue()


class _Storage:
    """Stands for the storage."""


@dataclass
class _Tensor:
    """Stands for the tensor."""

    shape: tuple[int, ...]

    def __reduce__(self) -> tuple[Any, ...]:
        strides = tuple(math.prod(self.shape[dim + 1 :]) for dim in range(len(self.shape)))
        arguments: tuple[Any, ...] = (_Storage(), 0, self.shape, strides, False, OrderedDict())
        return _rebuild_tensor_v2, arguments


class _Writer(pickle.Pickler):
    """Writes what stands for a tensor as torch writes one."""

    def __init__(self, out: io.BytesIO, kind: type, num_elements: int) -> None:
        super().__init__(out, protocol=2)
        self._kind, self._num_elements = kind, num_elements

    def persistent_id(self, obj: Any) -> Any:
        if isinstance(obj, _Storage):
            return ("storage", self._kind, "0", "cpu", self._num_elements)
        return None


@dataclass(frozen=True, slots=True)
class Recipe:
    """How a tensor is made of a storage: its first element's number, sizes and strides."""

    storage: str
    first: int
    size: tuple[int, ...]
    stride: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class FoundTensor:
    """A tensor in an archive, whose storage has `num_bytes` from byte `storage` of it on."""

    first: int
    size: tuple[int, ...]
    is_contiguous: bool
    storage: int
    num_bytes: int
    checksum: int


def find_tensor(file: BinaryIO, start: int, length: int) -> FoundTensor:
    """The tensor in the archive that takes these bytes of a file.

    Raises ValueError, KeyError, EOFError, zipfile.BadZipFile or pickle.UnpicklingError where it is
    none.
    """
    with _Part(file, start, length) as part:
        with zipfile.ZipFile(part) as archive:
            names = {name.partition("/")[2]: name for name in archive.namelist()}
            recipe: Recipe = _Reader(io.BytesIO(archive.read(names["data.pkl"]))).load()
            order = archive.read(names["byteorder"]) if "byteorder" in names else b"little"
            entry = archive.getinfo(names[f"data/{recipe.storage}"])
        if order != b"little" or entry.compress_type != zipfile.ZIP_STORED:
            raise ValueError("its numbers are not stored as they are")
        part.seek(entry.header_offset)
        header = part.read(_HEADER_BYTES)  # with the lengths of name and extra field
    name, extra = (int.from_bytes(header[at : at + 2], "little") for at in (26, 28))
    storage = entry.header_offset + 30 + name + extra
    contiguous = _is_contiguous(recipe.size, recipe.stride)
    return FoundTensor(recipe.first, recipe.size, contiguous, storage, entry.file_size, entry.CRC)


def _is_contiguous(size: tuple[int, ...], stride: tuple[int, ...]) -> bool:
    """Whether elements follow each other in row-major order.

    >>> _is_contiguous((2, 1, 3), (3, 99, 1)), _is_contiguous((2, 3), (1, 2))
    (True, False)
    """
    expected = 1
    for length, step in zip(reversed(size), reversed(stride), strict=True):
        if length != 1 and step != expected:
            return False
        expected *= length
    return True


class _Reader(pickle.Unpickler):
    """Reads of `torch.save`'s pickle how a tensor is made, and makes nothing but that."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("torch._utils", "_rebuild_tensor_v2"):
            return _rebuilt
        if (module, name) == ("collections", "OrderedDict"):
            return OrderedDict
        if module == "torch" and name.endswith("Storage"):
            return name
        raise pickle.UnpicklingError(f"{module}.{name} is no part of a plain tensor")

    def persistent_load(self, pid: Any) -> Any:
        return pid


def _rebuilt(
    storage: tuple[Any, ...], first: int, size: tuple[int, ...], stride: tuple[int, ...], *_: Any
) -> Recipe:
    """In the place of the function that would make the tensor."""
    return Recipe(storage[2], first, tuple(size), tuple(stride))


class _Part(io.RawIOBase):
    """`length` bytes of a file from `start` on, as a file."""

    def __init__(self, file: BinaryIO, start: int, length: int) -> None:
        self._file, self._start, self._length, self._at = file, start, length, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        origin = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._length}[whence]
        self._at = max(0, origin + offset)
        return self._at

    def readinto(self, buffer: Any) -> int:
        size = max(0, min(len(buffer), self._length - self._at))
        self._file.seek(self._start + self._at)
        got = self._file.read(size)
        buffer[: len(got)] = got
        self._at += len(got)
        return len(got)
