"""The policy written as a Hugging Face checkpoint by all learner ranks at once.

Every rank writes its own intervals straight into the shard files: files are a layout, and the
planner says who writes what, each byte once. Owns the files and the folder until it is whole. Knows
nothing of servers.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import shutil
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from megarl.actor.parameters import BlockTable, block_table
from megarl.actor.shape import ModelShape
from megarl.config.served import quantization_config
from megarl.errors import WeightSyncError, in_words
from megarl.reshard import execute
from megarl.reshard.blocks import ScaleBlock
from megarl.reshard.explicit import explicit_layout
from megarl.reshard.files import FLOAT8, INDEX, SINGLE
from megarl.reshard.layout import Box, Layout, LocalTensor, Piece, RankLayout, local_box, whole
from megarl.reshard.store import cached_plan
from megarl.weight_sync.formats import WireFormat, dtype_name, wire_format
from megarl.weight_sync.full import stored_shape
from megarl.weight_sync.together import from_all

SHARD_BYTES = 5_000_000_000  # of one file, as Hugging Face's save_pretrained has it
COPIED = (".json", ".txt", ".model", ".jinja", ".tiktoken")  # of the model's folder, but the index
STORED_AS = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float8_e4m3fn: FLOAT8}
_WRITING = ".writing"  # behind a folder's name until it is whole


@dataclass(frozen=True, slots=True)
class ShardFile:
    """One file: its name, its header, and where the bytes of each tensor begin, and its size."""

    name: str
    header: bytes
    starts: Mapping[str, int]
    num_bytes: int


class CheckpointWriter:
    """One learner rank's part in writing the policy as a checkpoint, again and again.

    `layout` is what the learner sends, `parameters` this rank's live tensors by its local names;
    `model` is the folder whose config and tokenizer files are copied. With `fp8_block` the
    checkpoint has float8 weights and scales, as `layout` has. All ranks reach the same `folder`s.
    """

    def __init__(
        self,
        shape: ModelShape,
        layout: Layout,
        rank: int,
        parameters: Mapping[str, torch.Tensor],
        dtype: str,
        model: Path,
        group: dist.ProcessGroup | None = None,
        shard_bytes: int = SHARD_BYTES,
        fp8_block: ScaleBlock | None = None,
    ) -> None:
        self._rank, self._parameters, self._group, self._model = rank, parameters, group, model
        self._wire, self._num_mtp_layers = wire_format(dtype, layout), shape.num_mtp_layers
        self._fp8_block = fp8_block
        table = block_table(shape, fp8_block)
        self._tensors = _stored_tensors(table, self._wire)
        parts = _shards(self._tensors, shard_bytes)
        self.files = tuple(
            _shard_file(_file_name(number, len(parts)), names, self._tensors)
            for number, names in enumerate(parts)
        )
        plan = cached_plan(layout, _files_layout(table, parts), None, self._wire.policy.itemsize)
        self._moves = plan.sends(rank)

    @property
    def num_bytes(self) -> int:
        """Bytes of all files."""
        return sum(file.num_bytes for file in self.files)

    def write(self, folder: Path) -> None:
        """Write the checkpoint: `folder` is there when it is whole, and not before. Collective.

        Raises WeightSyncError, on every rank, where one of them cannot write.
        """
        part = folder.with_name(folder.name + _WRITING)
        self._step(lambda: self._lay_out(part) if self._rank == 0 else None)
        self._step(lambda: self._fill(part))
        self._step(lambda: _publish_folder(part, folder) if self._rank == 0 else None)

    def _step(self, work: Callable[[], object]) -> None:
        """Have every rank do its part; all raise where one fails."""
        error = ""
        try:
            work()
        except Exception as caught:  # noqa: BLE001 - raised on all ranks, which wait for it
            error = f"learner rank {self._rank}: {in_words(caught)}"
        errors = [text for text in from_all(self._group, error) if text]
        if errors:
            raise WeightSyncError(
                f"the policy was not written to disk: {'; '.join(errors)}; weight_sync.disk_dir "
                "must be a folder with room on a file system that all nodes share"
            )

    def _lay_out(self, part: Path) -> None:
        """Rank 0: all files in their sizes with their headers, and what is not weights."""
        part.mkdir(parents=True)
        for file in self.files:
            with (part / file.name).open("wb") as opened:
                opened.write(file.header)
                opened.truncate(file.num_bytes)
        if len(self.files) > 1:
            weight_map = {name: file.name for file in self.files for name in file.starts}
            total = sum(file.num_bytes - len(file.header) for file in self.files)
            index = {"metadata": {"total_size": total}, "weight_map": weight_map}
            (part / INDEX).write_text(json.dumps(index, indent=2), encoding="utf-8")
        for path in sorted(self._model.iterdir()):
            if path.is_file() and path.suffix in COPIED and path.name != INDEX:
                shutil.copyfile(path, part / path.name)
        config = json.loads((self._model / "config.json").read_text(encoding="utf-8"))
        config.pop("quantization_config", None)  # the policy is not quantized, but for servers
        if self._fp8_block is not None:
            config["quantization_config"] = quantization_config(self._fp8_block)
        if "num_nextn_predict_layers" in config:
            config["num_nextn_predict_layers"] = self._num_mtp_layers
        for name in ("dtype", "torch_dtype"):
            if name in config:
                config[name] = dtype_name(self._wire.policy)
        (part / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")

    def _fill(self, part: Path) -> None:
        """This rank's intervals, down to the disk."""
        opened: dict[int, int] = {}
        try:
            for move in self._moves:
                file = self.files[move.dst]
                if move.dst not in opened:
                    opened[move.dst] = os.open(part / file.name, os.O_WRONLY)
                shape, dtype = self._tensors[move.dst_local]
                values = execute.read(move, self._parameters).detach().to("cpu", dtype)
                box = local_box(move.box, move.dst_at)
                _write_box(opened[move.dst], file.starts[move.dst_local], shape, box, values)
            for descriptor in opened.values():
                os.fsync(descriptor)
        finally:
            for descriptor in opened.values():
                os.close(descriptor)


