"""What a plan moves, over which links, against the least that must move, and where it would wait.

Owns the figures of `megarl reshard explain` and their keys in JSON (docs/explain.md). The page is
made of them in `page.py`. Knows nothing of settings.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any

from megarl.actor.parameters import SCALE_SUFFIX, BlockTable, element_bytes
from megarl.reshard.fabric import Fabric, Prediction, predict
from megarl.reshard.minimum import minimum_network_bytes
from megarl.reshard.notation import short
from megarl.reshard.plan import Plan
from megarl.reshard.precision import Decisions
from megarl.reshard.routes import Route, Traffic, group_ranks
from megarl.reshard.trace import HeldPart, Way

WAYS = tuple(field.name for field in fields(Traffic))
FORMAT = 1  # of the JSON object; raise it when a key changes its meaning


@dataclass(frozen=True, slots=True)
class Spread:
    """A number of each rank of one side: over all, of the busiest (the first such), on average."""

    total: int
    busiest: int
    busiest_rank: int
    mean: float

    @property
    def balance(self) -> float:
        """Busiest / mean; 1 where all have the same, or nothing."""
        return self.busiest / self.mean if self.total else 1.0


@dataclass(frozen=True)
class Explanation:
    """All figures of one plan. `plan_s` are the processor's seconds to make and prove it.

    `traffic` is keyed by the names of `Traffic`; `received` counts copies into destination ranks,
    `sent` those out of source ranks.
    """

    plan: Plan
    plan_s: float
    num_parameters: int
    held_bytes: int
    architecture: str
    decisions: Decisions
    traffic: Mapping[str, Spread]
    minimum_bytes: int
    received: Spread
    sent: Spread
    prediction: Prediction

    @property
    def moved_bytes(self) -> int:
        """Bytes over the network."""
        return self.traffic["network_in"].total

    @property
    def ratio(self) -> float:
        """Bytes over the network / the least that any plan needs; 1 where nothing must cross it."""
        return self.moved_bytes / self.minimum_bytes if self.minimum_bytes else 1.0

    @property
    def quantized(self) -> dict[str, list[str]]:
        """Short names of the weights that are quantized before and after the wire."""
        found: dict[str, list[str]] = {"before": [], "after": []}
        for kind, parameters in self.plan.destination.table.kinds.items():
            for parameter in parameters:
                when, name = self.decisions.get((kind, parameter.kind)), short(parameter.name)
                if when is not None and name not in found[when]:
                    found[when].append(name)
        return found

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON. Raises nothing; keys are stable within one `format`."""
        plan, prediction = self.plan, self.prediction
        source, destination = plan.placement.source, plan.placement.destination
        return {
            "format": FORMAT,
            "policy": {
                "architecture": self.architecture,
                "num_parameters": self.num_parameters,
                "held_bytes": self.held_bytes,
            },
            "learner": {"layout": plan.source.kind, "num_ranks": len(plan.source.rank_ids)},
            "servers": {
                "layout": plan.destination.kind,
                "num_ranks": len(plan.destination.rank_ids),
            },
            "placement": {
                "learner_nodes": sorted({device.node for device in source.values()}),
                "server_nodes": sorted({device.node for device in destination.values()}),
                "shares_nodes": plan.placement.shares_nodes,
            },
            "quantized": self.quantized,
            "traffic": {name: _spread(spread, "bytes") for name, spread in self.traffic.items()},
            "network": {
                "moved_bytes": self.moved_bytes,
                "minimum_bytes": self.minimum_bytes,
                "ratio": self.ratio,
                "sender_balance": self.traffic["network_out"].balance,
                "ingress_balance": self.traffic["network_in"].balance,
            },
            "copies": {
                "received": _spread(self.received, "copies"),
                "sent": _spread(self.sent, "copies"),
            },
            "plan_s": self.plan_s,
            "plan_digest": plan.digest,
            "prediction": _prediction(prediction),
        }


def explain(
    plan: Plan, plan_s: float, architecture: str, decisions: Decisions, fabric: Fabric
) -> Explanation:
    """The figures of a plan."""
    source, destination = plan.source.rank_ids, plan.destination.rank_ids
    traffic = {}
    for name in WAYS:
        ranks = source if name in ("node_out", "network_out") else destination
        traffic[name] = _spread_of(getattr(plan.traffic, name), ranks)
    received, sent = _copies(plan)
    least = minimum_network_bytes(plan.source, plan.destination, plan.placement, plan.policy_bytes)
    parameters, size = _sizes(plan.source.table, plan.policy_bytes)
    return Explanation(
        plan,
        plan_s,
        parameters,
        size,
        architecture,
        decisions,
        traffic,
        sum(least.values()),
        _spread_of(received, destination),
        _spread_of(sent, source),
        predict(plan.traffic, plan.placement, fabric),
    )


