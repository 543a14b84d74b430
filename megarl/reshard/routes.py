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

from megarl.reshard.cells import Holder, Pairing
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


@dataclass(frozen=True)
class Segment:
    """Blocks of one pairing whose sites are in the same stages: they are routed alike.

    `blocks` are (block number in the destination's table, its source sites, its destination
    sites), in order; sites are numbers in their layouts.
    """

    pairing: int
    source: Stages
    destination: Stages
    blocks: tuple[tuple[int, tuple[int, ...], tuple[int, ...]], ...]


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


class _Router:
    """Routes being made, with the bytes that each rank sends and receives so far."""

    def __init__(
        self, pairings: Sequence[Pairing], segments: Sequence[Segment], placement: Placement
    ) -> None:
        self.pairings, self.segments, self.placement = pairings, segments, placement
        self.shares_nodes = placement.shares_nodes
        self.traffic = Traffic()
        self.readers: dict[tuple[int, int, int, int], tuple[int, ...]] = {}
        self.single: dict[int, Route] = {}
        self.ranks: dict[tuple[int, int], tuple[int, ...]] = {}
        self.patterns: list[dict[tuple[int, int], tuple[Delivery, ...]]] = [{} for _ in segments]
        self.found: list[list[Route | None]] = [
            [None] * pairings[segment.pairing].num_flows for segment in segments
        ]

    def routes(self) -> tuple[tuple[tuple[Route, ...], ...], Traffic]:
        """The routes, those without a choice first."""
        choices: list[tuple[int, int, int, int]] = []
        for number in range(len(self.segments)):
            choices += self._without_choice(number)
        for _, _, number, flow in sorted(choices):
            self._choose(number, flow)
        done = tuple(tuple(r for r in routes if r is not None) for routes in self.found)
        return done, self.traffic

    def _without_choice(self, number: int) -> list[tuple[int, int, int, int]]:
        """Route what has one sender and one member on each node; list the rest to be sorted."""
        segment = self.segments[number]
        pairing = self.pairings[segment.pairing]
        sources = pairing.source.groups[0]
        left = pairing.flow_source.tolist()
        right = pairing.flow_destination.tolist()
        sizes = pairing.flow_bytes.tolist()
        fixed: dict[tuple[int, int], Route] = {}
        out: dict[tuple[int, int], int] = {}
        into: dict[int, int] = {}
        rest = []
        for flow, (a, b, size) in enumerate(zip(left, right, sizes, strict=True)):
            deliveries = self._pattern(number, a, b)
            single = not any(len(d.members) > 1 or d.near for d in deliveries)
            if single:
                into[b] = into.get(b, 0) + size
            if not single or len(sources[a]) > 1:
                rest.append((len(sources[a]), -size, number, flow))
                continue
            if (a, b) not in fixed:
                fixed[a, b] = self._only_way(deliveries, len(segment.blocks))
            self.found[number][flow] = fixed[a, b]
            out[a, b] = out.get((a, b), 0) + size
        blocks = len(segment.blocks)
        for (a, b), size in out.items():
            (sender,) = self._senders(number, a)
            _add(self.traffic.network_out, sender, size * blocks * len(self._receivers(number, b)))
        for b, size in into.items():
            for rank in self._receivers(number, b):
                _add(self.traffic.network_in, rank, size * blocks)
        return rest

    def _only_way(self, deliveries: tuple[Delivery, ...], blocks: int) -> Route:
        """The route from one holder to one member on each node."""
        if id(deliveries) not in self.single:
            single = tuple(Delivery(d.node, d.members, d.members * blocks) for d in deliveries)
            self.single[id(deliveries)] = Route((0,) * (blocks * len(single)), single, len(single))
        return self.single[id(deliveries)]

    def _senders(self, number: int, a: int) -> tuple[int, ...]:
        """The ranks of a segment's source group."""
        if (number, a) not in self.ranks:
            segment = self.segments[number]
            group = self.pairings[segment.pairing].source.groups[0][a]
            self.ranks[number, a] = group_ranks(group, segment.source)
        return self.ranks[number, a]

    def _receivers(self, number: int, b: int) -> tuple[int, ...]:
        """The ranks of a segment's destination group."""
        if (number, -1 - b) not in self.ranks:
            segment = self.segments[number]
            group = self.pairings[segment.pairing].destination.groups[0][b]
            self.ranks[number, -1 - b] = group_ranks(group, segment.destination)
        return self.ranks[number, -1 - b]

    def _pattern(self, number: int, a: int, b: int) -> tuple[Delivery, ...]:
        """The nodes that need a flow from group a to group b, and who of group a is on each."""
        key = (a if self.shares_nodes else -1, b)
        if key not in self.patterns[number]:
            self.patterns[number][key] = self._nodes(
                self._senders(number, a), self._receivers(number, b)
            )
        return self.patterns[number][key]

    def _nodes(self, senders: Sequence[int], receivers: Sequence[int]) -> tuple[Delivery, ...]:
        devices = [self.placement.source[rank] for rank in senders] if self.shares_nodes else []
        by_node: dict[int, list[tuple[int, Device]]] = {}
        for member, rank in enumerate(receivers):
            device = self.placement.destination[rank]
            by_node.setdefault(device.node, []).append((member, device))
        deliveries = []
        for node, members in sorted(by_node.items()):
            near = tuple(i for i, d in enumerate(devices) if d.node == node)
            own = {devices[i]: i for i in reversed(near)}
            local = tuple(own.get(device, -1) for _, device in members) if near else ()
            deliveries.append(Delivery(node, tuple(m for m, _ in members), (), near, local))
        return tuple(deliveries)

    def _choose(self, number: int, flow: int) -> None:
        """Route one flow that has a choice, and count its bytes."""
        segment = self.segments[number]
        pairing = self.pairings[segment.pairing]
        a, b = int(pairing.flow_source[flow]), int(pairing.flow_destination[flow])
        senders, receivers = self._senders(number, a), self._receivers(number, b)
        size, blocks = int(pairing.flow_bytes[flow]), len(segment.blocks)
        deliveries = self._pattern(number, a, b)
        if any(len(d.members) > 1 or d.near for d in deliveries):
            first = pairing.source.first_row[pairing.source_box[pairing.start[flow]]]
            tensor = (number, int(pairing.source.tensor[first]), a)
            deliveries = tuple(
                self._direct(d, tensor, senders, receivers, size, blocks)
                if d.near
                else self._ingress(d, receivers, size, blocks)
                for d in deliveries
            )
        else:
            deliveries = self._only_way(deliveries, blocks).deliveries
        network = sum(1 for d in deliveries if not d.near)
        out = self.traffic.network_out
        counts = shares([out.get(rank, 0) for rank in senders], blocks * network, size)
        for rank, sends in zip(senders, counts, strict=True):
            _add(out, rank, size * sends)
        self.found[number][flow] = Route(interleaved(counts), deliveries, network)

    def _ingress(
        self, delivery: Delivery, receivers: Sequence[int], size: int, blocks: int
    ) -> Delivery:
        """Which member is the ingress of each block, so that what they receive levels out."""
        traffic, members = self.traffic, delivery.members
        if len(members) == 1:
            _add(traffic.network_in, receivers[members[0]], size * blocks)
            return Delivery(delivery.node, members, members * blocks)
        ranks = [receivers[m] for m in members]
        counts = shares([traffic.network_in.get(rank, 0) for rank in ranks], blocks, size)
        for rank, turns in zip(ranks, counts, strict=True):
            _add(traffic.network_in, rank, size * turns)
            _add(traffic.fanout_in, rank, size * (blocks - turns))
            _add(traffic.fanout_out, rank, size * turns * (len(members) - 1))
        return Delivery(delivery.node, members, tuple(members[i] for i in interleaved(counts)))

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
            counts = shares(
                [given.get(senders[i], 0) for i in delivery.near], blocks, max(size * pulls, 1)
            )
            self.readers[key] = tuple(delivery.near[i] for i in interleaved(counts))
        near = self.readers[key]
        for member, own in zip(delivery.members, delivery.local, strict=True):
            into = traffic.node_in if own < 0 else traffic.local
            _add(into, receivers[member], size * blocks)
        for i in set(near):
            _add(given, senders[i], size * pulls * near.count(i))
        return Delivery(delivery.node, delivery.members, (), near, delivery.local)


def shares(loads: Sequence[int], units: int, size: int) -> tuple[int, ...]:
    """How many of `units` things of `size` each place takes, so that its load levels out.

    >>> shares([0, 0, 0], 7, 10), shares([30, 0, 0], 7, 10)
    ((3, 2, 2), (1, 3, 3))
    """
    places = len(loads)
    if loads.count(loads[0]) == places:
        return tuple(units // places + (1 if i < units % places else 0) for i in range(places))
    order = sorted(range(places), key=lambda i: (loads[i], i))
    below, level = 0, 0.0
    for count, i in enumerate(order, 1):  # the places that take any: the lowest ones
        below += loads[i]
        level = (below + units * size) / count
        if count == places or level <= loads[order[count]]:
            break
    wanted = [max(0.0, (level - load) / size) for load in loads]
    counts = [int(want) for want in wanted]
    left = units - sum(counts)
    for i in sorted(range(places), key=lambda i: (counts[i] - wanted[i], i))[:left]:
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
