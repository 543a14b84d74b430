"""How one local tensor is cut from the policy's tensors: the cuts of the family tables, as boxes.

Owns the arithmetic of intervals, which both engines share. Knows no name of a tensor and no mesh:
it is told how many shards there are and which positions of a stage hold each.

Every parameter here has rows and, but for biases and norms, columns; those of routed experts have a
leading dim of experts. Boxes and offsets are in elements.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from megarl.actor.families.family import Held
from megarl.actor.parameters import Parameter
from megarl.errors import LayoutError
from megarl.reshard.layout import Box, Padding, Piece, Shard, ShardedTensor, overlap

Holders = Sequence[tuple[int, ...]]
"""For each shard in order, the positions of the stage that hold it."""


@dataclass(frozen=True, slots=True)
class Heads:
    """The attention heads that a fused tensor interleaves. `gated`: each query has a gate row."""

    num: int
    kv: int
    dim: int
    gated: bool = False


@dataclass(frozen=True, slots=True)
class Experts:
    """The experts of one shard: [start, end), and which one alone where each has its own tensor."""

    start: int
    end: int
    own: int | None = None

    @property
    def lead(self) -> Box:
        """The box along the experts' dim."""
        if self.own is not None:
            return ((self.start + self.own, self.start + self.own + 1),)
        return ((self.start, self.end),)

    @property
    def at(self) -> tuple[int, ...]:
        """The offset along it: none where the local tensor lacks the dim."""
        return () if self.own is not None else (0,)


Content = tuple[tuple[int, ...], tuple[Piece, ...], tuple[Padding, ...]]
"""The shape of a local tensor, and what it holds."""


def cut_tensor(
    held: Held,
    parameters: Sequence[Parameter],
    holders: Holders,
    heads: Heads,
    vocabulary_rows: int = 0,
) -> ShardedTensor:
    """The local tensor `held` of `parameters`, one for each of its kinds, over len(holders) shards.

    `vocabulary_rows` are a shard's rows of a padded vocabulary. A "whole" tensor has one shard:
    give one tuple of holders. Raises LayoutError where a size does not split.
    """
    contents = [
        cut_shard(held, parameters, index, len(holders), heads, vocabulary_rows)
        for index in range(len(holders))
    ]
    return assemble(held.name, contents, holders)


def cut_shard(
    held: Held,
    parameters: Sequence[Parameter],
    index: int,
    count: int,
    heads: Heads,
    vocabulary_rows: int = 0,
) -> Content:
    """What shard `index` of `count` holds of a tensor without experts."""
    match held.cut:
        case "whole":
            return rows(held.name, parameters, 0, 1)
        case "rows":
            return rows(held.name, parameters, index, count)
        case "columns":
            return columns(held.name, parameters[0], index, count)
        case "vocabulary":
            return vocabulary(held.name, parameters[0], index, vocabulary_rows)
        case "grouped_qkv":
            return grouped_qkv(held.name, parameters, index, count, heads)
        case "heads_qkv":
            return heads_qkv(held.name, parameters, index, count, heads)


def cut_experts(
    held: Held, parameters: Sequence[Parameter], holders: Sequence[Holders]
) -> tuple[ShardedTensor, ...]:
    """The local tensors of routed experts: holders[e][x] hold shard x of the e-th part of them.

    One tensor with a leading dim of experts; or, with `{expert}` in the name, one for each expert
    that a rank holds.
    """
    num_experts, parts = parameters[0].shape[0], len(holders)
    if num_experts % parts:
        raise LayoutError(
            f"{num_experts} experts do not split over ep={parts}; use an ep that divides "
            f"{num_experts}"
        )
    local = num_experts // parts
    every = "{expert}" in held.name
    flat = [ranks for part in holders for ranks in part]
    tensors = []
    for own in range(local) if every else (None,):
        name = held.name if own is None else held.name.replace("{expert}", str(own))
        contents = []
        for part, shards in enumerate(holders):
            experts = Experts(part * local, (part + 1) * local, own)
            for index in range(len(shards)):
                if held.cut == "columns":
                    contents.append(columns(name, parameters[0], index, len(shards), experts))
                elif held.cut == "rows":
                    contents.append(rows(name, parameters, index, len(shards), experts))
                else:
                    raise LayoutError(f"{held.name}: routed experts are not cut as {held.cut}")
        tensors.append(assemble(name, contents, flat))
    return tuple(tensors)


