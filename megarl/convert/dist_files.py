"""Megatron distributed checkpoints (torch_dist): what is stored where, and its values.

Owns torch's own metadata of such a folder and the form of what is stored; whose layout it is, is
`reshard/dist_checkpoint`'s. Nothing of Megatron is needed to read one.

A chunk is what `torch.save` made of one tensor (`archive.py`). Source: torch 2.13,
distributed/checkpoint/filesystem.py.
"""

from __future__ import annotations

import io
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorStorageMetadata

from megarl.convert.archive import find_tensor
from megarl.convert.dist_metadata import UNREADABLE, read_metadata
from megarl.convert.stored import FileTensor, crc32
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


class DistCheckpoint:
    """The folder `path`: its chunks and the values of each, and keys of its other objects.

    Raises CheckpointError where it is no such checkpoint, its metadata cannot be read, or a file is
    missing or too short.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._dtypes: dict[str, torch.dtype] = {}
        chunks = []
        try:
            metadata = read_metadata(path)
            self._storage = metadata.storage_data
            for key, facts in metadata.state_dict_metadata.items():
                if isinstance(facts, TensorStorageMetadata):
                    self._dtypes[key] = facts.properties.dtype
                    for part in facts.chunks:
                        at, sizes = tuple(part.offsets), tuple(part.sizes)
                        file = self._storage[MetadataIndex(key, at)].relative_path
                        chunks.append(Chunk(key, tuple(facts.size), at, sizes, file))
        except UNREADABLE as error:
            raise CheckpointError(
                f"{path}: its .metadata cannot be read ({error}); name a folder that Megatron "
                "saved in torch_dist format"
            ) from error
        self._check_sizes()
        self.chunks = tuple(chunks)
        self.objects = tuple(
            key
            for key, facts in metadata.state_dict_metadata.items()
            if not isinstance(facts, TensorStorageMetadata)
        )

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
        except UNREADABLE as error:
            raise self._broken(chunk, error) from error
        return tensor.reshape(chunk.sizes)

    def stored(self, chunk: Chunk) -> FileTensor:
        """The values of a chunk as their bits in its file, with the chunk's sizes.

        All are read once, for their checksum. Raises CheckpointError where the file is not as the
        metadata says, or a bit of it is not as it was saved.
        """
        stored = self._storage[MetadataIndex(chunk.key, torch.Size(chunk.offsets))]
        path = self._path / stored.relative_path
        try:
            bits = STORED[self.dtype(chunk)]
            with path.open("rb") as file:
                found = find_tensor(file, stored.offset, stored.length)
            if found.size != chunk.sizes or not found.is_contiguous:
                raise ValueError(f"a tensor of shape {list(found.size)} is stored there")
            first = found.first * bits.itemsize
            if first < 0 or first + self.num_bytes(chunk) > found.num_bytes:
                raise ValueError(f"{found.num_bytes} bytes are stored there")
            start = stored.offset + found.storage
            if crc32(path, start, found.num_bytes) != found.checksum:
                raise ValueError("its bytes are not as they were saved")
            return FileTensor(path, start + first, bits, tuple(chunk.sizes))
        except UNREADABLE as error:
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
        except UNREADABLE:
            return {}
        return found if isinstance(found, dict) else {}

    def raw(self, key: str) -> bytes:
        """An object as it is stored, of those named in `objects`. Raises CheckpointError."""
        try:
            return self._bytes(MetadataIndex(key))
        except UNREADABLE as error:
            raise CheckpointError(
                f"{self._path}: {key} cannot be read ({error}); use another checkpoint"
            ) from error

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
