"""The ways by which weights come into a server rank: arenas of its own node, messages from others.

Owns what each way keeps between syncs. Which boxes come by which way is the route's. Which of them
a sync uses follows from the route alone: where it has nothing for a way, that way does nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Protocol

import torch

from megarl.errors import WeightSyncError
from megarl.reshard.layout import num_elements
from megarl.weight_sync import batches, packing, parcels
from megarl.weight_sync.control import ControlMessage
from megarl.weight_sync.formats import staged
from megarl.weight_sync.parcels import Parcel
from megarl.weight_sync.route import Route, Source
from megarl.weight_sync.transport.arenas import AnyReader, open_arena
from megarl.weight_sync.transport.p2p import Peers


class Inflow(Protocol):
    """One way into a server rank's live parameters, kept between syncs.

    All of it raises WeightSyncError where it cannot go on, none of it waits past `until` (a time of
    `time.monotonic`).
    """

    def open(
        self, message: ControlMessage, route: Route, device: torch.device, until: float
    ) -> None:
        """Find all that is needed for this sync, before the first byte is written on `device`."""

    def fill(self, parameters: Mapping[str, torch.Tensor], until: float) -> None:
        """Write this way's boxes into the live parameters."""

    def check(self, message: ControlMessage) -> None:
        """See that what was read was of this sync from beginning to end."""

    def refuse(self, message: ControlMessage, why: str) -> None:
        """Tell the others that this rank does not go on, and drop what the sync has opened."""

    def let_go(self) -> None:
        """Close what must not be open between syncs, whether the sync went well or not."""

    @property
    def moved_bytes(self) -> Mapping[str, int]:
        """Bytes that the last `fill` wrote, by link."""


class ArenaInflow:
    """Copies out of the arenas of learner ranks on this node, which stay open where they may."""

    def __init__(self) -> None:
        self._readers: dict[int, AnyReader] = {}
        self._route: Route | None = None
        self._prepared: dict[int, tuple[object, batches.Prepared | batches.OneByOne]] = {}
        self._moved: tuple[Route, Mapping[str, int]] | None = None

    def open(
        self, message: ControlMessage, route: Route, device: torch.device, until: float
    ) -> None:
        """The arenas that the route reads: opened once, dropped when the message names others."""
        self._route = route
        missing = [rank for rank in route.sources if rank not in message.arenas]
        if missing:
            raise WeightSyncError(f"the message names no arena of learner ranks {missing}")
        for rank, reader in list(self._readers.items()):  # first: no memory is opened twice
            if rank not in route.sources or reader.ref != message.arenas[rank]:
                self._readers.pop(rank).close()
        for rank, source in route.sources.items():
            if rank not in self._readers:
                reader = open_arena(message.arenas[rank], source.digest, device)
                self._readers[rank] = reader
        self.check(message)

    def fill(self, parameters: Mapping[str, torch.Tensor], until: float) -> None:
        """Copy every box."""
        assert self._route is not None, "open comes first"
        for rank, source in self._route.sources.items():
            self._prepare(rank, source, parameters).run()

    def _views(self, rank: int, source: Source) -> dict[str, torch.Tensor]:
        assert self._route is not None, "open comes first"
        reader, wire = self._readers[rank], self._route.wire
        return {name: staged(reader, slot, wire) for name, slot in source.slots.items()}

    def _prepare(
        self, rank: int, source: Source, parameters: Mapping[str, torch.Tensor]
    ) -> batches.Prepared | batches.OneByOne:
        """The copies out of one arena, made anew where arena or parameters are somewhere else."""
        key = (source.moves, self._readers[rank].where, batches.addresses(parameters))
        found = self._prepared.get(rank)
        if found is None or found[0] != key:
            views = self._views(rank, source)
            if batches.pays(next(iter(parameters.values())).device):
                copies = batches.batch(source.moves, views, parameters)
                found = (key, batches.Prepared(copies, views, parameters))
            else:
                found = (key, batches.OneByOne(source.moves, views, parameters))
            self._prepared[rank] = found
        return found[1]

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

    def let_go(self) -> None:
        """Close what is the learner's own memory, before it hears that it may use it again."""
        for rank, reader in list(self._readers.items()):
            if not reader.is_lasting:
                self._readers.pop(rank).close()

    @property
    def moved_bytes(self) -> Mapping[str, int]:
        """Bytes by link."""
        if self._route is None:
            return {}
        if self._moved is None or self._moved[0] is not self._route:
            moved: dict[str, int] = {}
            for source in self._route.sources.values():
                for move in source.moves:
                    size = num_elements(move.box) * self._route.wire.of(move.tensor).itemsize
                    moved[move.link] = moved.get(move.link, 0) + size
            self._moved = (self._route, moved)
        return self._moved[1]


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

    def let_go(self) -> None:
        """A group is kept."""

    def refuse(self, message: ControlMessage, why: str) -> None:
        """Tell the group not to wait for the rank whose message this is: this one, if all is well.

        A rank that is in no group, or has another's message, keeps no connection for it.
        """
        me = parcels.server_member(message.tp_rank)
        if me not in message.members:
            return
        if self._peers is not None and self._peers[0] == (me, self._device):
            self._peers[1].refuse(message.call, why)
            return
        stranger = Peers(me, self._device)
        stranger.refuse(message.call, why)
        stranger.close()

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
