"""A layout as other planners see it: each Hugging Face tensor, its full copies, their shards."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial

from megarl.actor.parameters import Block, Parameter
from megarl.reshard.layout import Box, Layout

Replicas = list[list[tuple[int, Box]]]
"""Copies of one tensor; each is the (rank, box) of its shards."""


def tensors_by_name(
    layout: Layout, ranks: Iterable[int], every: bool
) -> Iterator[tuple[str, str, Replicas]]:
    """(name, precision, replicas) of each checkpoint tensor, as `ranks` hold it.

    With `every`, all that each rank holds is in some replica, and the last ones may be partial;
    without, all replicas are whole copies.
    """
    chosen = frozenset(ranks)
    sites: dict[Block, list[tuple[int, int]]] = {}
    for site in layout.sites:
        block = layout.table.blocks[site.block]
        sites.setdefault(block, []).append((site.stage, site.template))
    known: dict[tuple[str, tuple[tuple[int, int], ...]], dict[str, list[Replicas]]] = {}
    for block in layout.table.blocks:
        places = (block.kind, tuple(sites.get(block, ())))
        if places not in known:
            held = _held(layout, places[1], chosen)
            known[places] = {
                parameter.name: [
                    _replicas(boxes, every)
                    for boxes in _by_expert(parameter, held.get(parameter.name, []))
                ]
                for parameter in layout.table.kinds[block.kind]
            }
        for own, parameter in zip(
            layout.table.kinds[block.kind], layout.table.of(block), strict=True
        ):
            names, found = parameter.stored_names(), known[places][own.name]
            for name, replicas in zip(names, found, strict=True):
                yield name, parameter.precision, replicas


def joined(boxes: Iterable[Box]) -> list[Box]:
    """Boxes with neighbours made one, dim by dim.

    >>> joined([((0, 2), (0, 4)), ((4, 6), (0, 4)), ((2, 4), (0, 4))])
    [((0, 6), (0, 4))]
    """
    found = sorted(set(boxes))
    for dim in reversed(range(len(found[0]) if found else 0)):
        found.sort(key=partial(_along, dim))
        merged: list[Box] = []
        for box in found:
            last = merged[-1] if merged else None
            if (
                last is not None
                and last[:dim] == box[:dim]
                and last[dim + 1 :] == box[dim + 1 :]
                and last[dim][1] == box[dim][0]
            ):
                merged[-1] = (*last[:dim], (last[dim][0], box[dim][1]), *last[dim + 1 :])
            else:
                merged.append(box)
        found = merged
    return sorted(found)


def _along(dim: int, box: Box) -> Box:
    """A key by which boxes that differ along one dim alone are neighbours."""
    return (*box[:dim], *box[dim + 1 :], box[dim])


def _held(
    layout: Layout, sites: tuple[tuple[int, int], ...], chosen: frozenset[int]
) -> dict[str, list[tuple[int, Box]]]:
    """For each parameter, the (rank, box) that the chosen ranks hold of it."""
    found: dict[str, list[tuple[int, Box]]] = {}
    for stage, template in sites:
        ranks = layout.stages[stage]
        for tensor in layout.templates[template].tensors:
            for shard in tensor.shards:
                holders = [ranks[i] for i in shard.holders if ranks[i] in chosen]
                for piece in shard.pieces:
                    found.setdefault(piece.tensor, []).extend((r, piece.box) for r in holders)
    return found


def _by_expert(parameter: Parameter, held: list[tuple[int, Box]]) -> list[list[tuple[int, Box]]]:
    """What is held of each checkpoint tensor: one, or one for each expert of a stack."""
    if not parameter.stacked:
        return [held]
    found: list[list[tuple[int, Box]]] = [[] for _ in range(parameter.shape[0])]
    for rank, box in held:
        for expert in range(*box[0]):
            found[expert].append((rank, box[1:]))
    return found


def _replicas(held: list[tuple[int, Box]], every: bool) -> Replicas:
    """The k-th rank that holds each box is in the k-th copy."""
    by_rank: dict[int, list[Box]] = {}
    for rank, box in held:
        by_rank.setdefault(rank, []).append(box)
    holders: dict[Box, list[int]] = {}
    for rank in sorted(by_rank):
        for box in joined(by_rank[rank]):
            holders.setdefault(box, []).append(rank)
    counts = [len(ranks) for ranks in holders.values()]
    number = (max if every else min)(counts, default=0)
    return [
        [(ranks[k], box) for box, ranks in holders.items() if k < len(ranks)] for k in range(number)
    ]
