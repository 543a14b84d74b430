"""A layout: for each rank, which box of which global tensor it holds, in which local tensor, where.

Owns boxes, pieces and the layout itself, kept as one template for each kind of block, because a
model is a few kinds of blocks many times over. Knows nothing of Megatron, SGLang or files; to this
module they are all layouts.
"""

from __future__ import annotations

import hashlib
import itertools
import math
from bisect import bisect_left
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from megarl.actor.parameters import BlockTable, Parameter

Box = tuple[tuple[int, int], ...]
"""Half-open intervals, one for each dim."""

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class LocalTensor:
    """One tensor that a rank holds, under the rank's own name for it."""

    name: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Piece:
    """Global `box` of parameter `tensor` lies in tensor `local` from offset `at` on, per dim.

    A local tensor may have fewer dims than the parameter: then it lacks the leading ones, along
    which the box has one index (one expert of a stack). It may have more: then the piece has one
    index along the leading ones (a shared expert in the slot of an expert), the first of `at`.
    """

    tensor: str
    box: Box
    local: str
    at: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Padding:
    """Elements of `local` (a local box) that belong to no parameter: they must be zero."""

    local: str
    box: Box


@dataclass(frozen=True, slots=True)
class Shard:
    """One distinct content of a local tensor, and the positions in the stage that hold it.

    Positions of one shard are replicas of one another. Pieces and paddings tile the tensor.
    """

    holders: tuple[int, ...]
    pieces: tuple[Piece, ...]
    paddings: tuple[Padding, ...] = ()


@dataclass(frozen=True, slots=True)
class ShardedTensor:
    """A local tensor as all ranks of one stage hold it; names in it may hold `{layer}`."""

    name: str
    shape: tuple[int, ...]
    shards: tuple[Shard, ...]


@dataclass(frozen=True, slots=True)
class BlockLayout:
    """How the ranks of a stage hold one kind of block."""

    kind: str
    tensors: tuple[ShardedTensor, ...]


@dataclass(frozen=True, slots=True)
class Site:
    """One block in one place: `blocks[block]` is held by `stages[stage]` as `templates[template]`.

    `layer` is the number that local names carry, `prefix` stands before them. A block may have
    several sites: each is a copy of it, or of some of its tensors.
    """

    block: int
    stage: int
    template: int
    layer: int | None = None
    prefix: str = ""

    def name(self, template: str) -> str:
        """A local name at this site.

        >>> Site(0, 0, 0, 7).name("decoder.layers.{layer}.mlp.linear_fc2.weight")
        'decoder.layers.7.mlp.linear_fc2.weight'
        """
        if self.layer is not None:
            template = template.replace("{layer}", str(self.layer))
        return self.prefix + template


@dataclass(frozen=True, slots=True)
class RankLayout:
    """All that one rank holds; pieces and paddings tile its tensors exactly."""

    rank: int
    tensors: tuple[LocalTensor, ...]
    pieces: tuple[Piece, ...]
    paddings: tuple[Padding, ...] = ()


@dataclass(frozen=True)
class Layout:
    """The parameters of `table` laid out over ranks. `kind` says whose layout it is.

    `stages` are groups of ranks that hold the same blocks: position i of a shard's holders is
    `stages[site.stage][i]`. A rank may stand in several stages.
    """

    kind: str
    table: BlockTable
    templates: tuple[BlockLayout, ...]
    sites: tuple[Site, ...]
    stages: tuple[tuple[int, ...], ...]

    @cached_property
    def parameters(self) -> tuple[Parameter, ...]:
        """All parameters in the order of the forward pass."""
        return self.table.parameters

    @cached_property
    def digest(self) -> str:
        """SHA-256 over everything in the layout: equal digests are equal layouts."""
        total = hashlib.sha256(self.kind.encode())
        for part in (self.table.blocks, dict(self.table.kinds), self.templates, self.sites):
            total.update(repr(part).encode())
        total.update(repr(self.stages).encode())
        return total.hexdigest()

    @cached_property
    def rank_ids(self) -> tuple[int, ...]:
        """All ranks, ascending."""
        return tuple(sorted({rank for stage in self.stages for rank in stage}))

    @cached_property
    def rank_set(self) -> frozenset[int]:
        """All ranks, to be looked up."""
        return frozenset(self.rank_ids)

    @cached_property
    def ranks(self) -> tuple[RankLayout, ...]:
        """What each rank holds, written out, in rank order."""
        return tuple(self.rank(rank) for rank in self.rank_ids)

    @cached_property
    def _positions(self) -> dict[int, dict[int, set[int]]]:
        """For each rank, its positions in each stage that it stands in."""
        found: dict[int, dict[int, set[int]]] = {}
        for number, stage in enumerate(self.stages):
            for position, rank in enumerate(stage):
                found.setdefault(rank, {}).setdefault(number, set()).add(position)
        return found

    def rank(self, rank: int) -> RankLayout:
        """What one rank holds, written out."""
        tensors: list[LocalTensor] = []
        pieces: list[Piece] = []
        paddings: list[Padding] = []
        places = self._positions.get(rank, {})
        for site in self.sites:
            positions = places.get(site.stage)
            if positions is None:
                continue
            block = self.table.blocks[site.block]
            for tensor in self.templates[site.template].tensors:
                for shard in tensor.shards:
                    if positions.isdisjoint(shard.holders):
                        continue
                    name = site.name(tensor.name)
                    tensors.append(LocalTensor(name, tensor.shape))
                    pieces += (Piece(block.name(p.tensor), p.box, name, p.at) for p in shard.pieces)
                    paddings += (Padding(name, padding.box) for padding in shard.paddings)
        return RankLayout(rank, tuple(tensors), tuple(pieces), tuple(paddings))

    def only(self, rank: int) -> Layout:
        """The same layout with one rank alone: a plan to it is that rank's part of the work."""
        stages = tuple((rank,) if rank in stage else () for stage in self.stages)
        templates: dict[BlockLayout, int] = {}
        sites = []
        for site in self.sites:
            held = [i for i, other in enumerate(self.stages[site.stage]) if other == rank]
            if held:
                alone = _held_by(self.templates[site.template], held[0])
                index = templates.setdefault(alone, len(templates))
                sites.append(Site(site.block, site.stage, index, site.layer, site.prefix))
        kind = f"{self.kind}, rank {rank}"
        return Layout(kind, self.table, tuple(templates), tuple(sites), stages)


