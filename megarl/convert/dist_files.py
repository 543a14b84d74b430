"""Megatron distributed checkpoints (torch_dist): what is stored where, and its values, mapped.

Owns torch's own metadata of such a folder and the form of what is stored; whose layout it is, is
`reshard/dist_checkpoint`'s. Nothing of Megatron is needed to read one.

A chunk is what `torch.save` made of one tensor, a zip archive that is not compressed, so that its
elements lie in the file as they are. Source: torch 2.13, distributed/checkpoint/filesystem.py.
"""

from __future__ import annotations

import io
import math
import pickle
import zipfile
import zlib
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorStorageMetadata

from megarl.convert.numbers import LARGE_BYTES, forget
from megarl.errors import CheckpointError
from megarl.reshard.dist_checkpoint import Chunk
from megarl.reshard.files import STORED

SPELLED: Mapping[torch.dtype, str] = {
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
}
"""Types of weights, as safetensors spells them."""

COMMON = "common_state/shard_0_1"  # what Megatron saves besides tensors, under its key in torch's
OLDER_COMMON = "common.pt"  # where Megatron before 0.19 did

_UNREADABLE = (
    OSError, EOFError, RuntimeError, KeyError, ValueError, AttributeError, ImportError,
    pickle.UnpicklingError, zipfile.BadZipFile,
)  # fmt: skip


class DistCheckpoint:
    """The folder `path`: its chunks, and the values of each.

    Raises CheckpointError where it is no such checkpoint, its metadata cannot be read, or a file is
    missing or too short.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            metadata = FileSystemReader(path).read_metadata()
        except _UNREADABLE as error:
            raise CheckpointError(
                f"{path}: its .metadata cannot be read ({error}); name a folder that Megatron "
                "saved in torch_dist format"
            ) from error
        self._storage = metadata.storage_data
        self._check_sizes()
        self._dtypes: dict[str, torch.dtype] = {}
        chunks = []
        for key, facts in metadata.state_dict_metadata.items():
            if isinstance(facts, TensorStorageMetadata):
                self._dtypes[key] = facts.properties.dtype
                for part in facts.chunks:
                    file = self._storage[MetadataIndex(key, part.offsets)].relative_path
                    sizes = tuple(part.sizes)
                    chunks.append(Chunk(key, tuple(facts.size), tuple(part.offsets), sizes, file))
        self.chunks = tuple(chunks)

    def _check_sizes(self) -> None:
        ends: dict[str, int] = {}
        for stored in self._storage.values():
            file, end = stored.relative_path, stored.offset + stored.length
            ends[file] = max(end, ends.get(file, 0))
        for file, end in ends.items():
            path = self._path / file
            if not path.is_file():
                raise CheckpointError(f"{path} is missing; use another checkpoint")
            if path.stat().st_size < end:
                raise CheckpointError(
                    f"{path} is truncated: it has {path.stat().st_size} bytes, and {end} were "
                    "saved; use another checkpoint"
                )

    def dtype(self, chunk: Chunk) -> str:
        """A chunk's type of numbers as safetensors spells it; another's as torch does."""
        found = self._dtypes[chunk.key]
        return SPELLED.get(found, str(found).removeprefix("torch."))

    def num_bytes(self, chunk: Chunk) -> int:
        """Bytes of a chunk's elements."""
        return math.prod(chunk.sizes) * self._dtypes[chunk.key].itemsize

    def read(self, chunk: Chunk) -> Tensor:
        """The values of a chunk, in its stored type and with its stored dims, by torch itself.

        Raises CheckpointError where the file is not as the metadata says.
        """
        try:
            raw = self._bytes(MetadataIndex(chunk.key, torch.Size(chunk.offsets)))
            tensor: Tensor = torch.load(io.BytesIO(raw), map_location="cpu", weights_only=True)
        except _UNREADABLE as error:
            raise self._broken(chunk, error) from error
        return tensor.reshape(chunk.sizes)

    def map(self, chunk: Chunk) -> np.ndarray[Any, Any]:
        """The values of a chunk as their bits, mapped read-only, with the chunk's sizes.

        All are read once, for their checksum. Raises CheckpointError where the file is not as the
        metadata says, or a bit of it is not as it was saved.
        """
        stored = self._storage[MetadataIndex(chunk.key, torch.Size(chunk.offsets))]
        path = self._path / stored.relative_path
        try:
            bits = STORED[self.dtype(chunk)]
            with path.open("rb") as file, _Part(file, stored.offset, stored.length) as part:
                found = _tensor_in(part)
            if found.size != chunk.sizes or not found.is_contiguous:
                raise ValueError(f"a tensor of shape {list(found.size)} is stored there")
            start = stored.offset + found.storage
            raw = np.memmap(path, np.uint8, "r", start, (found.num_bytes,))
            if _checksum(raw) != found.checksum:
                raise ValueError("its bytes are not as they were saved")
            first = found.first * bits.itemsize
            return raw[first : first + self.num_bytes(chunk)].view(bits).reshape(chunk.sizes)
        except _UNREADABLE as error:
            raise self._broken(chunk, error) from error

    def common(self) -> Mapping[str, Any]:
        """What was saved besides tensors and by rank, such as its iteration; {} where unknown.

        Values that are more than numbers, text and lists of them are not read.
        """
        index = MetadataIndex(COMMON)
        try:
            if index in self._storage:
                found = torch.load(io.BytesIO(self._bytes(index)), weights_only=True)[0]
            else:
                found = torch.load(self._path / OLDER_COMMON, weights_only=True)
        except _UNREADABLE:
            return {}
        return found if isinstance(found, dict) else {}

    def _bytes(self, index: MetadataIndex) -> bytes:
        stored = self._storage[index]
        with (self._path / stored.relative_path).open("rb") as file:
            file.seek(stored.offset)
            raw: bytes = file.read(stored.length)
            return raw

    def _broken(self, chunk: Chunk, error: Exception) -> CheckpointError:
        return CheckpointError(
            f"{self._path / chunk.file}: {chunk.key} at {list(chunk.offsets)} cannot be read "
            f"({error}); use another checkpoint"
        )


