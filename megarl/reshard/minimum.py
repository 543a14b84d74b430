"""The least that must cross the network, from two layouts and a placement alone.

Owns the lower bound: each byte that a node's ranks need and that no source rank on the node holds
enters the node once. No plan is asked, so a plan can be judged by it.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left
from collections.abc import Iterable, Mapping

import numpy as np

from megarl.reshard.cells import BYTES
from megarl.reshard.layout import Box, Layout
from megarl.reshard.placement import Device, Placement

Places = tuple[tuple[int, int], ...]
"""(stage, template) of each site of a block."""

Boxes = frozenset[Box]


def minimum_network_bytes(
    source: Layout, destination: Layout, placement: Placement, policy_bytes: int = 2
) -> dict[int, int]:
    """For each destination node the distinct bytes that it needs and does not hold."""
    given, taken = _places(source), _places(destination)
    numbers = {block: number for number, block in enumerate(source.table.blocks)}
    groups: dict[tuple[str, Places, Places], int] = {}
    for number, block in enumerate(destination.table.blocks):
        ours = given[numbers[block]] if block in numbers else ()
        key = (block.kind, ours, taken[number])
        groups[key] = groups.get(key, 0) + 1
    least: dict[int, int] = {}
    volumes: dict[tuple[Boxes, Boxes], int] = {}
    for (kind, ours, theirs), times in groups.items():
        have = _by_node(source, ours, placement.source)
        want = _by_node(destination, theirs, placement.destination)
        width = {
            p.name: BYTES.get(p.precision, policy_bytes) for p in destination.table.kinds[kind]
        }
        for (name, node), boxes in want.items():
            key_boxes = (frozenset(boxes), frozenset(have.get((name, node), ())))
            if key_boxes not in volumes:
                volumes[key_boxes] = _volume(*key_boxes)
            least[node] = least.get(node, 0) + volumes[key_boxes] * width[name] * times
    return least


def _places(layout: Layout) -> list[Places]:
    found: list[list[tuple[int, int]]] = [[] for _ in layout.table.blocks]
    for site in layout.sites:
        found[site.block].append((site.stage, site.template))
    return [tuple(places) for places in found]


def _by_node(
    layout: Layout, places: Places, devices: Mapping[int, Device]
) -> dict[tuple[str, int], set[Box]]:
    """(parameter, node) -> the boxes that the node's ranks hold."""
    found: dict[tuple[str, int], set[Box]] = {}
    for stage, template in places:
        ranks = layout.stages[stage]
        for tensor in layout.templates[template].tensors:
            for shard in tensor.shards:
                nodes = {devices[ranks[position]].node for position in shard.holders}
                for piece, node in itertools.product(shard.pieces, nodes):
                    found.setdefault((piece.tensor, node), set()).add(piece.box)
    return found


def _volume(wanted: Iterable[Box], held: Iterable[Box]) -> int:
    """Elements in some box of `wanted` and in none of `held`."""
    wanted, held = list(wanted), list(held)
    dims = range(len(wanted[0]))
    edges = [sorted({edge for box in (*wanted, *held) for edge in box[dim]}) for dim in dims]
    inside = np.zeros([len(e) - 1 for e in edges], bool)
    for boxes, value in ((wanted, True), (held, False)):
        for box in boxes:
            spans = zip(edges, box, strict=True)
            inside[tuple(slice(bisect_left(e, a), bisect_left(e, b)) for e, (a, b) in spans)] = (
                value
            )
    sizes = np.ones((), np.int64)
    for e in edges:
        sizes = np.multiply.outer(sizes, np.diff(np.array(e, np.int64)))
    return int(sizes[inside].sum())
