"""Layouts of any form, from what each rank holds written out: files, and whatever has no table.

Owns the way from ranks to templates: blocks that ranks hold alike share their template.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from megarl.actor.parameters import Block, BlockTable, Parameter
from megarl.errors import LayoutError
from megarl.reshard.layout import (
    BlockLayout,
    Layout,
    LocalTensor,
    Padding,
    Piece,
    RankLayout,
    Shard,
    ShardedTensor,
    Site,
    whole,
)


def one_block(parameters: tuple[Parameter, ...]) -> BlockTable:
    """A table for parameters that have no table: all of them in one block."""
    return BlockTable((Block("all"),), {"all": parameters})


def full_layout(table: BlockTable, kind: str = "whole tensors") -> Layout:
    """One rank that holds every parameter whole, under its parameter's name."""
    templates: dict[str, BlockLayout] = {}
    for block_kind, parameters in table.kinds.items():
        tensors = tuple(
            ShardedTensor(p.name, p.shape, (Shard((0,), (_whole_piece(p),)),)) for p in parameters
        )
        templates[block_kind] = BlockLayout(block_kind, tensors)
    index = {block_kind: i for i, block_kind in enumerate(templates)}
    sites = tuple(
        Site(number, 0, index[block.kind], block.layer) for number, block in enumerate(table.blocks)
    )
    return Layout(kind, table, tuple(templates.values()), sites, ((0,),))


def _whole_piece(parameter: Parameter) -> Piece:
    zeros = (0,) * len(parameter.shape)
    return Piece(parameter.name, whole(parameter.shape), parameter.name, zeros)


def explicit_layout(kind: str, table: BlockTable, ranks: Sequence[RankLayout]) -> Layout:
    """The layout in which each rank holds exactly what is written out for it.

    A block's stage is the ranks that hold some of it, so that blocks cut alike share their
    template. Raises LayoutError where a local tensor holds pieces of two blocks or of no parameter,
    and where a rank has two tensors of one name.
    """
    numbers = [rank.rank for rank in ranks]
    if len(set(numbers)) != len(numbers):
        twice = next(number for number in numbers if numbers.count(number) > 1)
        raise LayoutError(f"{kind}: rank {twice} is written out twice")
    home = {
        parameter.name: (number, own.name)
        for number, block in enumerate(table.blocks)
        for parameter, own in zip(table.of(block), table.kinds[block.kind], strict=True)
    }
    held: dict[int, list[_Held]] = {}
    idle: list[_Held] = []
    block_of: dict[str, int] = {}
    for rank in ranks:
        for content in _by_tensor(kind, rank):
            number = _block_of(kind, content, home)
            if number is None:
                idle.append(content)
            else:
                held.setdefault(number, []).append(content)
                block_of.setdefault(content.tensor.name, number)
    for content in idle:  # padding alone: it goes where other ranks have the tensor of that name
        held.setdefault(block_of.get(content.tensor.name, 0), []).append(content)
    stages: dict[tuple[int, ...], int] = {}
    templates: dict[BlockLayout, int] = {}
    sites = []
    everyone = tuple(sorted(rank.rank for rank in ranks))
    for number, block in enumerate(table.blocks):
        found = held.get(number, [])
        owners = tuple(sorted({content.rank for content in found}))
        template = BlockLayout(block.kind, _tensors(block, found, owners, home))
        sites.append(
            Site(
                number,
                stages.setdefault(owners or everyone, len(stages)),
                templates.setdefault(template, len(templates)),
                block.layer,
            )
        )
    stages.setdefault(everyone, len(stages))  # ranks that hold nothing are ranks too
    return Layout(kind, table, tuple(templates), tuple(sites), tuple(stages))


@dataclass(frozen=True, slots=True)
class _Held:
    """One local tensor of one rank, with what it holds."""

    rank: int
    tensor: LocalTensor
    pieces: tuple[Piece, ...]
    paddings: tuple[Padding, ...]


def _by_tensor(kind: str, rank: RankLayout) -> Iterator[_Held]:
    pieces: dict[str, list[Piece]] = {tensor.name: [] for tensor in rank.tensors}
    paddings: dict[str, list[Padding]] = {tensor.name: [] for tensor in rank.tensors}
    if len(pieces) < len(rank.tensors):
        names = Counter(tensor.name for tensor in rank.tensors)
        raise LayoutError(
            f"{kind}: rank {rank.rank} has {names.most_common(1)[0][1]} tensors named "
            f"{names.most_common(1)[0][0]}; give each a name of its own"
        )
    try:
        for piece in rank.pieces:
            pieces[piece.local].append(piece)
        for padding in rank.paddings:
            paddings[padding.local].append(padding)
    except KeyError as error:
        raise LayoutError(
            f"{kind}: rank {rank.rank} holds a part in {error.args[0]}, which it does not have"
        ) from error
    for tensor in rank.tensors:
        own, zeros = pieces[tensor.name], paddings[tensor.name]
        yield _Held(rank.rank, tensor, tuple(own), tuple(zeros))


def _block_of(kind: str, content: _Held, home: Mapping[str, tuple[int, str]]) -> int | None:
    """The number of the one block whose parameters the tensor holds; None where it holds none."""
    names = [piece.tensor for piece in content.pieces]
    blocks = {home[name][0] if name in home else None for name in names}
    if len(blocks) > 1 or None in blocks:
        raise LayoutError(
            f"{kind}: rank {content.rank}: {content.tensor.name} holds {names}, which are not "
            "parameters of one block; lay them out as tensors of their own"
        )
    return blocks.pop() if blocks else None


def _tensors(
    block: Block,
    found: Sequence[_Held],
    owners: tuple[int, ...],
    home: Mapping[str, tuple[int, str]],
) -> tuple[ShardedTensor, ...]:
    """The block's local tensors; ranks with equal contents become one shard."""
    position = {rank: index for index, rank in enumerate(owners)}
    shards: dict[
        tuple[str, tuple[int, ...]],
        dict[tuple[tuple[Piece, ...], tuple[Padding, ...]], list[int]],
    ] = {}
    for held in found:
        local = _template_name(held.tensor.name, block, home)
        content = (
            tuple(Piece(home[p.tensor][1], p.box, local, p.at) for p in held.pieces),
            tuple(Padding(local, p.box) for p in held.paddings),
        )
        holders = shards.setdefault((local, held.tensor.shape), {}).setdefault(content, [])
        holders.append(position[held.rank])
    return tuple(
        ShardedTensor(
            name, shape, tuple(Shard(tuple(sorted(h)), *content) for content, h in contents.items())
        )
        for (name, shape), contents in shards.items()
    )


def _template_name(name: str, block: Block, home: Mapping[str, tuple[int, str]]) -> str:
    """A local name with its layer number put back to `{layer}`, where that gives the name again."""
    if name in home:
        return home[name][1]
    marked = name.replace(f".{block.layer}.", ".{layer}.", 1)
    return marked if block.name(marked) == name else name
