"""The least that must move, counted from two layouts alone: no plan and no planner is asked.

Every parameter of a block is painted on a grid of boxes: for each destination node the boxes that
its GPUs hold, less those that source ranks on the same node hold. Each of those bytes must cross
the network into the node once, whoever sends it. Blocks whose places are equal are painted once.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from megarl.actor.parameters import Block, Parameter
from megarl.reshard.layout import Box, Layout

Nodes = Mapping[int, int]
"""The node of each rank."""

Ranks = frozenset[int]
Painted = list[tuple[Box, Ranks]]
"""Boxes of one parameter, and the ranks that hold each."""

Sites = tuple[tuple[int, int], ...]
"""(stage, template) of each site of a block."""

Key = TypeVar("Key")

FIXED_BYTES = {"float32": 4, "float8": 1}  # whatever the precision of the policy is


class NotHeldError(Exception):
    """The source lacks something that the destination needs."""


@dataclass
class Need:
    """Bytes that must enter each node, and bytes by the source ranks that hold them.

    `by_holders` counts a byte once for each node that it must enter. `held_bytes` is what each
    destination rank holds, padding left out.
    """

    into_node: dict[int, int] = field(default_factory=dict)
    by_holders: dict[Ranks, int] = field(default_factory=dict)
    held_bytes: dict[int, int] = field(default_factory=dict)

    @property
    def minimum_bytes(self) -> int:
        """The least bytes on the wire of any plan."""
        return sum(self.into_node.values())

    def add(self, other: Need) -> None:
        """Add another need to this one."""
        _add(self.into_node, other.into_node)
        _add(self.by_holders, other.by_holders)
        _add(self.held_bytes, other.held_bytes)


def element_bytes(parameter: Parameter, policy_bytes: int) -> int:
    """Bytes of one element on the wire."""
    return FIXED_BYTES.get(parameter.precision, policy_bytes)


def count_need(
    source: Layout,
    destination: Layout,
    source_nodes: Nodes,
    destination_nodes: Nodes,
    policy_bytes: int = 2,
) -> Need:
    """What must enter each destination node, from the two layouts and the node of each rank.

    Raises NotHeldError where the destination needs what no source rank holds.
    """
    total = Need(dict.fromkeys(sorted(set(destination_nodes.values())), 0))
    have, want = _sites(source), _sites(destination)
    known: dict[tuple[str, Sites, Sites], Need] = {}
    held, wanted = _Pieces(source), _Pieces(destination)
    for block in destination.table.blocks:
        places = (block.kind, have.get(block, ()), want.get(block, ()))
        if places not in known:
            need = known[places] = Need()
            mine, theirs = held.of(places[1]), wanted.of(places[2])
            for parameter in destination.table.kinds[block.kind]:
                cost = element_bytes(parameter, policy_bytes)
                boxes = theirs.get(parameter.name, [])
                grid = _Grid(parameter.name, mine.get(parameter.name, []), boxes)
                need.add(grid.need(source_nodes, destination_nodes, cost))
        total.add(known[places])
    return total


def least_busiest(by_holders: Mapping[Ranks, int]) -> float:
    """Bytes that the busiest source rank sends at least, without relays between nodes.

    For any set of ranks: what only they hold, over their number. The sets tried are those that hold
    something in common, what overlaps each, and the connected groups (pipeline stages).
    """
    sets = set(by_holders)
    for start in list(sets):
        sets.add(start.union(*(other for other in by_holders if other & start)))
    sets.update(_connected(by_holders))
    best = 0.0
    for ranks in sets:
        only_theirs = sum(size for holders, size in by_holders.items() if holders <= ranks)
        best = max(best, only_theirs / len(ranks))
    return best


def least_busiest_ingress(need: Need, destination_nodes: Nodes) -> float:
    """Bytes that the busiest destination rank receives over the network at least."""
    gpus: dict[int, int] = {}
    for node in destination_nodes.values():
        gpus[node] = gpus.get(node, 0) + 1
    return max((size / gpus[node] for node, size in need.into_node.items()), default=0.0)


def _add(sums: dict[Key, int], more: Mapping[Key, int]) -> None:
    for key, size in more.items():
        sums[key] = sums.get(key, 0) + size


def _connected(sets: Iterable[Ranks]) -> list[Ranks]:
    groups: list[Ranks] = []
    for ranks in sets:
        apart = [group for group in groups if not group & ranks]
        groups = [*apart, ranks.union(*(group for group in groups if group & ranks))]
    return groups


def _sites(layout: Layout) -> dict[Block, Sites]:
    found: dict[Block, Sites] = {}
    for site in layout.sites:
        block = layout.table.blocks[site.block]
        found[block] = (*found.get(block, ()), (site.stage, site.template))
    return found


class _Pieces:
    """A layout's boxes by parameter, for sites of a block."""

    def __init__(self, layout: Layout) -> None:
        self.layout = layout

    def of(self, sites: Sites) -> dict[str, Painted]:
        """For each parameter, the boxes that the sites hold and the ranks that hold each."""
        found: dict[str, Painted] = {}
        for stage, template in sites:
            ranks = self.layout.stages[stage]
            for tensor in self.layout.templates[template].tensors:
                for shard in tensor.shards:
                    holders = frozenset(ranks[position] for position in shard.holders)
                    if holders:
                        for piece in shard.pieces:
                            found.setdefault(piece.tensor, []).append((piece.box, holders))
        return found


