"""The proof that routes bring each flow to each of its holders once, by the shortest way.

Part of `proof.py`: the cells' holders are proved there. Looks at routes, ranks and placement.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from megarl.errors import LayoutError
from megarl.reshard.routes import Route, group_ranks

if TYPE_CHECKING:
    from megarl.reshard.plan import Plan


def prove_routes(plan: Plan) -> None:
    """Raise LayoutError naming flow and ranks where a route is not exactly-once, and shortest."""
    network = 0
    for segment, routes in zip(plan.segments, plan.routes, strict=True):
        pairing = plan.pairings[segment.pairing]
        if len(routes) != pairing.num_flows:
            raise LayoutError(f"plan: {pairing.num_flows - len(routes)} flows have no route")
        senders = [group_ranks(group, segment.source) for group in pairing.source.groups[0]]
        receivers = [
            group_ranks(group, segment.destination) for group in pairing.destination.groups[0]
        ]
        pairs, _, of_flow = pairing.group_pairs
        proved: set[tuple[int, int]] = set()
        delivered: set[tuple[int, int]] = set()  # many routes share their deliveries
        crossing = 0
        for found, pair, size in zip(routes, of_flow, pairing.flow_bytes.tolist(), strict=True):
            crossing += size * found.num_network
            if (id(found), pair) in proved:
                continue
            proved.add((id(found), pair))
            a, b = pairs[pair]
            check = _Check(plan, found, senders[a], receivers[b], len(segment.blocks))
            if (id(found.deliveries), b) not in delivered:
                delivered.add((id(found.deliveries), b))
                check.each_holder_once()
            check.senders_hold()
            check.near_is_near()
        network += crossing * len(segment.blocks)
    counted = plan.traffic
    totals = (sum(counted.network_out.values()), sum(counted.network_in.values()))
    if totals != (network, network):
        raise LayoutError(
            f"plan: {network} bytes cross nodes, but {totals[0]} are counted out and {totals[1]} in"
        )


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
                if own >= 0 and source[self.senders[own]] != destination[rank]:
                    raise self.refuse(f"rank {self.senders[own]} is not on the GPU of rank {rank}")
                if own < 0 and destination[rank] in devices:
                    raise self.refuse(f"rank {rank} pulls what is on its own GPU")