def assemble(name: str, contents: Sequence[Content], holders: Holders) -> ShardedTensor:
    """One sharded tensor of the contents of its shards; shards with equal contents become one."""
    shapes = {shape for shape, _, _ in contents}
    if len(shapes) != 1:
        raise LayoutError(f"{name} has different shapes on different ranks: {sorted(shapes)}")
    merged: dict[tuple[tuple[Piece, ...], tuple[Padding, ...]], list[int]] = {}
    for (_, pieces, paddings), ranks in zip(contents, holders, strict=True):
        merged.setdefault((pieces, paddings), []).extend(ranks)
    shards = tuple(
        Shard(tuple(sorted(ranks)), pieces, paddings)
        for (pieces, paddings), ranks in merged.items()
    )
    return ShardedTensor(name, shapes.pop(), shards)


def rows(
    name: str,
    parameters: Sequence[Parameter],
    index: int,
    count: int,
    experts: Experts | None = None,
) -> Content:
    """The index-th part of each parameter's rows, below one another.

    >>> gate, up = Parameter("gate", (8, 3), "gate"), Parameter("up", (8, 3), "up")
    >>> shape, pieces, _ = rows("fc1", [gate, up], 1, 4)
    >>> shape, [(p.tensor, p.box[0], p.at) for p in pieces]
    ((4, 3), [('gate', (2, 4), (0, 0)), ('up', (2, 4), (2, 0))])
    """
    lead, lead_at = _lead(experts)
    first, pieces, rest = 0, [], _rest(parameters[0], experts)
    for parameter in parameters:
        size = _split(name, parameter, _row_dim(experts), count)
        box = (*lead, (index * size, (index + 1) * size), *rest)
        pieces.append(Piece(parameter.name, box, name, (*lead_at, first, *_zeros(rest))))
        first += size
    shape = (*_lead_shape(experts), first, *(end for _, end in rest))
    return shape, tuple(pieces), ()


def columns(
    name: str, parameter: Parameter, index: int, count: int, experts: Experts | None = None
) -> Content:
    """The index-th part of the columns."""
    lead, lead_at = _lead(experts)
    row_dim = _row_dim(experts)
    num_rows = parameter.shape[row_dim]
    size = _split(name, parameter, row_dim + 1, count)
    box = (*lead, (0, num_rows), (index * size, (index + 1) * size))
    shape = (*_lead_shape(experts), num_rows, size)
    return shape, (Piece(parameter.name, box, name, (*lead_at, 0, 0)),), ()


def vocabulary(name: str, parameter: Parameter, index: int, num_rows: int) -> Content:
    """Rows [index, index + 1) * num_rows; those at and beyond the vocabulary are padding."""
    size, rest = parameter.shape[0], _rest(parameter, None)
    start = min(index * num_rows, size)
    end = min(start + num_rows, size)
    pieces, paddings = [], []
    if end > start:
        pieces.append(Piece(parameter.name, ((start, end), *rest), name, (0, *_zeros(rest))))
    if end - start < num_rows:
        paddings.append(Padding(name, ((end - start, num_rows), *rest)))
    return (num_rows, *(end for _, end in rest)), tuple(pieces), tuple(paddings)


