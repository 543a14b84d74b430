"""The least that must cross the network, painted from two layouts and a placement alone.

Every parameter is painted on a grid of boxes: for each destination node the boxes that its ranks
hold, less those that source ranks on the same node hold. Each of those elements must cross the
network into the node once, whoever sends it. Blocks whose places are equal are painted once. Owns
the painting. No plan and no part of the planner is asked, so that a plan can be judged by it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from megarl.actor.parameters import Block, Parameter, element_bytes
from megarl.reshard.layout import Box, Layout
from megarl.reshard.placement import Placement

Nodes = Mapping[int, int]
"""The node of each rank."""

Ranks = frozenset[int]
Held = list[tuple[Box, Ranks]]
"""Boxes of one parameter, and the ranks that hold each."""

Sites = tuple[tuple[int, int], ...]
"""(stage, template) of each site of a block."""


class Grid:
    """One parameter cut wherever one of some boxes begins or ends; `volume` is in elements.

    >>> grid = Grid([((0, 4), (0, 8)), ((2, 6), (0, 8))])
    >>> grid.volume.tolist(), grid.paint([((2, 6), (0, 8))]).tolist()
    ([[16], [16], [16]], [[False], [True], [True]])
    """

    def __init__(self, boxes: Iterable[Box]) -> None:
        by_dim = zip(*boxes, strict=True)
        edges = [sorted({edge for span in spans for edge in span}) for spans in by_dim]
        self._position = [{edge: i for i, edge in enumerate(e)} for e in edges]
        self.volume: NDArray[np.int64] = np.ones((), np.int64)
        for e in edges:
            self.volume = np.multiply.outer(self.volume, np.diff(np.array(e, np.int64)))

    def at(self, box: Box) -> tuple[slice, ...]:
        """The grid cells of one of the boxes, as an index."""
        return tuple(
            slice(at[start], at[end]) for at, (start, end) in zip(self._position, box, strict=True)
        )

    def paint(self, boxes: Iterable[Box]) -> NDArray[np.bool_]:
        """Which cells lie in some of these boxes."""
        painted = np.zeros(self.volume.shape, np.bool_)
        for box in boxes:
            painted[self.at(box)] = True
        return painted


@dataclass(frozen=True)
class Painting:
    """One parameter of `times` blocks that are placed alike: who holds it, and what must cross.

    `crossing` has, for each destination node that holds some of it, the cells that must enter.
    """

    parameter: Parameter
    times: int
    held: Held
    wanted: Held
    grid: Grid
    crossing: Mapping[int, NDArray[np.bool_]]

    def entering(self) -> dict[int, int]:
        """Elements of one block's parameter that must enter each node."""
        known: dict[int, int] = {}  # nodes with equal boxes share an array
        found = {}
        for node, cells in self.crossing.items():
            if id(cells) not in known:
                known[id(cells)] = int(self.grid.volume[cells].sum())
            found[node] = known[id(cells)]
        return found


def minimum_network_bytes(
    source: Layout, destination: Layout, placement: Placement, policy_bytes: int = 2
) -> dict[int, int]:
    """For each destination node the distinct bytes that it needs and does not hold."""
    source_nodes = {rank: device.node for rank, device in placement.source.items()}
    nodes = {rank: device.node for rank, device in placement.destination.items()}
    least: dict[int, int] = {}
    for painting in paintings(source, destination, source_nodes, nodes):
        width = element_bytes(painting.parameter, policy_bytes) * painting.times
        for node, count in painting.entering().items():
            least[node] = least.get(node, 0) + count * width
    return least


def paintings(
    source: Layout, destination: Layout, source_nodes: Nodes, destination_nodes: Nodes
) -> Iterator[Painting]:
    """Every parameter of the destination, once for all blocks whose places are equal."""
    have, want = _sites(source), _sites(destination)
    groups: dict[tuple[str, Sites, Sites], int] = {}
    for block in destination.table.blocks:
        key = (block.kind, have.get(block, ()), want.get(block, ()))
        groups[key] = groups.get(key, 0) + 1
    for (kind, ours, theirs), times in groups.items():
        given, taken = _held(source, ours), _held(destination, theirs)
        for parameter in destination.table.kinds[kind]:
            held, wanted = given.get(parameter.name, []), taken.get(parameter.name, [])
            grid = Grid(box for box, _ in (*held, *wanted))
            crossing = _crossing(grid, held, wanted, source_nodes, destination_nodes)
            yield Painting(parameter, times, held, wanted, grid, crossing)


def _sites(layout: Layout) -> dict[Block, Sites]:
    found: dict[Block, Sites] = {}
    for site in layout.sites:
        block = layout.table.blocks[site.block]
        found[block] = (*found.get(block, ()), (site.stage, site.template))
    return found


def _held(layout: Layout, sites: Sites) -> dict[str, Held]:
    """For each parameter, the boxes that the sites hold and the ranks that hold each."""
    found: dict[str, Held] = {}
    for stage, template in sites:
        ranks = layout.stages[stage]
        for tensor in layout.templates[template].tensors:
            for shard in tensor.shards:
                holders = frozenset(ranks[position] for position in shard.holders)
                if holders:
                    for piece in shard.pieces:
                        found.setdefault(piece.tensor, []).append((piece.box, holders))
    return found


def _crossing(
    grid: Grid, held: Held, wanted: Held, source_nodes: Nodes, destination_nodes: Nodes
) -> dict[int, NDArray[np.bool_]]:
    have, want = _by_node(held, source_nodes), _by_node(wanted, destination_nodes)
    painted: dict[tuple[frozenset[Box], frozenset[Box]], NDArray[np.bool_]] = {}
    crossing = {}
    for node, boxes in want.items():
        both = (frozenset(boxes), frozenset(have.get(node, ())))
        if both not in painted:
            painted[both] = grid.paint(both[0]) & ~grid.paint(both[1])
        crossing[node] = painted[both]
    return crossing


def _by_node(held: Held, nodes: Nodes) -> dict[int, set[Box]]:
    found: dict[int, set[Box]] = {}
    for box, ranks in held:
        for node in {nodes[rank] for rank in ranks}:
            found.setdefault(node, set()).add(box)
    return found
