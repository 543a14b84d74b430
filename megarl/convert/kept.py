"""What a Megatron checkpoint has beside the model, kept in another: optimizer and common state.

Owns which of it can be kept. The optimizer's tensors are cut anew as the model's are, and stay bit
for bit what they are; objects are copied as bytes, and never unpickled. Source: megatron-core
0.19.2, optimizer/distrib_optimizer.py and dist_checkpointing/optimizer.py.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from megarl.convert.dist_files import COMMON, DistCheckpoint
from megarl.convert.numbers import Bits
from megarl.convert.stored import FileTensor
from megarl.errors import CheckpointError
from megarl.reshard.dist_checkpoint import EMBEDDING, Chunk
from megarl.reshard.execute import slices
from megarl.reshard.files import FLOATS
from megarl.reshard.layout import Box, overlap, within

OPTIMIZER = ("optimizer.", "chained_")  # how its keys begin
VOCABULARY = (EMBEDDING, "output_layer.weight")  # whose rows are padded as each layout needs
_STATE = re.compile(r"((?:chained_\d+\.)?optimizer\.state\.\w+\.)(.+)")
_WITHOUT = "or give --no-optimizer, which converts the weights alone"


@dataclass(frozen=True)
class Kept:
    """Of the checkpoint `source`: `chunks` to write, each with its type, and keys of `objects`."""

    source: DistCheckpoint
    chunks: tuple[tuple[Chunk, str], ...]
    objects: tuple[str, ...]
    held: Mapping[str, tuple[Chunk, ...]]

    def tensor(self, chunk: Chunk) -> Recut:
        """The values of a chunk to write."""
        return Recut(self.source, chunk, self.held[chunk.key])

    def object(self, key: str) -> bytes:
        """An object as it is stored."""
        return self.source.raw(key)


class Recut:
    """A chunk of the target made of those that the source has of the same tensor."""

    def __init__(self, source: DistCheckpoint, chunk: Chunk, held: Sequence[Chunk]) -> None:
        self.shape = chunk.sizes
        self._source, self._box = source, _box(chunk)
        self._held = [(_box(one), one) for one in held if overlap(_box(one), self._box)]
        self._known: dict[Chunk, FileTensor] = {}

    def read(self, box: Box, out: Bits) -> None:
        """See `Stored`. Rows of padding that the source has not are zeros."""
        out[...] = 0
        wanted = tuple(
            (first + low, first + high)
            for (first, _), (low, high) in zip(self._box, box, strict=True)
        )
        for held, chunk in self._held:
            shared = overlap(held, wanted)
            if shared is not None:
                if chunk not in self._known:
                    self._known[chunk] = self._source.stored(chunk)
                self._known[chunk].read(within(shared, held), out[slices(within(shared, wanted))])


def keep(source: DistCheckpoint, path: Path, model: Sequence[Chunk]) -> Kept | None:
    """What is kept beside the chunks `model` that are to be written; None without an optimizer.

    Raises CheckpointError where its state is cut for one layout, or named otherwise than the model
    that is to be written.
    """
    found = [chunk for chunk in source.chunks if chunk.key.startswith(OPTIMIZER)]
    if not found:
        return None
    targets: dict[str, list[Chunk]] = {}
    for chunk in model:
        targets.setdefault(chunk.key, []).append(chunk)
    held: dict[str, list[Chunk]] = {}
    chunks: list[tuple[Chunk, str]] = []
    for chunk in found:
        if chunk.key not in held:
            chunks += _cut_anew(path, chunk, source.dtype(chunk), targets)
        held.setdefault(chunk.key, []).append(chunk)
    if COMMON not in source.objects:
        raise CheckpointError(
            f"{path} has its common state in a file of its own, as Megatron before 0.19 saved it; "
            f"load it in Megatron and save it again, {_WITHOUT}"
        )
    objects = tuple(key for key in source.objects if "._extra_state/" not in key)
    return Kept(source, tuple(chunks), objects, {k: tuple(v) for k, v in held.items()})


def _cut_anew(
    path: Path, chunk: Chunk, dtype: str, targets: Mapping[str, Sequence[Chunk]]
) -> list[tuple[Chunk, str]]:
    """The chunks to write of the optimizer's tensor that this one is a part of."""
    state = _STATE.fullmatch(chunk.key)
    if state is None:
        raise CheckpointError(
            f"{path}: {chunk.key} is optimizer state in buckets that are cut for one layout; save "
            f"it from Megatron with --dist-ckpt-optim-fully-reshardable, {_WITHOUT}"
        )
    prefix, name = state.groups()
    cut = targets.get(name, ())
    if not cut or (name not in VOCABULARY and cut[0].shape != chunk.shape):
        raise CheckpointError(
            f"{path}: the optimizer has {chunk.key} of shape {list(chunk.shape)}, and the weights "
            f"are written under Megatron's default names, where {name} is "
            f"{list(cut[0].shape) if cut else 'none'}; load and save it with the layer spec of "
            f"Transformer Engine and without non_homogeneous_layers, {_WITHOUT}"
        )
    if dtype not in FLOATS:
        raise CheckpointError(f"{path}: {chunk.key} is stored as {dtype}; {_WITHOUT[3:]}")
    return [(replace(one, key=prefix + name), dtype) for one in cut]


def _box(chunk: Chunk) -> Box:
    return tuple((o, o + size) for o, size in zip(chunk.offsets, chunk.sizes, strict=True))
