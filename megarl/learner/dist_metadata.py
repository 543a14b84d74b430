"""Megatron distributed checkpoints (torch_dist) as chunks: what is stored where, and its values.

Owns the reading of torch's own metadata of such a folder; whose layout it is, is the caller's.
"""

from __future__ import annotations

import io
import pickle
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorStorageMetadata

from megarl.errors import CheckpointError
from megarl.reshard.dist_checkpoint import Chunk


class DistCheckpoint:
    """The folder `path`: its chunks, and the values of each.

    Raises CheckpointError where it is no such checkpoint, or its metadata cannot be read.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            metadata = FileSystemReader(path).read_metadata()
        except (OSError, EOFError, pickle.UnpicklingError) as error:
            raise CheckpointError(
                f"{path}: its .metadata cannot be read ({error}); name a folder that Megatron "
                "saved in torch_dist format"
            ) from error
        self._storage = metadata.storage_data
        chunks = []
        for key, facts in metadata.state_dict_metadata.items():
            if isinstance(facts, TensorStorageMetadata):
                for part in facts.chunks:
                    file = self._storage[MetadataIndex(key, part.offsets)].relative_path
                    sizes = tuple(part.sizes)
                    chunks.append(Chunk(key, tuple(facts.size), tuple(part.offsets), sizes, file))
        self.chunks = tuple(chunks)

    def read(self, chunk: Chunk) -> Tensor:
        """The values of a chunk, in its stored type and with its stored dims.

        Raises CheckpointError where the file is not as the metadata says.
        """
        stored = self._storage[MetadataIndex(chunk.key, torch.Size(chunk.offsets))]
        path = self._path / stored.relative_path
        try:
            with path.open("rb") as file:
                file.seek(stored.offset)
                raw = file.read(stored.length)
            tensor: Tensor = torch.load(io.BytesIO(raw), map_location="cpu", weights_only=True)
        except (OSError, EOFError, RuntimeError, pickle.UnpicklingError) as error:
            raise CheckpointError(
                f"{path}: {chunk.key} at {list(chunk.offsets)} cannot be read ({error}); use "
                "another checkpoint"
            ) from error
        return tensor.reshape(chunk.sizes)
