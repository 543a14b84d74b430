"""How one local tensor is cut from the policy's tensors: the cuts of the family tables, as boxes.

Owns the arithmetic of intervals, which both engines share. Knows no name of a tensor and no mesh:
it is told how many shards there are and which positions of a stage hold each.

Every parameter here has rows and, but for biases and norms, columns; those of routed experts have a
leading dim of experts. Boxes and offsets are in elements. `stretch` is padded size / size of what
is cut, for an engine that pads what does not split with zeros.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction

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


AS_IT_IS = Fraction(1)  # nothing is padded

Content = tuple[tuple[int, ...], tuple[Piece, ...], tuple[Padding, ...]]
"""The shape of a local tensor, and what it holds."""


def cut_tensor(
    held: Held,
    parameters: Sequence[Parameter],
    holders: Holders,
    heads: Heads,
    vocabulary_rows: int = 0,
    stretch: Fraction = AS_IT_IS,
) -> ShardedTensor:
    """The local tensor `held` of `parameters`, one for each of its kinds, over len(holders) shards.

    `vocabulary_rows` are a shard's rows of a padded vocabulary. A "whole" tensor has one shard:
    give one tuple of holders. Raises LayoutError where a size does not split.
    """
    contents = [
        cut_shard(held, parameters, index, len(holders), heads, vocabulary_rows, stretch)
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
    stretch: Fraction = AS_IT_IS,
) -> Content:
    """What shard `index` of `count` holds of a tensor without experts."""
    match held.cut:
        case "whole":
            return rows(held.name, parameters, 0, 1)
        case "rows":
            return rows(held.name, parameters, index, count, stretch=stretch)
        case "columns":
            return columns(held.name, parameters[0], index, count, stretch=stretch)
        case "vocabulary":
            return vocabulary(held.name, parameters[0], index, vocabulary_rows)
        case "grouped_qkv":
            return grouped_qkv(held.name, parameters, index, count, heads)
        case "heads_qkv":
            return heads_qkv(held.name, parameters, index, count, heads, stretch)


def cut_experts(
    held: Held,
    parameters: Sequence[Parameter],
    holders: Sequence[Holders],
    stretch: Fraction = AS_IT_IS,
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
                    contents.append(
                        columns(name, parameters[0], index, len(shards), experts, stretch)
                    )
                elif held.cut == "rows":
                    contents.append(rows(name, parameters, index, len(shards), experts, stretch))
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
    stretch: Fraction = AS_IT_IS,
) -> Content:
    """The index-th part of each parameter's rows, below one another.

    >>> gate, up = Parameter("gate", (8, 3), "gate"), Parameter("up", (8, 3), "up")
    >>> shape, pieces, _ = rows("fc1", [gate, up], 1, 4)
    >>> shape, [(p.tensor, p.box[0], p.at) for p in pieces]
    ((4, 3), [('gate', (2, 4), (0, 0)), ('up', (2, 4), (2, 0))])
    """
    spans = []
    for parameter in parameters:
        size = _split(name, parameter, _row_dim(experts), count, stretch)
        spans.append((parameter, index * size, size))
    return _stack(name, spans, experts)


def columns(
    name: str,
    parameter: Parameter,
    index: int,
    count: int,
    experts: Experts | None = None,
    stretch: Fraction = AS_IT_IS,
) -> Content:
    """The index-th part of the columns."""
    lead, lead_at = _lead(experts)
    row_dim = _row_dim(experts)
    num_rows, num_columns = parameter.shape[row_dim : row_dim + 2]
    size = _split(name, parameter, row_dim + 1, count, stretch)
    start, end = _within(index * size, size, num_columns)
    shape = (*_lead_shape(experts), num_rows, size)
    box = (*lead, (0, num_rows), (start, end))
    pieces = (Piece(parameter.name, box, name, (*lead_at, 0, 0)),) if end > start else ()
    return shape, pieces, _padding(name, shape, len(lead_at) + 1, end - start, size)


def _stack(
    name: str, spans: Sequence[tuple[Parameter, int, int]], experts: Experts | None = None
) -> Content:
    """`num` rows from `first` on of each (parameter, first, num), below one another."""
    lead, lead_at = _lead(experts)
    rest = _rest(spans[0][0], experts)
    shape = (*_lead_shape(experts), sum(num for _, _, num in spans), *(end for _, end in rest))
    row = 0
    pieces: list[Piece] = []
    paddings: list[Padding] = []
    for parameter, first, num in spans:
        start, end = _within(first, num, parameter.shape[_row_dim(experts)])
        if end > start:
            at = (*lead_at, row, *_zeros(rest))
            pieces.append(Piece(parameter.name, (*lead, (start, end), *rest), name, at))
        paddings += _padding(name, shape, len(lead_at), row + end - start, row + num)
        row += num
    return shape, tuple(pieces), tuple(paddings)


def _within(first: int, num: int, size: int) -> tuple[int, int]:
    """What of [first, first + num) is below `size`."""
    return min(first, size), min(first + num, size)


def _padding(
    name: str, shape: tuple[int, ...], dim: int, start: int, end: int
) -> tuple[Padding, ...]:
    """The padding [start, end) along one dim of a local tensor, if there is any."""
    if start == end:
        return ()
    box = tuple((start, end) if i == dim else (0, size) for i, size in enumerate(shape))
    return (Padding(name, box),)


def vocabulary(name: str, parameter: Parameter, index: int, num_rows: int) -> Content:
    """Rows [index, index + 1) * num_rows; those at and beyond the vocabulary are padding."""
    return _stack(name, [(parameter, index * num_rows, num_rows)])


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
    name: str,
    parameters: Sequence[Parameter],
    index: int,
    count: int,
    heads: Heads,
    stretch: Fraction = AS_IT_IS,
) -> Content:
    """The index-th part of the query heads, then of the key heads, then of the value heads.

    With more shards than KV heads, count / kv shards in a row hold copies of one.
    """
    num, kv = (int(size * stretch) for size in (heads.num, heads.kv))
    if num % count:
        raise LayoutError(f"{num} attention heads do not split over tp={count}; use a divisor")
    if kv % count and count % kv:
        raise LayoutError(
            f"{kv} kv heads neither split over nor divide tp={count}; use a divisor or a multiple"
        )
    queries = int(parameters[0].shape[0] * stretch) // count
    keys = max(1, kv // count) * heads.dim
    slot = index // max(1, count // kv)
    spans = ((index * queries, queries), (slot * keys, keys), (slot * keys, keys))
    return _stack(name, [(p, *span) for p, span in zip(parameters, spans, strict=True)])


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


def _split(name: str, parameter: Parameter, dim: int, count: int, stretch: Fraction) -> int:
    size = parameter.shape[dim]
    padded = int(size * stretch)
    if padded % count:
        raise LayoutError(
            f"{size} {'rows' if dim == _row_dim_of(parameter) else 'columns'} of "
            f"{parameter.name} do not split over the {count} shards of {name}; use a number that "
            f"divides {padded}"
        )
    return padded // count


def _row_dim_of(parameter: Parameter) -> int:
    return 1 if parameter.stacked else 0
