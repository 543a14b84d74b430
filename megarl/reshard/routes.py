"""Who sends each flow to whom: senders in turn, one ingress per node, and the bytes that follow.

Owns the choice among replicas. Flows without a choice are counted first; then those with the
fewest replicas and the most bytes (longest processing time first): each shares its blocks and nodes
out so that the replicas' totals level out. A source rank on the destination's GPU is copied from,
one on its node is pulled from, and only what no rank of a node holds crosses the network: once into
each node, there fanned out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np

from megarl.reshard.cells import Holder, Pairing
from megarl.reshard.layout import Ints
from megarl.reshard.placement import Device, Placement

Stages = tuple[tuple[int, ...], ...]
"""For each site of a block, the ranks of its stage by position."""


@dataclass(frozen=True, slots=True)
class Delivery:
    """How one node gets a flow: `members` index the destination's holders that are on it.

    Without `near` it comes by network: of the k-th block, holder ingress[k] gets it and the other
    members copy from that one. Else member i copies from the source holder `local[i]` on its own
    GPU, or where that is -1 pulls from near[k] on its node.
    """

    node: int
    members: tuple[int, ...]
    ingress: tuple[int, ...] = ()
    near: tuple[int, ...] = ()
    local: tuple[int, ...] = ()

    def source(self, place: int, k: int) -> int:
        """Which source holder the member at `place` reads of block k; not for network."""
        return self.local[place] if self.local[place] >= 0 else self.near[k]


@dataclass(frozen=True, slots=True)
class Route:
    """One flow of one segment.

    There are `num_network` deliveries by network. Block k goes to the j-th of them from source
    holder senders[k * num_network + j].
    """

    senders: tuple[int, ...]
    deliveries: tuple[Delivery, ...]
    num_network: int

    def sender(self, k: int, j: int) -> int:
        """The source holder that sends block k to the j-th network delivery."""
        return self.senders[k * self.num_network + j]


@dataclass(frozen=True, slots=True)
class Placed:
    """One block where it stands: its number in the destination's table, and its sites' numbers."""

    block: int
    source: tuple[int, ...]
    destination: tuple[int, ...]


@dataclass(frozen=True)
class Segment:
    """Blocks of one pairing whose sites are in the same stages: they are routed alike."""

    pairing: int
    source: Stages
    destination: Stages
    blocks: tuple[Placed, ...]


@dataclass
class Traffic:
    """Bytes of one plan by rank: source ranks in the *_out, destination ranks in the others.

    network_out and network_in cross nodes; node_out and node_in are pulled from a source rank on
    the same node; local is copied on one GPU; fanout_out and fanout_in pass between destination
    ranks of one node.
    """

    network_out: dict[int, int] = field(default_factory=dict)
    network_in: dict[int, int] = field(default_factory=dict)
    node_out: dict[int, int] = field(default_factory=dict)
    node_in: dict[int, int] = field(default_factory=dict)
    local: dict[int, int] = field(default_factory=dict)
    fanout_out: dict[int, int] = field(default_factory=dict)
    fanout_in: dict[int, int] = field(default_factory=dict)


def route(
    pairings: Sequence[Pairing], segments: Sequence[Segment], placement: Placement
) -> tuple[tuple[tuple[Route, ...], ...], Traffic]:
    """For each segment the route of each of its pairing's flows, and the bytes of all of them."""
    return _Router(pairings, segments, placement).routes()


def group_ranks(group: tuple[Holder, ...], stages: Stages) -> tuple[int, ...]:
    """The ranks of a group's holders."""
    return tuple(stages[site][position] for site, position, _ in group)


@dataclass(frozen=True)
class _Pattern:
    """The nodes that need a flow. `network` are the deliveries by network, by number of members:
    (which deliveries, for each the places of its members' ranks in the counts of bytes)."""

    deliveries: tuple[Delivery, ...]
    network: tuple[tuple[tuple[int, ...], Ints], ...]
    num_network: int
    has_choice: bool  # whether a node has several members, or a holder of its own


