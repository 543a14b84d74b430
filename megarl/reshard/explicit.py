"""Layouts of any form, from what each rank holds written out: files, and whatever has no table.

Owns the way from ranks to templates: blocks that one rank holds alone share their template.
"""

from __future__ import annotations

from collections.abc import Sequence

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

    Raises LayoutError where a local tensor holds pieces of two blocks, or of no parameter.
    """
    home = {
        parameter.name: (number, own.name)
        for number, block in enumerate(table.blocks)
        for parameter, own in zip(table.of(block), table.kinds[block.kind], strict=True)
    }
    held: dict[int, list[tuple[int, LocalTensor, tuple[Piece, ...], tuple[Padding, ...]]]] = {}
    for position, rank in enumerate(ranks):
        for tensor, pieces, paddings in _by_tensor(rank):
            blocks = {home[p.tensor][0] for p in pieces if p.tensor in home}
            if len(blocks) > 1 or any(p.tensor not in home for p in pieces):
                raise LayoutError(
                    f"{kind}: rank {rank.rank}: {tensor.name} holds {[p.tensor for p in pieces]}, "
                    "which are not parameters of one block"
                )
            number = blocks.pop() if blocks else 0
            held.setdefault(number, []).append((position, tensor, pieces, paddings))
    stages: dict[tuple[int, ...], int] = {}
    templates: dict[BlockLayout, int] = {}
    sites = []
    everyone = tuple(rank.rank for rank in ranks)
    for number, block in enumerate(table.blocks):
        found = held.get(number, [])
        owners = {position for position, *_ in found}
        alone = len(owners) == 1
        stage = (everyone[next(iter(owners))],) if alone else everyone
        template = BlockLayout(block.kind, _tensors(block, found, alone, home))
        sites.append(
            Site(
                number,
                stages.setdefault(stage, len(stages)),
                templates.setdefault(template, len(templates)),
                block.layer,
            )
        )
    stages.setdefault(everyone, len(stages))  # ranks that hold nothing are ranks too
    return Layout(kind, table, tuple(templates), tuple(sites), tuple(stages))


def _by_tensor(
    rank: RankLayout,
) -> list[tuple[LocalTensor, tuple[Piece, ...], tuple[Padding, ...]]]:
    pieces: dict[str, list[Piece]] = {tensor.name: [] for tensor in rank.tensors}
    paddings: dict[str, list[Padding]] = {tensor.name: [] for tensor in rank.tensors}
    for entries, into in ((rank.pieces, pieces), (rank.paddings, paddings)):
        for entry in entries:
            if entry.local not in into:
                raise LayoutError(
                    f"rank {rank.rank} holds a part in {entry.local}, which it does not have"
                )
            into[entry.local].append(entry)  # type: ignore[arg-type]
    return [(t, tuple(pieces[t.name]), tuple(paddings[t.name])) for t in rank.tensors]


def _tensors(
    block: Block,
    found: Sequence[tuple[int, LocalTensor, tuple[Piece, ...], tuple[Padding, ...]]],
    alone: bool,
    home: dict[str, tuple[int, str]],
) -> tuple[ShardedTensor, ...]:
    """The block's local tensors; ranks with equal contents become one shard."""
    shards: dict[
        tuple[str, tuple[int, ...]],
        dict[tuple[tuple[Piece, ...], tuple[Padding, ...]], list[int]],
    ] = {}
    for position, tensor, pieces, paddings in found:
        local = _template_name(tensor.name, block, home)
        content = (
            tuple(Piece(home[p.tensor][1], p.box, local, p.at) for p in pieces),
            tuple(Padding(local, p.box) for p in paddings),
        )
        holders = shards.setdefault((local, tensor.shape), {}).setdefault(content, [])
        holders.append(0 if alone else position)
    return tuple(
        ShardedTensor(
            name, shape, tuple(Shard(tuple(h), *content) for content, h in contents.items())
        )
        for (name, shape), contents in shards.items()
    )


def _template_name(name: str, block: Block, home: dict[str, tuple[int, str]]) -> str:
    """A local name with its layer number put back to `{layer}`, where that gives the name again."""
    if name in home:
        return home[name][1]
    marked = name.replace(f".{block.layer}.", ".{layer}.", 1)
    return marked if block.name(marked) == name else name
