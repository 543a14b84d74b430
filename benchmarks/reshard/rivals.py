"""What other methods move, written from their rules: no code of theirs runs here.

broadcast: each pipeline stage gathers its tensors whole and one of its ranks broadcasts them to all
servers, one stage after the other (slime, verl, AReaL, the defaults of miles and NeMo-RL).
broadcast_8_rails: each tensor has an owner, which broadcasts it to every GPU over a node's eight
NICs (checkpoint-engine). shard_p2p: every GPU is sent exactly what it holds (awex, and others that
intersect shards).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from benchmarks.reshard.minimum import Need
from megarl.actor.parameters import element_bytes
from megarl.reshard.layout import Layout, num_elements
from megarl.reshard.minimum import Nodes

NIC_BYTES_PER_S = 50e9  # one 400 Gbit/s NIC; only the floors in seconds depend on it
NICS_PER_NODE = 8


@dataclass(frozen=True, slots=True)
class Moved:
    """What a method moves. `floor_s` is of the wire into the servers alone."""

    wire_bytes: int
    gpu_bytes: int
    """Bytes into the servers' GPUs, over the network or inside the node, all GPUs together."""
    gathered_bytes: int
    """Bytes moved among the learner's ranks before anything is sent."""
    floor_s: float


def model_bytes(destination: Layout, policy_bytes: int = 2) -> int:
    """All parameters once."""
    table = destination.table
    return sum(
        parameter.num_elements * element_bytes(parameter, policy_bytes)
        for block in table.blocks
        for parameter in table.kinds[block.kind]
    )


def broadcast(source: Layout, destination: Layout, nodes: Nodes) -> Moved:
    """All-gather inside each pipeline stage, then broadcast to every server rank, stage by stage.

    A ring enters each node once. One NIC sends at a time.
    """
    size = model_bytes(destination)
    gathered = sum(_gathered(source, stage) for stage in range(len(source.stages)))
    return Moved(
        size * len(set(nodes.values())), size * len(nodes), gathered, size / NIC_BYTES_PER_S
    )


def broadcast_8_rails(destination: Layout, nodes: Nodes) -> Moved:
    """Every GPU is handed all tensors; each enters a node once, over its eight NICs together."""
    size = model_bytes(destination)
    floor_s = size / (NIC_BYTES_PER_S * NICS_PER_NODE)
    return Moved(size * len(set(nodes.values())), size * len(nodes), 0, floor_s)


def shard_p2p(need: Need) -> Moved:
    """Every GPU is sent what it holds, whatever its neighbours hold. Each has a NIC of its own."""
    held: Mapping[int, int] = need.held_bytes
    total = sum(held.values())
    return Moved(total, total, 0, max(held.values(), default=0) / NIC_BYTES_PER_S)


def _gathered(source: Layout, stage: int) -> int:
    """What the broadcasting rank of a stage, its first, must fetch from its peers."""
    table = source.table
    counts: dict[tuple[str, int], int] = {}
    for site in source.sites:
        if site.stage == stage:
            place = (table.blocks[site.block].kind, site.template)
            counts[place] = counts.get(place, 0) + 1
    total = 0
    for (kind, template), count in counts.items():
        cost = {p.name: element_bytes(p, 2) for p in table.kinds[kind]}
        whole = {p.name: p.num_elements * cost[p.name] for p in table.kinds[kind]}
        held = dict.fromkeys(whole, 0)
        for tensor in source.templates[template].tensors:
            for shard in tensor.shards:
                if 0 in shard.holders:
                    for piece in shard.pieces:
                        held[piece.tensor] += num_elements(piece.box) * cost[piece.tensor]
        there = {
            p.tensor for t in source.templates[template].tensors for s in t.shards for p in s.pieces
        }
        total += count * sum(whole[name] - held[name] for name in there)
    return total
