"""The proof that routes bring each flow to each of its holders once, by the shortest way.

Part of `proof.py`: the cells' holders are proved there. Looks at routes, ranks and placement.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

import numpy as np

from megarl.errors import LayoutError
from megarl.reshard.routes import Route, Traffic, group_ranks

if TYPE_CHECKING:
    from megarl.reshard.plan import Plan


def prove_routes(plan: Plan) -> None:
    """Raise LayoutError naming ranks where a route is not exactly-once and shortest.

    The bytes that the plan counts for each rank are counted again from the routes.
    """
    counting = _Counted(plan)
    for segment, routes in zip(plan.segments, plan.routes, strict=True):
        pairing = plan.pairings[segment.pairing]
        if len(routes) != pairing.num_flows:
            raise LayoutError(f"plan: {len(routes)} routes for {pairing.num_flows} flows")
        senders = [group_ranks(group, segment.source) for group in pairing.source.groups[0]]
        receivers = [
            group_ranks(group, segment.destination) for group in pairing.destination.groups[0]
        ]
        pairs, _, of_flow = pairing.group_pairs
        total: dict[tuple[int, int], tuple[Route, int]] = {}  # many flows share their route
        for found, pair, size in zip(routes, of_flow, pairing.flow_bytes.tolist(), strict=True):
            key = (id(found), pair)
            total[key] = (found, total.get(key, (found, 0))[1] + size)
        delivered: dict[tuple[int, int], tuple[_Check, int]] = {}  # and many routes deliveries
        sent: dict[int, Counter[int]] = {}
        for (_, pair), (found, size) in total.items():
            a, b = pairs[pair]
            check = _Check(plan, found, senders[a], receivers[b], len(segment.blocks))
            once = (id(found.deliveries), b if found.num_network == len(found.deliveries) else pair)
            if once not in delivered:
                check.each_holder_once()
            check.senders_hold()
            check.near_is_near()
            if id(found) not in sent:
                sent[id(found)] = Counter(found.senders)
            for i, times in sent[id(found)].items():
                _add(counting.traffic.network_out, senders[a][i], size * times)
            delivered[once] = (check, delivered.get(once, (check, 0))[1] + size)
        for check, size in delivered.values():
            check.count(counting, size)
    counted = counting.done()
    for field in fields(Traffic):
        ours, theirs = getattr(plan.traffic, field.name), getattr(counted, field.name)
        if ours != theirs:
            ranks = [r for r in ours.keys() | theirs.keys() if ours.get(r, 0) != theirs.get(r, 0)]
            raise LayoutError(
                f"plan: {field.name} of ranks {sorted(ranks)[:8]} is counted otherwise than their "
                f"routes say: {ours.get(min(ranks), 0)} and {theirs.get(min(ranks), 0)} bytes"
            )


def _add(counts: dict[int, int], rank: int, size: int) -> None:
    if size:
        counts[rank] = counts.get(rank, 0) + size


@dataclass(frozen=True)
class _Check:
    """One route between the ranks that hold a flow and the ranks that want it."""

    plan: Plan
    route: Route
    senders: tuple[int, ...]
    receivers: tuple[int, ...]
    blocks: int

    def refuse(self, reason: str) -> LayoutError:
        """The error, which names the ranks."""
        return LayoutError(
            f"plan: from ranks {list(self.senders)[:8]} to ranks {list(self.receivers)[:8]}: "
            f"{reason}"
        )

    def senders_hold(self) -> None:
        """Each block is sent to each node of the network once, by a holder, and not needlessly."""
        route, source = self.route, self.plan.placement.source
        network = [delivery.node for delivery in route.deliveries if not delivery.near]
        if route.num_network != len(network):
            raise self.refuse(f"{len(network)} nodes are served by network, not as counted")
        given = set(route.senders)
        if len(route.senders) != self.blocks * len(network) or not given <= set(
            range(len(self.senders))
        ):
            raise self.refuse(
                f"senders {sorted(given)} of {len(route.senders)} sendings are not among the "
                f"holders, or not one for each of {self.blocks} blocks to {len(network)} nodes"
            )
        needless = {source[rank].node for rank in self.senders}.intersection(network)
        if needless:
            raise self.refuse(f"node {min(needless)} holds it already, but gets it by network")

    def each_holder_once(self) -> None:
        """Every holder is reached once, on its own node, and every block has its ingress."""
        deliveries, destination = self.route.deliveries, self.plan.placement.destination
        reached = sorted(m for delivery in deliveries for m in delivery.members)
        if reached != list(range(len(self.receivers))):
            raise self.refuse(
                f"holders {reached} are reached, not each of {len(self.receivers)} once"
            )
        if len({delivery.node for delivery in deliveries}) != len(deliveries):
            raise self.refuse("a node is served twice")
        for delivery in deliveries:
            for member in delivery.members:
                if destination[self.receivers[member]].node != delivery.node:
                    raise self.refuse(
                        f"rank {self.receivers[member]} is not on node {delivery.node}"
                    )
            if not delivery.near and (
                len(delivery.ingress) != self.blocks
                or not set(delivery.ingress) <= set(delivery.members)
            ):
                raise self.refuse(f"not every block has an ingress on node {delivery.node}")

    def near_is_near(self) -> None:
        """What is pulled or copied lies on the same node, and on the same GPU where it can."""
        if self.route.num_network == len(self.route.deliveries):
            return
        source, destination = self.plan.placement.source, self.plan.placement.destination
        for delivery in self.route.deliveries:
            if not delivery.near:
                continue
            if len(delivery.near) != self.blocks or len(delivery.local) != len(delivery.members):
                raise self.refuse(
                    f"not every block and holder has a source on node {delivery.node}"
                )
            for i in set(delivery.near):
                if not 0 <= i < len(self.senders) or source[self.senders[i]].node != delivery.node:
                    raise self.refuse(f"a holder said to be on node {delivery.node} is not")
            devices = {source[rank] for rank in self.senders}
            for member, own in zip(delivery.members, delivery.local, strict=True):
                rank = self.receivers[member]
                if not -1 <= own < len(self.senders):
                    raise self.refuse(f"rank {rank} copies from a holder that does not exist")
                if own >= 0 and source[self.senders[own]] != destination[rank]:
                    raise self.refuse(f"rank {self.senders[own]} is not on the GPU of rank {rank}")
                if own < 0 and destination[rank] in devices:
                    raise self.refuse(f"rank {rank} pulls what is on its own GPU")

    def count(self, counted: _Counted, size: int) -> None:
        """Add up what `size` bytes of each block are for every rank but the network's senders."""
        traffic = counted.traffic
        ranks: list[int] = []
        taken: list[int] = []  # blocks of which the rank is the ingress
        others: list[int] = []  # ranks that copy from it then
        for delivery in self.route.deliveries:
            members = [self.receivers[member] for member in delivery.members]
            if not delivery.near:
                turns = Counter(delivery.ingress)
                ranks += members
                taken += [turns[member] for member in delivery.members]
                others += [len(members) - 1] * len(members)
                continue
            pulls = delivery.local.count(-1)
            for rank, own in zip(members, delivery.local, strict=True):
                into = traffic.node_in if own < 0 else traffic.local
                _add(into, rank, size * self.blocks)
            for i, times in Counter(delivery.near).items():
                _add(traffic.node_out, self.senders[i], size * times * pulls)
        if ranks:
            place, turn, rest = (np.array(column, np.int64) for column in (ranks, taken, others))
            np.add.at(counted.network_in, place, size * turn)
            np.add.at(counted.fan_in, place, size * (self.blocks - turn))
            np.add.at(counted.fan_out, place, size * turn * rest)


class _Counted:
    """Bytes counted again: of destination ranks by network in arrays by rank, else by name."""

    def __init__(self, plan: Plan) -> None:
        self.traffic = Traffic()
        size = 1 + max(plan.destination.rank_ids, default=0)
        self.network_in, self.fan_in, self.fan_out = np.zeros((3, size), np.int64)

    def done(self) -> Traffic:
        """All of it."""
        for counts, array in (
            (self.traffic.network_in, self.network_in),
            (self.traffic.fanout_in, self.fan_in),
            (self.traffic.fanout_out, self.fan_out),
        ):
            counts.update({rank: n for rank, n in enumerate(array.tolist()) if n})
        return self.traffic