def _held_by(template: BlockLayout, position: int) -> BlockLayout:
    """What one position holds of a block, as the layout of a stage of one rank."""
    tensors = []
    for tensor in template.tensors:
        for shard in tensor.shards:
            if position in shard.holders:
                alone = Shard((0,), shard.pieces, shard.paddings)
                tensors.append(ShardedTensor(tensor.name, tensor.shape, (alone,)))
    return BlockLayout(template.kind, tuple(tensors))


def overlap(a: Box, b: Box) -> Box | None:
    """The region that two boxes share, or None.

    >>> overlap(((0, 4), (0, 8)), ((2, 6), (0, 8)))
    ((2, 4), (0, 8))
    >>> overlap(((0, 2),), ((2, 4),)) is None
    True
    """
    shared = []
    for (a_start, a_end), (b_start, b_end) in zip(a, b, strict=True):
        start, end = max(a_start, b_start), min(a_end, b_end)
        if start >= end:
            return None
        shared.append((start, end))
    return tuple(shared)


def num_elements(box: Box) -> int:
    """Elements in a box.

    >>> num_elements(((2, 4), (0, 8)))
    16
    """
    return math.prod(end - start for start, end in box)


def whole(shape: tuple[int, ...]) -> Box:
    """The box of a whole tensor."""
    return tuple((0, size) for size in shape)


def within(box: Box, outer: Box) -> Box:
    """The box counted from where the outer one begins.

    >>> within(((4, 6), (0, 8)), ((2, 6), (0, 8)))
    ((2, 4), (0, 8))
    """
    return tuple(
        (start - first, end - first) for (start, end), (first, _) in zip(box, outer, strict=True)
    )


def local_box(box: Box, at: tuple[int, ...]) -> Box:
    """Where `box` lies in a local tensor that holds it from offset `at` on.

    A local tensor with fewer dims lacks the leading ones; in one with more, the leading ones have
    one index.

    >>> local_box(((6, 8), (0, 4)), (1, 0))
    ((1, 3), (0, 4))
    >>> local_box(((7, 8), (6, 8), (0, 4)), (1, 0))
    ((1, 3), (0, 4))
    >>> local_box(((6, 8), (0, 4)), (9, 1, 0))
    ((9, 10), (1, 3), (0, 4))
    """
    added = max(0, len(at) - len(box))
    own = box[len(box) - len(at) + added :]
    return tuple((o, o + 1) for o in at[:added]) + tuple(
        (o, o + end - start) for (start, end), o in zip(own, at[added:], strict=True)
    )


def offset_in(piece: Piece, box: Box) -> tuple[int, ...]:
    """The local offset of `box`, a part of `piece.box`."""
    lacking = max(0, len(box) - len(piece.at))
    added = max(0, len(piece.at) - len(box))
    return piece.at[:added] + tuple(
        at + start - origin
        for at, (start, _), (origin, _) in zip(
            piece.at[added:], box[lacking:], piece.box[lacking:], strict=True
        )
    )


def cut(boxes: Iterable[Box]) -> Iterator[tuple[Box, Box]]:
    """(cell, box) pairs: each box cut where any box begins or ends; cells are equal or disjoint.

    >>> list(cut([((0, 4),), ((2, 6),)]))
    [(((0, 2),), ((0, 4),)), (((2, 4),), ((0, 4),)), (((2, 4),), ((2, 6),)), (((4, 6),), ((2, 6),))]
    """
    boxes = list(boxes)
    if not boxes:
        return
    cuts = [sorted({edge for box in boxes for edge in box[dim]}) for dim in range(len(boxes[0]))]
    for box in boxes:
        spans = []
        for edges, (start, end) in zip(cuts, box, strict=True):
            part = edges[bisect_left(edges, start) : bisect_left(edges, end) + 1]
            spans.append(list(itertools.pairwise(part)))
        for cell in itertools.product(*spans):
            yield cell, box
