"""A Megatron distributed checkpoint (torch_dist) to write, as Megatron-Core's own save has it.

Owns chunks in files, torch's metadata and Megatron's. Neither Megatron nor a process group is
needed. Source: torch 2.13, distributed/checkpoint/filesystem.py; megatron-core 0.19.2,
dist_checkpointing/serialization.py.
"""

from __future__ import annotations

import io
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import FileSystemWriter, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.storage import WriteResult

from megarl.actor.parameters import block_table
from megarl.actor.shape import ModelShape
from megarl.config.model_folder import copy_beside, write_config
from megarl.convert.archive import write_tensor
from megarl.convert.dist_files import COMMON
from megarl.convert.formats import BACKEND, RECORD
from megarl.convert.huggingface import NAMES, policy_dtype
from megarl.convert.numbers import TORCH
from megarl.convert.stored import Stored, parts
from megarl.convert.target import TargetFile, Tell, Tensors
from megarl.errors import CheckpointError
from megarl.reshard.dist_checkpoint import (
    Chunk,
    chunk_files,
    dist_checkpoint_layout,
    extra_states,
    place,
    saved_chunks,
)
from megarl.reshard.files import STORED
from megarl.reshard.megatron import megatron_layout
from megarl.reshard.mesh import LearnerMesh
from megarl.reshard.shard_files import TensorToStore

CONTENT_KEY = "content_metadata"
CONTENT = {"distrib_optim_sharding_type": "fully_reshardable", "chained_optim_avoid_prefix": True}
"""What Megatron is told of the checkpoint's content, as by `compat.megatron_checkpoint`."""

Receipt = list[tuple[str, list[int] | None, int, int]]
"""Of a file: (key, offsets, first byte, bytes) of all that is in it."""


class TorchDistTarget:
    """The model `shape` in files of about `file_bytes`.

    `dtypes` are of its parameters. `model` is the folder that config.json and the tokenizer come
    from, which are kept beside, so that the way back is known. Raises CheckpointError where
    parameters that Megatron keeps as one tensor have several types.
    """

    def __init__(
        self, shape: ModelShape, dtypes: Mapping[str, str], model: Path, file_bytes: int
    ) -> None:
        self._shape, self._model = replace(shape, fp8_block=None), model
        self._policy = policy_dtype(block_table(self._shape), dtypes)
        self._dtypes = _chunk_dtypes(self._shape, dtypes)
        chunks = _in_files(saved_chunks(self._shape), self._dtypes, file_bytes)
        self._objects = {**dict.fromkeys(extra_states(chunks)), COMMON: {CONTENT_KEY: CONTENT}}
        self.layout = dist_checkpoint_layout(self._shape, chunks)
        self._chunks: dict[str, dict[str, Chunk]] = {chunk.file: {} for chunk in chunks}
        for chunk in chunks:
            self._chunks[chunk.file][place(chunk).local] = chunk
        self.files = tuple(
            TargetFile(file, dict(self._tensors(file)), self._num_bytes(file))
            for file in chunk_files(chunks)
        )

    def _tensors(self, file: str) -> Iterator[tuple[str, TensorToStore]]:
        for local, chunk in self._chunks[file].items():
            found = place(chunk)
            yield local, TensorToStore(self._dtypes[found.name], found.shape)

    def _num_bytes(self, file: str) -> int:
        return sum(tensor.num_bytes for _, tensor in self._tensors(file))

    def write(self, folder: Path, number: int, tensors: Tensors, tell: Tell) -> Receipt:
        """Write one file; see `Target`."""
        file = self.files[number]
        receipt: Receipt = []
        with (folder / file.name).open("wb") as opened:
            for local, tensor in tensors:
                chunk, start = self._chunks[file.name][local], opened.tell()
                dtype = file.tensors[local].dtype
                size = write_tensor(opened, dtype, chunk.sizes, _bytes(tensor, dtype, tell))
                receipt.append((chunk.key, list(chunk.offsets), start, size))
            for key, value in self._objects.items() if number == 0 else ():
                start, object_ = opened.tell(), io.BytesIO()
                torch.save([value], object_)
                opened.write(object_.getbuffer())
                receipt.append((key, None, start, opened.tell() - start))
            opened.flush()
            os.fsync(opened.fileno())
        return receipt

    def finish(self, folder: Path, receipts: Sequence[Receipt]) -> None:
        """Write torch's metadata, config.json and tokenizer, and Megatron's metadata last."""
        copy_beside(self._model, folder, (RECORD, BACKEND))
        dtype = NAMES[self._policy]
        write_config(self._model, folder, dtype, self._shape.num_mtp_layers, None)
        results = [
            WriteResult(MetadataIndex(key, at), size, _StorageInfo(file.name, start, size))
            for file, receipt in zip(self.files, receipts, strict=True)
            for key, at, start, size in receipt
        ]
        FileSystemWriter(folder).finish(self._metadata(), [results])
        backend = {"sharded_backend": "torch_dist", "sharded_backend_version": 1}
        (folder / BACKEND).write_text(json.dumps(backend), encoding="utf-8")

    def _metadata(self) -> Metadata:
        """Each key's shape, type and chunks."""
        facts: dict[str, Any] = {key: BytesStorageMetadata() for key in self._objects}
        for chunks in self._chunks.values():
            for chunk in chunks.values():
                if chunk.key not in facts:
                    dtype = TORCH[self._dtypes[place(chunk).name]]
                    properties = TensorProperties(dtype=dtype)
                    size = torch.Size(chunk.shape)
                    facts[chunk.key] = TensorStorageMetadata(properties, size, [])
                where = ChunkStorageMetadata(torch.Size(chunk.offsets), torch.Size(chunk.sizes))
                facts[chunk.key].chunks.append(where)
        return Metadata(facts)


def _bytes(tensor: Stored, dtype: str, tell: Tell) -> Iterator[memoryview]:
    for part in parts(tensor, STORED[dtype]):
        yield part.data.cast("B")
        tell(part.nbytes)


def _chunk_dtypes(shape: ModelShape, dtypes: Mapping[str, str]) -> dict[str, str]:
    """The type of each of Megatron's tensors by its name, from those of what it holds."""
    model = megatron_layout(shape, LearnerMesh(), forms=("te", "grouped")).rank(0)
    found: dict[str, str] = {}
    of: dict[str, str] = {}
    for piece in model.pieces:
        dtype, first = dtypes[piece.tensor], of.setdefault(piece.local, piece.tensor)
        if found.setdefault(piece.local, dtype) != dtype:
            raise CheckpointError(
                f"{first} is {found[piece.local]} and {piece.tensor} is {dtype}, and Megatron has "
                f"them in one tensor, {piece.local}; give one type with --dtype"
            )
    return found


def _in_files(
    chunks: Sequence[Chunk], dtypes: Mapping[str, str], file_bytes: int
) -> tuple[Chunk, ...]:
    """The chunks with the file of each, filled in order."""
    number, total, placed = 0, 0, []
    for chunk in chunks:
        size = TensorToStore(dtypes[place(chunk).name], chunk.sizes).num_bytes
        if total and total + size > file_bytes:
            number, total = number + 1, 0
        total += size
        placed.append((chunk, number))
    width = len(str(number))  # so that names sort as the files are filled
    return tuple(replace(chunk, file=f"__{n:0{width}d}_0.distcp") for chunk, n in placed)
