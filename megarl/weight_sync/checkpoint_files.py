"""The policy written as a Hugging Face checkpoint by all learner ranks at once.

Every rank writes its own intervals straight into the shard files: files are a layout, and the
planner says who writes what, each byte once. Owns the files and the folder until it is whole. Knows
nothing of servers.
"""

from __future__ import annotations

import itertools
import math
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from megarl.actor.parameters import BlockTable, block_table
from megarl.actor.shape import ModelShape
from megarl.config.model_folder import copy_beside, write_config
from megarl.durable import sync_path
from megarl.errors import CheckpointError, in_words
from megarl.reshard import execute
from megarl.reshard.blocks import ScaleBlock
from megarl.reshard.files import FLOAT8, layout_of_headers
from megarl.reshard.layout import Box, Layout, local_box
from megarl.reshard.page import bytes_text
from megarl.reshard.shard_files import SHARD_BYTES, TensorToStore, shard_files, write_index
from megarl.reshard.store import cached_plan
from megarl.weight_sync.formats import WireFormat, dtype_name, wire_format
from megarl.weight_sync.full import stored_shape
from megarl.weight_sync.together import from_all

STORED_AS = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float8_e4m3fn: FLOAT8}
LOADED_AS = {spelled: dtype for dtype, spelled in STORED_AS.items()}
PARTIAL = ".partial"  # behind a folder's name until it is whole


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
        self.files = shard_files(_stored_tensors(table, self._wire), shard_bytes)
        written = layout_of_headers({Path(file.name): file.tensors for file in self.files}, table)
        plan = cached_plan(layout, written, None, self._wire.policy.itemsize)
        self._moves = plan.sends(rank)

    @property
    def num_bytes(self) -> int:
        """Bytes of all files."""
        return sum(file.num_bytes for file in self.files)

    def write(self, folder: Path) -> None:
        """Write the checkpoint: `folder` is there when it is whole, and not before. Collective.

        What an earlier try has left of it is removed first. Raises CheckpointError, on every rank
        and with nothing left, where one of them cannot write, or where `folder` is there already.
        """
        part = folder.with_name(folder.name + PARTIAL)
        is_first = self._rank == 0
        try:
            self._step(folder, lambda: self._lay_out(part, folder) if is_first else None)
            self._step(folder, lambda: self._fill(part))
            self._step(folder, lambda: _publish_folder(part, folder) if is_first else None)
        except CheckpointError:
            if is_first:
                shutil.rmtree(part, ignore_errors=True)
            raise

    def _step(self, folder: Path, work: Callable[[], object]) -> None:
        """Have every rank do its part; all raise where one fails."""
        error = ""
        try:
            work()
        except Exception as caught:  # noqa: BLE001 - raised on all ranks, which wait for it
            has_text = isinstance(caught, OSError) and caught.strerror and not caught.filename
            text = caught.strerror if has_text else in_words(caught)
            error = f"learner rank {self._rank}: {text}"
        errors = [text for text in from_all(self._group, error) if text]
        if errors:
            raise CheckpointError(
                f"{folder}: the policy was not written there: {'; '.join(errors)}; it takes "
                f"{bytes_text(self.num_bytes)} on a file system that all nodes share"
            )

    def _lay_out(self, part: Path, folder: Path) -> None:
        """Rank 0: all files in their sizes with their headers, and what is not weights."""
        if folder.exists():
            raise CheckpointError(f"{folder} exists already, and nothing is overwritten")
        if part.exists():
            shutil.rmtree(part)
        part.mkdir(parents=True)
        for file in self.files:
            with (part / file.name).open("wb") as opened:
                opened.write(file.header)
                opened.truncate(file.num_bytes)
        write_index(self.files, part)
        copy_beside(self._model, part)
        dtype = dtype_name(self._wire.policy)
        write_config(self._model, part, dtype, self._num_mtp_layers, self._fp8_block)

    def _fill(self, part: Path) -> None:
        """This rank's intervals, down to the disk."""
        opened: dict[int, int] = {}
        try:
            for move in self._moves:
                file = self.files[move.dst]
                if move.dst not in opened:
                    opened[move.dst] = os.open(part / file.name, os.O_WRONLY)
                stored = file.tensors[move.dst_local]
                dtype = LOADED_AS[stored.dtype]
                values = execute.read(move, self._parameters).detach().to("cpu", dtype)
                box = local_box(move.box, move.dst_at)
                _write_box(opened[move.dst], stored.start, stored.shape, box, values)
            for descriptor in opened.values():
                os.fsync(descriptor)
        finally:
            for descriptor in opened.values():
                os.close(descriptor)


def _stored_tensors(table: BlockTable, wire: WireFormat) -> dict[str, TensorToStore]:
    """Every tensor of the checkpoint by name, in the order of the forward pass."""
    return {
        name: TensorToStore(STORED_AS[wire.of_precision(p.precision)], stored_shape(p))
        for p in table.parameters
        for name in p.stored_names()
    }


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
        sync_path(path)
    sync_path(part)
    part.rename(folder)
    sync_path(folder.parent)
