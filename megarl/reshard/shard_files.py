"""Safetensors files that are to be written: which tensor is in which, where, and their headers.

Owns names, headers and offsets; the files are a layout by `files.layout_of_headers`. Who writes
the numbers is elsewhere.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from megarl.actor.parameters import SCALE_SUFFIX
from megarl.reshard.files import INDEX, SINGLE, STORED, StoredTensor

SHARD_BYTES = 5_000_000_000  # of one file, as Hugging Face's save_pretrained has it


@dataclass(frozen=True, slots=True)
class TensorToStore:
    """A tensor of a checkpoint: its type as safetensors spells it, and its shape."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """Of its elements."""
        return math.prod(self.shape) * STORED[self.dtype].itemsize


@dataclass(frozen=True, slots=True)
class ShardFile:
    """One file: its name, its header, its tensors in the order of their bytes, and its size."""

    name: str
    header: bytes
    tensors: Mapping[str, StoredTensor]
    num_bytes: int


def shard_files(
    tensors: Mapping[str, TensorToStore], shard_bytes: int = SHARD_BYTES
) -> tuple[ShardFile, ...]:
    """The files of a checkpoint of these tensors by name, filled in their order.

    A tensor that is larger than `shard_bytes` has a file of its own; scales that follow their
    tensor stay with it.
    """
    parts = _parts(tensors, shard_bytes)
    return tuple(
        _shard_file(_file_name(number, len(parts)), names, tensors)
        for number, names in enumerate(parts)
    )


def write_index(files: Sequence[ShardFile], folder: Path) -> None:
    """Write the index of the files, where there are several. Raises OSError."""
    if len(files) > 1:
        weight_map = {name: file.name for file in files for name in file.tensors}
        total = sum(file.num_bytes - len(file.header) for file in files)
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (folder / INDEX).write_text(json.dumps(index, indent=2), encoding="utf-8")


def _parts(tensors: Mapping[str, TensorToStore], shard_bytes: int) -> list[list[str]]:
    parts: list[list[str]] = [[]]
    total = 0
    for name, tensor in tensors.items():
        follows = name.endswith(SCALE_SUFFIX)
        if parts[-1] and total + tensor.num_bytes > shard_bytes and not follows:
            parts.append([])
            total = 0
        parts[-1].append(name)
        total += tensor.num_bytes
    return parts


def _file_name(number: int, count: int) -> str:
    """As Hugging Face names them.

    >>> _file_name(0, 1), _file_name(1, 3)
    ('model.safetensors', 'model-00002-of-00003.safetensors')
    """
    return SINGLE if count == 1 else f"model-{number + 1:05d}-of-{count:05d}.safetensors"


def _shard_file(name: str, names: Sequence[str], tensors: Mapping[str, TensorToStore]) -> ShardFile:
    """Header and offsets of a file: wider elements first, so that all are aligned."""
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    places: dict[str, tuple[int, int]] = {}
    at = 0
    for tensor in sorted(names, key=lambda tensor: -STORED[tensors[tensor].dtype].itemsize):
        facts = tensors[tensor]
        places[tensor] = (at, at + facts.num_bytes)
        entries[tensor] = {
            "dtype": facts.dtype,
            "shape": list(facts.shape),
            "data_offsets": list(places[tensor]),
        }
        at += facts.num_bytes
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # the data begins at a multiple of 8
    header = struct.pack("<Q", len(text)) + text
    stored = {
        tensor: StoredTensor(
            tensors[tensor].dtype, tensors[tensor].shape, len(header) + start, len(header) + end
        )
        for tensor, (start, end) in places.items()
    }
    return ShardFile(name, header, stored, len(header) + at)