class _Grid:
    """One parameter cut wherever a box of either side begins or ends."""

    def __init__(self, name: str, held: Painted, wanted: Painted) -> None:
        self.name, self.held, self.wanted = name, held, wanted
        boxes = [box for box, _ in (*held, *wanted)]
        num_dims = len(boxes[0]) if boxes else 0
        edges = [sorted({edge for box in boxes for edge in box[dim]}) for dim in range(num_dims)]
        self.position = [{edge: i for i, edge in enumerate(e)} for e in edges]
        self.volume: NDArray[np.int64] = np.ones((), np.int64)
        for e in edges:
            self.volume = np.multiply.outer(self.volume, np.diff(np.array(e, np.int64)))

    def need(self, source_nodes: Nodes, destination_nodes: Nodes, cost: int) -> Need:
        """What this parameter adds, at `cost` bytes for an element."""
        need = Need()
        crossings = np.zeros(self.volume.shape, np.int64)
        wanted, held = _by_node(self.wanted, destination_nodes), _by_node(self.held, source_nodes)
        painted: dict[tuple[tuple[Box, ...], tuple[Box, ...]], NDArray[np.bool_]] = {}
        for node, boxes in wanted.items():
            same = (tuple(boxes), tuple(held.get(node, ())))
            if same not in painted:
                painted[same] = self._paint(same[0]) & ~self._paint(same[1])
            need.into_node[node] = int(self.volume[painted[same]].sum()) * cost
            crossings += painted[same]
        for box, ranks in self.wanted:
            size = int(np.prod([end - start for start, end in box], dtype=np.int64)) * cost
            for rank in ranks:
                need.held_bytes[rank] = need.held_bytes.get(rank, 0) + size
        self._by_holders(need, crossings, cost)
        return need

    def _at(self, box: Box) -> tuple[slice, ...]:
        return tuple(
            slice(at[start], at[end]) for at, (start, end) in zip(self.position, box, strict=True)
        )

    def _paint(self, boxes: Sequence[Box]) -> NDArray[np.bool_]:
        grid = np.zeros(self.volume.shape, np.bool_)
        for box in boxes:
            grid[self._at(box)] = True
        return grid

    def _by_holders(self, need: Need, crossings: NDArray[np.int64], cost: int) -> None:
        """Each cell's set of holders, by refining a numbering of the cells box after box."""
        number = np.zeros(self.volume.shape, np.int64)
        sets: list[Ranks] = [frozenset()]
        numbers: dict[Ranks, int] = {sets[0]: 0}
        for box, ranks in self.held:
            region = number[self._at(box)]
            for old in np.unique(region):
                union = sets[old] | ranks
                if union not in numbers:
                    numbers[union] = len(sets)
                    sets.append(union)
                region[region == old] = -1 - numbers[union]
            region[...] = -1 - region
        weight = self.volume * crossings * cost
        totals = np.zeros(len(sets), np.int64)
        np.add.at(totals, number.ravel(), weight.ravel())
        if totals[0]:
            raise NotHeldError(f"{self.name}: no source rank holds {totals[0]} bytes of it")
        for ranks, size in zip(sets, totals.tolist(), strict=True):
            if size:
                need.by_holders[ranks] = need.by_holders.get(ranks, 0) + size


def _by_node(boxes: Painted, nodes: Nodes) -> dict[int, list[Box]]:
    found: dict[int, list[Box]] = {}
    for box, ranks in boxes:
        for node in sorted({nodes[rank] for rank in ranks}):
            found.setdefault(node, []).append(box)
    return found
