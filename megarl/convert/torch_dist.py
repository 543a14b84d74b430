"""A Megatron distributed checkpoint (torch_dist) to write, as Megatron-Core's own save has it.

Owns chunks in files, torch's metadata and Megatron's. Neither Megatron nor a process group is
needed. Source: torch 2.13, distributed/checkpoint/filesystem.py; megatron-core 0.19.2,
dist_checkpointing/serialization.py.
"""

from __future__ import annotations

import io
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
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
from megarl.convert.kept import Kept
from megarl.convert.numbers import TORCH
from megarl.convert.stored import Stored, parts
from megarl.convert.target import TargetFile, Tell, Tensors
from megarl.errors import CheckpointError
from megarl.reshard.dist_checkpoint import (
    Chunk,
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
    from, which are kept beside, so that the way back is known. `kept` gives, of the chunks of
    weights that are written, what is kept beside them: that has files of its own. Raises
    CheckpointError where parameters that Megatron keeps as one tensor have several types.
    """

    def __init__(
        self,
        shape: ModelShape,
        dtypes: Mapping[str, str],
        model: Path,
        file_bytes: int,
        kept: Callable[[Sequence[Chunk]], Kept | None] = lambda _: None,
    ) -> None:
        self._shape, self._model = replace(shape, fp8_block=None), model
        self._policy = policy_dtype(block_table(self._shape), dtypes)
        by_name = _chunk_dtypes(self._shape, dtypes)
        saved = [(chunk, by_name[place(chunk).name]) for chunk in saved_chunks(self._shape)]
        weights = [chunk for chunk, _ in saved]
        self._kept = kept(weights)
        groups = [saved, self._kept.chunks if self._kept else ()]
        weights_in_files, kept_in_files = _in_files(groups, file_bytes)
        self.layout = dist_checkpoint_layout(self._shape, [chunk for chunk, _ in weights_in_files])
        self._files: dict[str, dict[str, _Written]] = {}
        for chunk, dtype in weights_in_files:
            found = place(chunk)
            written = _Written(chunk, dtype, found.shape)
            self._files.setdefault(chunk.file, {})[found.local] = written
        for chunk, dtype in kept_in_files:
            local = f"{chunk.key}@{','.join(map(str, chunk.offsets))}"
            written = _Written(chunk, dtype, chunk.sizes)
            self._files.setdefault(chunk.file, {})[local] = written
        self._objects: dict[str, bytes] = {
            **dict.fromkeys(extra_states(weights), _pickled(None)),
            COMMON: _pickled({CONTENT_KEY: CONTENT}),
        }
        if self._kept:
            self._objects |= {key: self._kept.object(key) for key in self._kept.objects}
        self.files = tuple(
            TargetFile(name, {n: w.to_store for n, w in held.items()}, _num_bytes(held))
            for name, held in self._files.items()
        )

    def kept(self, number: int) -> Tensors:
        """See `Target`."""
        assert self._kept is not None
        for local, written in self._files[self.files[number].name].items():
            yield local, self._kept.tensor(written.chunk)

    def write(self, folder: Path, number: int, tensors: Tensors, tell: Tell) -> Receipt:
        """Write one file; see `Target`."""
        file = self.files[number]
        receipt: Receipt = []
        with (folder / file.name).open("wb") as opened:
            for local, tensor in tensors:
                written, start = self._files[file.name][local], opened.tell()
                chunk, content = written.chunk, _bytes(tensor, written.dtype, tell)
                size = write_tensor(opened, written.dtype, chunk.sizes, content)
                receipt.append((chunk.key, list(chunk.offsets), start, size))
            for key, value in self._objects.items() if number == 0 else ():
                receipt.append((key, None, opened.tell(), len(value)))
                opened.write(value)
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
        for held in self._files.values():
            for written in held.values():
                chunk = written.chunk
                if chunk.key not in facts:
                    properties = TensorProperties(dtype=TORCH[written.dtype])
                    size = torch.Size(chunk.shape)
                    facts[chunk.key] = TensorStorageMetadata(properties, size, [])
                where = ChunkStorageMetadata(torch.Size(chunk.offsets), torch.Size(chunk.sizes))
                facts[chunk.key].chunks.append(where)
        return Metadata(facts)


@dataclass(frozen=True, slots=True)
class _Written:
    """A chunk to write, with its type and its shape in the layout."""

    chunk: Chunk
    dtype: str
    shape: tuple[int, ...]

    @property
    def to_store(self) -> TensorToStore:
        return TensorToStore(self.dtype, self.shape)


def _num_bytes(held: Mapping[str, _Written]) -> int:
    return sum(written.to_store.num_bytes for written in held.values())


def _pickled(value: Any) -> bytes:
    """An object as Megatron stores one."""
    out = io.BytesIO()
    torch.save([value], out)
    return out.getvalue()


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


Typed = tuple[Chunk, str]
"""A chunk and the type of its numbers."""


def _in_files(groups: Sequence[Sequence[Typed]], file_bytes: int) -> list[list[Typed]]:
    """The chunks of each group with the file of each, filled in order; no group shares a file."""
    number, placed = -1, []
    for group in groups:
        total, here = file_bytes, []
        for chunk, dtype in group:
            size = TensorToStore(dtype, chunk.sizes).num_bytes
            if total + size > file_bytes:
                number, total = number + 1, 0
            total += size
            here.append((chunk, dtype, number))
        placed.append(here)
    width = len(str(number))  # so that names sort as the files are filled
    return [
        [(replace(chunk, file=f"__{n:0{width}d}_0.distcp"), dtype) for chunk, dtype, n in here]
        for here in placed
    ]