Tensors = Mapping[str, tuple[tuple[int, ...], torch.dtype]]


def _stored_tensors(
    table: BlockTable, wire: WireFormat
) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Shape and dtype of every tensor of the checkpoint, in the order of the forward pass."""
    return {
        name: (stored_shape(parameter), wire.of_precision(parameter.precision))
        for parameter in table.parameters
        for name in parameter.stored_names()
    }


def _num_bytes(tensors: Tensors, name: str) -> int:
    shape, dtype = tensors[name]
    return math.prod(shape) * dtype.itemsize


def _shards(tensors: Tensors, shard_bytes: int) -> list[list[str]]:
    """Names by file, filled in order; a larger tensor has a file of its own."""
    parts: list[list[str]] = [[]]
    total = 0
    for name in tensors:
        size = _num_bytes(tensors, name)
        if parts[-1] and total + size > shard_bytes:
            parts.append([])
            total = 0
        parts[-1].append(name)
        total += size
    return parts


def _file_name(number: int, count: int) -> str:
    """As Hugging Face names them.

    >>> _file_name(0, 1), _file_name(1, 3)
    ('model.safetensors', 'model-00002-of-00003.safetensors')
    """
    return SINGLE if count == 1 else f"model-{number + 1:05d}-of-{count:05d}.safetensors"


def _shard_file(name: str, names: Sequence[str], tensors: Tensors) -> ShardFile:
    """Header and offsets of a file: wider elements first, so that all are aligned."""
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offsets, at = {}, 0
    for tensor in sorted(names, key=lambda tensor: -tensors[tensor][1].itemsize):
        shape, dtype = tensors[tensor]
        end = at + _num_bytes(tensors, tensor)
        entries[tensor] = {
            "dtype": STORED_AS[dtype],
            "shape": list(shape),
            "data_offsets": [at, end],
        }
        offsets[tensor], at = at, end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # the data begins at a multiple of 8
    header = struct.pack("<Q", len(text)) + text
    starts = {tensor: len(header) + offset for tensor, offset in offsets.items()}
    return ShardFile(name, header, starts, len(header) + at)


def _files_layout(table: BlockTable, parts: Sequence[Sequence[str]]) -> Layout:
    """Files as ranks, each with its tensors whole."""
    home = {
        name: (parameter, expert)
        for parameter in table.parameters
        for expert, name in enumerate(parameter.stored_names())
    }
    ranks = []
    for number, names in enumerate(parts):
        tensors, pieces = [], []
        for name in names:
            parameter, expert = home[name]
            shape = stored_shape(parameter)
            lead = ((expert, expert + 1),) if parameter.stacked else ()
            tensors.append(LocalTensor(name, shape))
            pieces.append(Piece(parameter.name, (*lead, *whole(shape)), name, (0,) * len(shape)))
        ranks.append(RankLayout(number, tuple(tensors), tuple(pieces)))
    return explicit_layout("files to write", table, ranks)


def _write_box(
    descriptor: int, start: int, shape: tuple[int, ...], box: Box, values: torch.Tensor
) -> None:
    """Write `values` to where `box` lies in a tensor of `shape` that begins at byte `start`."""
    itemsize = values.dtype.itemsize
    row = values.contiguous().view(-1).view(torch.uint8)
    data = memoryview(np.from_dlpack(row))  # numpy() would fix the size of live weights' memory
    length, offsets = runs(shape, box)
    for number, offset in enumerate(offsets):
        part = data[number * length * itemsize : (number + 1) * length * itemsize]
        at = start + offset * itemsize
        while part:
            written = os.pwrite(descriptor, part, at)
            part, at = part[written:], at + written


def runs(shape: tuple[int, ...], box: Box) -> tuple[int, Iterator[int]]:
    """The box's elements that follow each other in memory: how many, and where each run begins.

    >>> length, offsets = runs((4, 6), ((1, 3), (2, 4)))
    >>> length, list(offsets)
    (2, [8, 14])
    >>> length, offsets = runs((4, 6), ((1, 3), (0, 6)))
    >>> length, list(offsets)
    (12, [6])
    """
    split = len(shape)  # the first dim that a run has part of
    while split > 0 and (split == len(shape) or box[split] == (0, shape[split])):
        split -= 1
    strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    length = math.prod(end - start for start, end in box[split:])
    first = sum(
        start * stride for (start, _), stride in zip(box[split:], strides[split:], strict=True)
    )
    outer = [range(*interval) for interval in box[:split]]
    offsets = (
        first + sum(i * stride for i, stride in zip(index, strides[:split], strict=True))
        for index in itertools.product(*outer)
    )
    return length, offsets


def _publish_folder(part: Path, folder: Path) -> None:
    """Give a folder that is whole its name, so that it survives a crash from now on."""
    for path in part.iterdir():
        _sync(path)
    _sync(part)
    part.rename(folder)
    _sync(folder.parent)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