def fused_groups(heads: Heads) -> Iterator[tuple[int, int, int, int]]:
    """(part, first row, end row, row in the fused tensor) of Megatron's fused qkv, in its order.

    Parts are queries 0, keys 1, values 2. A group is its queries, their gates where there are any,
    one key, one value. With gates, Hugging Face has each head's query and gate together.
    """
    per_group, dim = heads.num // heads.kv, heads.dim
    queries = per_group * dim * (2 if heads.gated else 1)
    for group in range(heads.kv):
        start = group * (queries + 2 * dim)
        if heads.gated:
            for i in range(per_group):
                head = (group * per_group + i) * 2 * dim
                yield 0, head, head + dim, start + i * dim
                yield 0, head + dim, head + 2 * dim, start + (per_group + i) * dim
        else:
            yield 0, group * queries, (group + 1) * queries, start
        yield 1, group * dim, (group + 1) * dim, start + queries
        yield 2, group * dim, (group + 1) * dim, start + queries + dim


def grouped_qkv(
    name: str, parameters: Sequence[Parameter], index: int, count: int, heads: Heads
) -> Content:
    """Raw rows of Megatron's fused tensor: with more shards than groups they may cut a head."""
    rest = _rest(parameters[0], None)
    fused_rows = sum(parameter.shape[0] for parameter in parameters)
    if fused_rows % count:
        raise LayoutError(
            f"{fused_rows} rows of the fused qkv do not split over tp={count}; "
            f"use a tp that divides {heads.kv}"
        )
    size = fused_rows // count
    first = index * size
    pieces = []
    for part, start, end, fused in fused_groups(heads):
        shared = overlap(((first, first + size),), ((fused, fused + end - start),))
        if shared is not None:
            ((low, high),) = shared
            box = ((start + low - fused, start + high - fused), *rest)
            pieces.append(Piece(parameters[part].name, box, name, (low - first, *_zeros(rest))))
    return (size, *(end for _, end in rest)), tuple(pieces), ()


def heads_qkv(
    name: str, parameters: Sequence[Parameter], index: int, count: int, heads: Heads
) -> Content:
    """The index-th part of the query heads, then of the key heads, then of the value heads.

    With more shards than KV heads, count / kv shards in a row hold copies of one.
    """
    if heads.num % count:
        raise LayoutError(f"{heads.num} attention heads do not split over tp={count}")
    if heads.kv % count and count % heads.kv:
        raise LayoutError(f"{heads.kv} kv heads neither split over nor divide tp={count}")
    rest = _rest(parameters[0], None)
    queries = parameters[0].shape[0] // count
    keys = max(1, heads.kv // count) * heads.dim
    slot = index // max(1, count // heads.kv)
    spans = (
        (index * queries, (index + 1) * queries),
        (slot * keys, (slot + 1) * keys),
        (slot * keys, (slot + 1) * keys),
    )
    at = (0, queries, queries + keys)
    pieces = tuple(
        Piece(parameter.name, (span, *rest), name, (row, *_zeros(rest)))
        for parameter, span, row in zip(parameters, spans, at, strict=True)
    )
    return (queries + 2 * keys, *(end for _, end in rest)), pieces, ()


def _row_dim(experts: Experts | None) -> int:
    return 0 if experts is None else 1


def _lead(experts: Experts | None) -> tuple[Box, tuple[int, ...]]:
    return ((), ()) if experts is None else (experts.lead, experts.at)


def _lead_shape(experts: Experts | None) -> tuple[int, ...]:
    if experts is None or experts.own is not None:
        return ()
    return (experts.end - experts.start,)


def _rest(parameter: Parameter, experts: Experts | None) -> Box:
    """The whole of every dim behind the rows."""
    return tuple((0, size) for size in parameter.shape[_row_dim(experts) + 1 :])


def _zeros(box: Box) -> tuple[int, ...]:
    return (0,) * len(box)


def _split(name: str, parameter: Parameter, dim: int, count: int) -> int:
    size = parameter.shape[dim]
    if size % count:
        raise LayoutError(
            f"{size} {'rows' if dim == _row_dim_of(parameter) else 'columns'} of "
            f"{parameter.name} do not split over the {count} shards of {name}; use a number that "
            f"divides {size}"
        )
    return size // count


def _row_dim_of(parameter: Parameter) -> int:
    return 1 if parameter.stacked else 0