class _Router:
    """Routes being made, with the bytes that each rank sends and receives so far."""

    def __init__(
        self, pairings: Sequence[Pairing], segments: Sequence[Segment], placement: Placement
    ) -> None:
        self.pairings, self.segments, self.placement = pairings, segments, placement
        self.shares_nodes = placement.shares_nodes
        self.traffic = Traffic()
        self.place = {rank: i for i, rank in enumerate(sorted(placement.destination))}
        # Bytes by place: received by network, taken and given in the fan-out behind it.
        self.received, self.fan_in, self.fan_out = np.zeros((3, len(self.place)), np.int64)
        self.readers: dict[tuple[int, int, int, int], tuple[int, ...]] = {}
        self.made: dict[tuple[int, tuple[tuple[int, ...], ...]], tuple[Delivery, ...]] = {}
        self.senders: dict[tuple[int, int], tuple[int, ...]] = {}
        self.receivers: dict[tuple[int, int], tuple[int, ...]] = {}
        self.patterns: list[dict[tuple[int, int], _Pattern]] = [{} for _ in segments]
        self.found: list[list[Route | None]] = []

    def routes(self) -> tuple[tuple[tuple[Route, ...], ...], Traffic]:
        """The routes, those without a choice first."""
        choices: list[tuple[int, int, int, int]] = []
        for number in range(len(self.segments)):
            choices += self._without_choice(number)
        for _, _, number, flow in sorted(choices):
            self._choose(number, flow)
        done = tuple(tuple(r for r in routes if r is not None) for routes in self.found)
        for counts, array in (
            (self.traffic.network_in, self.received),
            (self.traffic.fanout_in, self.fan_in),
            (self.traffic.fanout_out, self.fan_out),
        ):
            counts.update({r: n for r, n in zip(self.place, array.tolist(), strict=True) if n})
        return done, self.traffic

    def _without_choice(self, number: int) -> list[tuple[int, int, int, int]]:
        """Route what has one sender and one member on each node; list the rest to be sorted."""
        segment = self.segments[number]
        pairing = self.pairings[segment.pairing]
        sources = pairing.source.groups[0]
        pairs, sizes, of_flow = pairing.group_pairs
        blocks = len(segment.blocks)
        fixed: dict[int, Route] = {}
        total: dict[int, tuple[_Pattern, int]] = {}
        by_pair: list[Route | None] = []
        for (a, b), size in zip(pairs, sizes, strict=True):
            pattern = self._pattern(number, a, b)
            if len(sources[a]) > 1 or pattern.has_choice:
                by_pair.append(None)
                continue
            if id(pattern) not in fixed:
                deliveries = self._deliveries(pattern, self._turns(pattern, 0, blocks))
                senders = (0,) * (blocks * len(deliveries))
                fixed[id(pattern)] = Route(senders, deliveries, len(deliveries))
            by_pair.append(fixed[id(pattern)])
            (sender,) = self._senders(number, a)
            _add(self.traffic.network_out, sender, size * blocks * pattern.num_network)
            total[id(pattern)] = (pattern, total.get(id(pattern), (pattern, 0))[1] + size)
        for pattern, size in total.values():
            self._count(pattern, self._turns(pattern, size, blocks), size, blocks)
        self.found.append([by_pair[pair] for pair in of_flow])
        rest = [flow for flow, pair in enumerate(of_flow) if by_pair[pair] is None]
        flow_bytes = pairing.flow_bytes
        return [
            (len(sources[pairs[of_flow[flow]][0]]), -int(flow_bytes[flow]), number, flow)
            for flow in rest
        ]

    def _senders(self, number: int, a: int) -> tuple[int, ...]:
        """The ranks of a segment's source group."""
        if (number, a) not in self.senders:
            segment = self.segments[number]
            group = self.pairings[segment.pairing].source.groups[0][a]
            self.senders[number, a] = group_ranks(group, segment.source)
        return self.senders[number, a]

    def _receivers(self, number: int, b: int) -> tuple[int, ...]:
        """The ranks of a segment's destination group."""
        if (number, b) not in self.receivers:
            segment = self.segments[number]
            group = self.pairings[segment.pairing].destination.groups[0][b]
            self.receivers[number, b] = group_ranks(group, segment.destination)
        return self.receivers[number, b]

    def _pattern(self, number: int, a: int, b: int) -> _Pattern:
        """The nodes that need a flow from group a to group b, and who of group a is on each."""
        key = (a if self.shares_nodes else -1, b)
        if key not in self.patterns[number]:
            self.patterns[number][key] = self._nodes(
                self._senders(number, a), self._receivers(number, b)
            )
        return self.patterns[number][key]

    def _nodes(self, senders: Sequence[int], receivers: Sequence[int]) -> _Pattern:
        devices = [self.placement.source[rank] for rank in senders] if self.shares_nodes else []
        by_node: dict[int, list[tuple[int, Device]]] = {}
        for member, rank in enumerate(receivers):
            device = self.placement.destination[rank]
            by_node.setdefault(device.node, []).append((member, device))
        deliveries: list[Delivery] = []
        network: dict[int, list[int]] = {}
        for node, members in sorted(by_node.items()):
            near = tuple(i for i, d in enumerate(devices) if d.node == node)
            own = {devices[i]: i for i in reversed(near)}
            local = tuple(own.get(device, -1) for _, device in members) if near else ()
            if not near:
                network.setdefault(len(members), []).append(len(deliveries))
            deliveries.append(Delivery(node, tuple(m for m, _ in members), (), near, local))
        groups = []
        for which in network.values():
            ranks = [[self.place[receivers[m]] for m in deliveries[i].members] for i in which]
            groups.append((tuple(which), np.array(ranks, np.int64)))
        num_network = sum(map(len, network.values()))
        has_choice = num_network < len(deliveries) or any(width > 1 for width in network)
        return _Pattern(tuple(deliveries), tuple(groups), num_network, has_choice)

    def _choose(self, number: int, flow: int) -> None:
        """Route one flow that has a choice, and count its bytes."""
        segment = self.segments[number]
        pairing = self.pairings[segment.pairing]
        a, b = int(pairing.flow_source[flow]), int(pairing.flow_destination[flow])
        senders, receivers = self._senders(number, a), self._receivers(number, b)
        size, blocks = int(pairing.flow_bytes[flow]), len(segment.blocks)
        pattern = self._pattern(number, a, b)
        turns = self._turns(pattern, size, blocks)
        self._count(pattern, turns, size, blocks)
        deliveries = self._deliveries(pattern, turns)
        if pattern.num_network < len(deliveries):
            first = pairing.source.first_row[pairing.source_box[pairing.start[flow]]]
            tensor = (number, int(pairing.source.tensor[first]), a)
            deliveries = tuple(
                self._direct(d, tensor, senders, receivers, size, blocks) if d.near else d
                for d in deliveries
            )
        out = self.traffic.network_out
        loads = [out.get(rank, 0) for rank in senders]
        least = min(loads)
        counts = shares(tuple(load - least for load in loads), blocks * pattern.num_network, size)
        for rank, sends in zip(senders, counts, strict=True):
            _add(out, rank, size * sends)
        self.found[number][flow] = Route(interleaved(counts), deliveries, pattern.num_network)

    def _turns(self, pattern: _Pattern, size: int, blocks: int) -> tuple[tuple[int, ...], ...]:
        """For each delivery, of how many blocks each member is the ingress; () for near ones.

        What members have received by network levels out.
        """
        turns: list[tuple[int, ...]] = [()] * len(pattern.deliveries)
        for which, places in pattern.network:
            if places.shape[1] == 1:
                found: list[tuple[int, ...]] = [(blocks,)] * len(which)
            else:
                loads = self.received[places]
                loads -= loads.min(axis=1, keepdims=True)
                found = [shares(tuple(row), blocks, size) for row in loads.tolist()]
            for i, counts in zip(which, found, strict=True):
                turns[i] = counts
        return tuple(turns)

    def _count(
        self, pattern: _Pattern, turns: tuple[tuple[int, ...], ...], size: int, blocks: int
    ) -> None:
        """Add up what the members receive by network, and pass on."""
        for which, places in pattern.network:
            taken = np.array([turns[i] for i in which], np.int64)
            np.add.at(self.received, places, size * taken)
            if places.shape[1] > 1:
                np.add.at(self.fan_in, places, size * (blocks - taken))
                np.add.at(self.fan_out, places, size * (places.shape[1] - 1) * taken)

    def _deliveries(
        self, pattern: _Pattern, turns: tuple[tuple[int, ...], ...]
    ) -> tuple[Delivery, ...]:
        """The pattern's deliveries with these turns; flows with the same turns share them."""
        key = (id(pattern), turns)
        if key not in self.made:
            self.made[key] = tuple(
                d
                if d.near
                else Delivery(d.node, d.members, tuple(d.members[i] for i in interleaved(counts)))
                for d, counts in zip(pattern.deliveries, turns, strict=True)
            )
        return self.made[key]

    def _direct(
        self,
        delivery: Delivery,
        tensor: tuple[int, int, int],
        senders: Sequence[int],
        receivers: Sequence[int],
        size: int,
        blocks: int,
    ) -> Delivery:
        """Which holder on the node is read from for each block, so that what they give levels out.

        All flows out of one source tensor are read from the same, so that of its replicas on a
        node one alone has to have it ready.
        """
        traffic = self.traffic
        given = traffic.node_out
        key = (*tensor, delivery.node)
        pulls = sum(1 for i in delivery.local if i < 0)
        if key not in self.readers:
            loads = tuple(given.get(senders[i], 0) for i in delivery.near)
            counts = shares(loads, blocks, max(size * pulls, 1))
            self.readers[key] = tuple(delivery.near[i] for i in interleaved(counts))
        near = self.readers[key]
        for member, own in zip(delivery.members, delivery.local, strict=True):
            into = traffic.node_in if own < 0 else traffic.local
            _add(into, receivers[member], size * blocks)
        for i in set(near):
            _add(given, senders[i], size * pulls * near.count(i))
        return Delivery(delivery.node, delivery.members, (), near, delivery.local)


