"""The proof that routes bring each flow to each of its holders once, by the shortest way.

Part of `proof.py`: the cells' holders are proved there. Looks at routes, ranks and placement.
"""

from __future__ import annotations

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
        sources, destinations = pairing.source.groups[0], pairing.destination.groups[0]
        proved: set[tuple[int, int, int]] = set()
        crossing = 0
        for found, a, b, size in zip(
            routes,
            pairing.flow_source.tolist(),
            pairing.flow_destination.tolist(),
            pairing.flow_bytes.tolist(),
            strict=True,
        ):
            crossing += size * found.num_network
            if (id(found), a, b) not in proved:
                proved.add((id(found), a, b))
                _check_route(
                    plan,
                    found,
                    group_ranks(sources[a], segment.source),
                    group_ranks(destinations[b], segment.destination),
                    len(segment.blocks),
                )
        network += crossing * len(segment.blocks)
    counted = plan.traffic
    totals = (sum(counted.network_out.values()), sum(counted.network_in.values()))
    if totals != (network, network):
        raise LayoutError(
            f"plan: {network} bytes cross nodes, but {totals[0]} are counted out and {totals[1]} in"
        )


def _check_route(
    plan: Plan, route: Route, senders: tuple[int, ...], receivers: tuple[int, ...], blocks: int
) -> None:
    """One route between the ranks that hold a flow and the ranks that want it."""
    source, destination = plan.placement.source, plan.placement.destination

    def refuse(reason: str) -> LayoutError:
        return LayoutError(
            f"plan: from ranks {list(senders)[:8]} to ranks {list(receivers)[:8]}: {reason}"
        )

    reached = sorted(m for delivery in route.deliveries for m in delivery.members)
    if reached != list(range(len(receivers))):
        raise refuse(f"holders {reached} are reached, not each of {len(receivers)} once")
    if len({delivery.node for delivery in route.deliveries}) != len(route.deliveries):
        raise refuse("a node is served twice")
    network = [delivery for delivery in route.deliveries if not delivery.near]
    if route.num_network != len(network):
        raise refuse(f"{len(network)} nodes are served by network, not {route.num_network}")
    indices = range(len(senders))
    if len(route.senders) != blocks * len(network) or not set(route.senders) <= set(indices):
        raise refuse(
            f"senders {sorted(set(route.senders))} of {len(route.senders)} sendings are not among "
            f"the holders, or not one for each of {blocks} blocks to {len(network)} nodes"
        )
    nodes = {source[rank].node for rank in senders}
    for delivery in route.deliveries:
        for member in delivery.members:
            if destination[receivers[member]].node != delivery.node:
                raise refuse(f"rank {receivers[member]} is not on node {delivery.node}")
        if not delivery.near:
            if delivery.node in nodes:
                raise refuse(f"node {delivery.node} holds it already, but gets it by network")
            if len(delivery.ingress) != blocks or not set(delivery.ingress) <= set(
                delivery.members
            ):
                raise refuse(f"not every block has an ingress on node {delivery.node}")
            continue
        if len(delivery.near) != blocks or len(delivery.local) != len(delivery.members):
            raise refuse(f"not every block and holder has a source on node {delivery.node}")
        if not all(
            i in indices and source[senders[i]].node == delivery.node for i in delivery.near
        ):
            raise refuse(f"a holder said to be on node {delivery.node} is not")
        for member, own in zip(delivery.members, delivery.local, strict=True):
            device = destination[receivers[member]]
            if own >= 0 and source[senders[own]] != device:
                raise refuse(f"rank {senders[own]} is not on the GPU of rank {receivers[member]}")
            if own < 0 and any(source[rank] == device for rank in senders):
                raise refuse(f"rank {receivers[member]} pulls what is on its own GPU")
