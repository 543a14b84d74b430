"""What must move, by who can send it: the least that the busiest rank of any plan has to do.

The minimum itself is painted by megarl.reshard.minimum, which asks no plan and no planner. Owns
what each set of source ranks alone can send, and the least of the busiest ranks that follows.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np

from megarl.actor.parameters import element_bytes
from megarl.reshard.layout import Layout, num_elements
from megarl.reshard.minimum import Nodes, Painting, Ranks, paintings


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
    need = Need(dict.fromkeys(sorted(set(destination_nodes.values())), 0))
    for painting in paintings(source, destination, source_nodes, destination_nodes):
        cost = element_bytes(painting.parameter, policy_bytes) * painting.times
        for node, count in painting.entering().items():
            need.into_node[node] += count * cost
        for ranks, count in _by_holders(painting).items():
            need.by_holders[ranks] = need.by_holders.get(ranks, 0) + count * cost
        for box, ranks in painting.wanted:
            for rank in ranks:
                held = need.held_bytes.get(rank, 0)
                need.held_bytes[rank] = held + num_elements(box) * cost
    return need


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


def _connected(sets: Iterable[Ranks]) -> list[Ranks]:
    groups: list[Ranks] = []
    for ranks in sets:
        apart = [group for group in groups if not group & ranks]
        groups = [*apart, ranks.union(*(group for group in groups if group & ranks))]
    return groups


def _by_holders(painting: Painting) -> dict[Ranks, int]:
    """Elements that must cross, by who holds them, counted once for each node that they enter.

    Each cell's set of holders is found by refining a numbering of the cells box after box.
    """
    grid = painting.grid
    number = np.zeros(grid.volume.shape, np.int64)
    sets: list[Ranks] = [frozenset()]
    numbers: dict[Ranks, int] = {sets[0]: 0}
    for box, ranks in painting.held:
        region = number[grid.at(box)]
        for old in np.unique(region):
            union = sets[old] | ranks
            if union not in numbers:
                numbers[union] = len(sets)
                sets.append(union)
            region[region == old] = -1 - numbers[union]
        region[...] = -1 - region
    crossings = np.zeros(grid.volume.shape, np.int64)
    for cells in painting.crossing.values():
        crossings += cells
    totals = np.zeros(len(sets), np.int64)
    np.add.at(totals, number.ravel(), (grid.volume * crossings).ravel())
    if totals[0]:
        raise NotHeldError(
            f"{painting.parameter.name}: no source rank holds {totals[0]} elements of it"
        )
    return {ranks: size for ranks, size in zip(sets, totals.tolist(), strict=True) if size}
