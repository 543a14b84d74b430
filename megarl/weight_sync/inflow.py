"""The ways by which weights come into a server rank: arenas of its own node, messages from others.

Owns what each way keeps between syncs. Which boxes come by which way is the route's. Which of them
a sync uses follows from the route alone: where it has nothing for a way, that way does nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch

from megarl.errors import WeightSyncError
from megarl.reshard import execute
from megarl.reshard.layout import num_elements
from megarl.weight_sync import packing, parcels
from megarl.weight_sync.control import ControlMessage
from megarl.weight_sync.formats import staged
from megarl.weight_sync.parcels import Parcel
from megarl.weight_sync.route import Route
from megarl.weight_sync.transport.p2p import Peers
from megarl.weight_sync.transport.shared import ArenaReader, ArenaRef


class ArenaInflow:
    """Copies out of the shared memory of learner ranks on this node, which stays mapped."""

    def __init__(self) -> None:
        self._readers: dict[int, ArenaReader] = {}
        self._route: Route | None = None

    def open(
        self, message: ControlMessage, route: Route, device: torch.device, until: float
    ) -> None:
        """The arenas that the route reads: opened once, dropped when the message names others."""
        self._route = route
        missing = [rank for rank in route.sources if rank not in message.arenas]
        if missing:
            raise WeightSyncError(f"the message names no arena of learner ranks {missing}")
        kept: dict[int, ArenaReader] = {}
        for rank, source in route.sources.items():
            ref: ArenaRef = message.arenas[rank]
            reader = self._readers.get(rank)
            if reader is None or reader.ref != ref:
                reader = ArenaReader(ref, source.digest)
            kept[rank] = reader
        self._readers = kept
        self.check(message)

    def fill(self, parameters: Mapping[str, torch.Tensor], until: float) -> None:
        """Copy every box."""
        assert self._route is not None, "open comes first"
        for rank, source in self._route.sources.items():
            data, wire = self._readers[rank].data, self._route.wire
            views = {name: staged(data, slot, wire) for name, slot in source.slots.items()}
            execute.run(source.moves, views, parameters)

    def check(self, message: ControlMessage) -> None:
        """See that the arenas hold this publish, before and after they are read."""
        for rank, reader in self._readers.items():
            reader.check()
            if reader.stamp != message.stamp:
                raise WeightSyncError(
                    f"the arena of learner rank {rank} is stamped {reader.stamp!r}, expected "
                    f"{message.stamp!r}: its bytes are of another publish; refused"
                )

    def refuse(self, message: ControlMessage, why: str) -> None:
        """Nobody waits for a reader."""

    @property
    def moved_bytes(self) -> Mapping[str, int]:
        """Bytes by link."""
        if self._route is None:
            return {}
        moved: dict[str, int] = {}
        for source in self._route.sources.values():
            for move in source.moves:
                size = num_elements(move.box) * self._route.wire.of(move.tensor).itemsize
                moved[move.link] = moved.get(move.link, 0) + size
        return moved


class MessageInflow:
    """Messages from learner ranks of other nodes, and between the server's ranks of this one."""

    def __init__(self) -> None:
        self._peers: tuple[tuple[str, torch.device], Peers] | None = None
        self._device = torch.device("cpu")
        self._route: Route | None = None
        self._message: ControlMessage | None = None
        self._moved: dict[str, int] = {}

    def open(
        self, message: ControlMessage, route: Route, device: torch.device, until: float
    ) -> None:
        """Meet the other members of the group, if this rank is one."""
        self._message, self._route, self._moved = message, route, {}
        self._device = device
        if route.network or route.fanout:
            self._my_peers(message).join(message.call, until)

    def fill(self, parameters: Mapping[str, torch.Tensor], until: float) -> None:
        """Take what comes from other nodes, then give and take what stays in this one."""
        message, route = self._message, self._route
        assert message is not None and route is not None, "open comes first"
        if not (route.network or route.fanout):
            return
        me, peers = parcels.server_member(message.tp_rank), self._my_peers(message)
        first = packing.incoming(route.network, parameters, route.wire)
        peers.run(message.call, first, until)
        peers.run(message.call, packing.between(me, route.fanout, parameters, route.wire), until)
        self._moved = {
            "network": _num_bytes(route.network),
            "fanout": _num_bytes([p for p in route.fanout if p.taker == me]),
        }

    def check(self, message: ControlMessage) -> None:
        """A group carries one sync at a time: nothing to see."""

    def refuse(self, message: ControlMessage, why: str) -> None:
        """Tell the group not to wait for this rank."""
        if parcels.server_member(message.tp_rank) in message.members:
            self._my_peers(message).refuse(message.call, why)

    @property
    def moved_bytes(self) -> Mapping[str, int]:
        """Bytes by link."""
        return self._moved

    def _my_peers(self, message: ControlMessage) -> Peers:
        me = parcels.server_member(message.tp_rank)
        if self._peers is None or self._peers[0] != (me, self._device):
            self._peers = ((me, self._device), Peers(me, self._device))
        return self._peers[1]


def _num_bytes(found: Iterable[Parcel]) -> int:
    return sum(parcel.num_bytes for parcel in found)