def _sizes(table: BlockTable, policy_bytes: int) -> tuple[int, int]:
    """Parameters and bytes of the policy; the scales of float8 tensors are no parameters."""
    count = size = 0
    for kind, parameters in table.kinds.items():
        times = sum(block.kind == kind for block in table.blocks)
        for parameter in parameters:
            elements = parameter.num_elements * times
            count += 0 if parameter.kind.endswith(SCALE_SUFFIX) else elements
            size += elements * element_bytes(parameter, policy_bytes)
    return count, size


def _spread_of(by_rank: Mapping[int, int], ranks: Iterable[int]) -> Spread:
    values = {rank: by_rank.get(rank, 0) for rank in ranks}
    busiest = max(values, key=lambda rank: (values[rank], -rank))
    total = sum(values.values())
    return Spread(total, values[busiest], busiest, total / len(values))


def _copies(plan: Plan) -> tuple[dict[int, int], dict[int, int]]:
    """Copies into each destination rank and out of each source rank."""
    received: dict[int, int] = {}
    sent: dict[int, int] = {}
    for number, segment in enumerate(plan.segments):
        pairing = plan.pairings[segment.pairing]
        sources, destinations = pairing.source.groups[0], pairing.destination.groups[0]
        into = [group_ranks(group, segment.destination) for group in destinations]
        of = [group_ranks(group, segment.source) for group in sources]
        blocks = len(segment.blocks)
        cells = (pairing.start[1:] - pairing.start[:-1]).tolist()
        left, right = pairing.flow_source.tolist(), pairing.flow_destination.tolist()
        taken: dict[int, int] = {}
        given: dict[tuple[int, int], tuple[Route, int]] = {}  # flows share routes
        for flow, count in enumerate(cells):
            taken[right[flow]] = taken.get(right[flow], 0) + count
            route = plan.routes[number][flow]
            key = (left[flow], id(route))
            given[key] = (route, given.get(key, (route, 0))[1] + count)
        for group, count in taken.items():
            for rank in into[group]:
                received[rank] = received.get(rank, 0) + count * blocks
        for (group, _), (route, count) in given.items():
            for holder, times in _sends(route, blocks).items():
                rank = of[group][holder]
                sent[rank] = sent.get(rank, 0) + count * times
    return received, sent


def _sends(route: Route, blocks: int) -> dict[int, int]:
    """How often each source holder gives, over all blocks."""
    found: dict[int, int] = {}
    for holder in route.senders:
        found[holder] = found.get(holder, 0) + 1
    for delivery in route.deliveries:
        if delivery.near:
            for place in range(len(delivery.members)):
                for k in range(blocks):
                    holder = delivery.source(place, k)
                    found[holder] = found.get(holder, 0) + 1
    return found


def way_to_dict(way: Way) -> dict[str, Any]:
    """One tensor's way as plain values for JSON; a box is a list of [first, end)."""
    return {
        "name": way.parameter.name,
        "shape": list(way.parameter.shape),
        "precision": way.parameter.precision,
        "expert": way.expert,
        "held": [_part(part) for part in way.held],
        "wanted": [_part(part) for part in way.wanted],
        "copies": [
            {
                "box": [list(span) for span in copy.box],
                "link": copy.link,
                "src": copy.src,
                "src_local": copy.src_local,
                "src_at": list(copy.src_at),
                "ranks": list(copy.ranks),
                "dst_local": copy.dst_local,
                "dst_at": list(copy.dst_at),
            }
            for copy in way.copies
        ],
    }


def _part(part: HeldPart) -> dict[str, Any]:
    return {
        "box": [list(span) for span in part.box],
        "local": part.local,
        "at": list(part.at),
        "ranks": list(part.ranks),
    }


def _spread(spread: Spread, unit: str) -> dict[str, Any]:
    return {
        f"total_{unit}": spread.total,
        f"busiest_{unit}": spread.busiest,
        "busiest_rank": spread.busiest_rank,
        f"mean_{unit}": spread.mean,
    }


def _prediction(prediction: Prediction) -> dict[str, Any]:
    fabric, slowest = prediction.fabric, prediction.slowest
    return {
        "fabric": fabric.name,
        "nic_bytes_per_s": fabric.nic_bytes_per_s,
        "nvlink_bytes_per_s": fabric.nvlink_bytes_per_s,
        "memory_bytes_per_s": fabric.memory_bytes_per_s,
        "floor_s": prediction.floor_s,
        "serial_s": prediction.serial_s,
        "slowest": slowest.resource,
        "loads": {
            load.resource: {
                "total_bytes": load.total_bytes,
                "busiest_bytes": load.busiest_bytes,
                "busiest_node": load.busiest.node,
                "busiest_gpu": load.busiest.gpu,
                "seconds": load.seconds,
            }
            for load in prediction.loads
        },
    }