@dataclass(frozen=True, slots=True)
class _Recipe:
    """How a tensor is made of a storage: its first element's number, sizes and strides."""

    storage: str
    first: int
    size: tuple[int, ...]
    stride: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Found:
    """A tensor in an archive, whose storage has `num_bytes` from byte `storage` of it on."""

    first: int
    size: tuple[int, ...]
    is_contiguous: bool
    storage: int
    num_bytes: int
    checksum: int


def _tensor_in(part: _Part) -> _Found:
    """The tensor in an archive of `torch.save`."""
    with zipfile.ZipFile(part) as archive:
        names = {name.partition("/")[2]: name for name in archive.namelist()}
        recipe: _Recipe = _Reader(io.BytesIO(archive.read(names["data.pkl"]))).load()
        order = archive.read(names["byteorder"]) if "byteorder" in names else b"little"
        entry = archive.getinfo(names[f"data/{recipe.storage}"])
    if order != b"little" or entry.compress_type != zipfile.ZIP_STORED:
        raise ValueError("its numbers are not stored as they are")
    part.seek(entry.header_offset)
    header = part.read(30)  # APPNOTE.TXT of zip, 4.3.7: the lengths of name and extra field
    name, extra = (int.from_bytes(header[at : at + 2], "little") for at in (26, 28))
    storage = entry.header_offset + 30 + name + extra
    contiguous = _is_contiguous(recipe.size, recipe.stride)
    return _Found(recipe.first, recipe.size, contiguous, storage, entry.file_size, entry.CRC)


def _checksum(raw: np.ndarray[Any, Any]) -> int:
    """CRC-32 of mapped bytes, part by part, so that they are not resident all at once."""
    found = 0
    for start in range(0, len(raw), LARGE_BYTES):
        found = zlib.crc32(raw[start : start + LARGE_BYTES].data, found)
        forget(raw)
    return found


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
) -> _Recipe:
    """In the place of the function that would make the tensor."""
    return _Recipe(storage[2], first, tuple(size), tuple(stride))


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