@lru_cache(maxsize=4096)
def shares(loads: tuple[int, ...], units: int, size: int) -> tuple[int, ...]:
    """How many of `units` things of `size` each place takes, so that its load levels out.

    In whole numbers, so that every machine finds the same. `loads` may be relative ones.

    >>> shares((0, 0, 0), 7, 10), shares((30, 0, 0), 7, 10)
    ((3, 2, 2), (1, 3, 3))
    """
    places = len(loads)
    if size == 0 or loads.count(loads[0]) == places:  # nothing to level
        return tuple(units // places + (1 if i < units % places else 0) for i in range(places))
    order = sorted(range(places), key=lambda i: (loads[i], i))
    filled, count = 0, 0  # the lowest places, up to a level that none of the others is below
    for count, i in enumerate(order, 1):
        filled += loads[i]
        if count == places or filled + units * size <= loads[order[count]] * count:
            break
    level = filled + units * size  # times count
    parts = {i: divmod(level - loads[i] * count, size * count) for i in order[:count]}
    counts = [parts[i][0] if i in parts else 0 for i in range(places)]
    left = units - sum(counts)
    for i in sorted(parts, key=lambda i: (-parts[i][1], i))[:left]:
        counts[i] += 1
    return tuple(counts)


@lru_cache(maxsize=4096)
def interleaved(counts: tuple[int, ...]) -> tuple[int, ...]:
    """A sequence with counts[i] times each i, evenly spread.

    >>> interleaved((2, 4))
    (1, 0, 1, 1, 0, 1)
    """
    places = [((n + 0.5) / count, i) for i, count in enumerate(counts) for n in range(count)]
    return tuple(i for _, i in sorted(places))


def _add(counts: dict[int, int], rank: int, size: int) -> None:
    if size:
        counts[rank] = counts.get(rank, 0) + size
