"""Messages between nodes: one process group per server, apart from all others of both engines.

Owns the group's life: built when first needed, kept between syncs, aborted when anything fails and
then built anew. Gloo carries host memory, NCCL device memory. Knows nothing of plans or parameters:
it is given tensors and the names of peers. The NCCL side has not been run.
"""

from __future__ import annotations

import logging
import os
import socket
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from itertools import islice
from typing import Any

import torch
from torch.distributed import PrefixStore, ProcessGroupGloo, TCPStore  # type: ignore[attr-defined]

from megarl.errors import WeightSyncError
from megarl.weight_sync.transport import meeting, stores
from megarl.weight_sync.transport.meeting import Call

log = logging.getLogger(__name__)

BATCH = 2  # messages posted together
IN_FLIGHT = 2  # batches: one travels while the next is packed
_LAST_WORDS_S = 2.0  # for telling the others why, once a sync has failed
_POLL_S = 0.0005
_SHORTEST_S = 0.01
GONE = ("closed by peer", "reset by peer", "Broken pipe", "remote process exited")
_ERROR_HANDLING = "TORCH_NCCL_ASYNC_ERROR_HANDLING"


@dataclass(frozen=True, slots=True)
class Transfer:
    """One message to or from `peer`: `buffer` gives its contiguous tensor when its turn comes.

    `tag` is the same at both ends; `done` is called once the message has arrived or has left.
    """

    peer: str
    is_incoming: bool
    tag: int
    buffer: Callable[[], torch.Tensor]
    done: Callable[[torch.Tensor], None]


class Peers:
    """The group of one server, as its member `me` holds it, with a connection to the store."""

    def __init__(self, me: str, device: torch.device) -> None:
        self._me, self._device = me, device
        self._backend = "nccl" if device.type == "cuda" else "gloo"
        self._group: _Group | None = None
        self._store: tuple[tuple[str, int], TCPStore] | None = None

    def join(self, call: Call, until: float) -> None:
        """Meet the other members, and have a group with all of them. Collective over them.

        Raises WeightSyncError, and then holds no group, where one is missing, refuses or is late.
        """
        try:
            meeting.bounded(lambda: self._join(call, until), until + _LAST_WORDS_S, self._me)
        except Exception as error:
            text = _text(error)
            self.refuse(call, text)
            raise WeightSyncError(text) from error

    def _join(self, call: Call, until: float) -> None:
        held = self._group.name if self._group and self._group.members == call.members else ""
        store = self._connect(call)
        name = meeting.attend(store, call, self._me, held, self._backend, until)
        if time.monotonic() > until:  # given up by now: nothing may change under a later sync
            raise WeightSyncError("the meeting ended too late")
        if self._group is None or name != self._group.name:
            self._drop()
            self._group = _Group(name, call.members, self._me, store, self._device, until)

    def run(self, call: Call, transfers: Iterable[Transfer], until: float) -> None:
        """Carry out this member's messages, in their order.

        Raises WeightSyncError, and then holds no group, where one fails or does not end in time.
        """
        assert self._group is not None, "join comes first"
        try:
            self._run(self._group, iter(transfers), until)
        except Exception as error:
            text = _text(error)
            self.refuse(call, text)  # first: whom the abort cuts off looks for the cause there
            first = ""
            if self._store is not None:
                late = time.monotonic() + _LAST_WORDS_S
                first = meeting.first_refusal(self._store[1], call, self._me, late)
            raise WeightSyncError(f"{text}; before that, {first}" if first else text) from error

    def _run(self, group: _Group, transfers: Iterator[Transfer], until: float) -> None:
        flying: list[tuple[list[tuple[Transfer, torch.Tensor]], list[Any]]] = []
        while True:
            batch = [(transfer, transfer.buffer()) for transfer in islice(transfers, BATCH)]
            if batch:
                flying.append((batch, group.post(batch, until)))
            while flying and (not batch or len(flying) >= IN_FLIGHT):
                landed, works = flying.pop(0)
                group.wait(landed, works, until)
                for transfer, tensor in landed:
                    transfer.done(tensor)
            if not batch:
                return

    def refuse(self, call: Call, why: str) -> None:
        """Tell the others that this member does not go on, and drop the group."""
        late = time.monotonic() + _LAST_WORDS_S
        try:
            meeting.bounded(lambda: self._say(call, why), late, self._me)
        except (WeightSyncError, RuntimeError) as error:
            log.warning("refusal not told member=%s error=%s", self._me, error)
            self._store = None
        self._drop()

    def _say(self, call: Call, why: str) -> None:
        meeting.refuse(self._connect(call), call, f"{self._me}: {why}")

    def tell(self, address: tuple[str, int], key: str, value: str, until: float) -> None:
        """Write one value to the store."""

        def write() -> None:
            self._connected(address).set(key, value)

        meeting.bounded(write, max(until, time.monotonic() + _LAST_WORDS_S), self._me)

    def close(self) -> None:
        """Drop the group and the connection."""
        self._drop()
        self._store = None

    def _drop(self) -> None:
        group, self._group = self._group, None
        if group is not None:
            group.abort()

    def _connect(self, call: Call) -> TCPStore:
        return self._connected(call.store)

    def _connected(self, address: tuple[str, int]) -> TCPStore:
        if self._store is None or self._store[0] != address:
            self._store = (address, stores.connect(address))
        return self._store[1]


class _Group:
    """One process group: torch's backend object alone, registered nowhere."""

    def __init__(
        self,
        name: str,
        members: tuple[str, ...],
        me: str,
        store: TCPStore,
        device: torch.device,
        until: float,
    ) -> None:
        self.name, self.members = name, members
        self._ranks = {member: rank for rank, member in enumerate(members)}
        self._device = device
        left_s = max(_SHORTEST_S, until - time.monotonic())
        place = PrefixStore(f"p2p/{name}", store)
        make = _nccl if device.type == "cuda" else _gloo
        try:
            self._group = make(place, self._ranks[me], len(members), store.host, left_s, device)
        except Exception as error:
            raise WeightSyncError(
                f"no group with {', '.join(members)}: {_first_line(error)}"
            ) from error

    def post(self, batch: list[tuple[Transfer, torch.Tensor]], until: float) -> list[Any]:
        """Begin the messages of a batch; returns what to wait for, one for each or one for all."""
        if time.monotonic() > until:
            raise WeightSyncError(f"no time left for {_described(batch[0][0])}")
        several = self._device.type == "cuda"
        if several:
            self._group._start_coalescing(self._device)
        works = []
        for transfer, tensor in batch:
            post = self._group.recv if transfer.is_incoming else self._group.send
            try:
                works.append(post([tensor], self._ranks[transfer.peer], transfer.tag))
            except RuntimeError as error:
                raise _failed(transfer, error) from error
        return [self._group._end_coalescing(self._device)] if several else works

    def wait(
        self, batch: list[tuple[Transfer, torch.Tensor]], works: list[Any], until: float
    ) -> None:
        """Until all messages of a batch have ended. Raises WeightSyncError naming the peer."""
        for (transfer, _), work in zip(batch, works, strict=False):
            try:
                if self._device.type == "cuda":
                    _wait_for_device(work, until)
                else:
                    left_s = max(_SHORTEST_S, until - time.monotonic())
                    work.wait(timedelta(seconds=left_s))
            except (RuntimeError, TimeoutError) as error:
                if time.monotonic() >= until:
                    raise WeightSyncError(f"{_described(transfer)} did not end in time") from error
                raise _failed(transfer, error) from error

    def abort(self) -> None:
        """Close all connections: what is under way ends, here and at the peers.

        With Gloo they close once the last of the group's works is let go of.
        """
        try:
            self._group.abort()
        except RuntimeError as error:
            log.warning("group not aborted name=%s error=%s", self.name, error)


def _gloo(
    store: PrefixStore, rank: int, size: int, host: str, left_s: float, device: torch.device
) -> Any:
    """Gloo over the interface that leads to the store's host."""
    options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._devices = [ProcessGroupGloo.create_device(hostname=address_toward(host))]
    options._timeout = timedelta(seconds=left_s)
    options._threads = 1
    return ProcessGroupGloo(store, rank, size, options)


def _nccl(
    store: PrefixStore, rank: int, size: int, host: str, left_s: float, device: torch.device
) -> Any:
    """NCCL, whose own watchdog must not end this process: deadlines here are kept by us."""
    from torch.distributed import ProcessGroupNCCL

    options = ProcessGroupNCCL.Options()
    options._timeout = timedelta(days=1)
    before = os.environ.get(_ERROR_HANDLING)
    os.environ[_ERROR_HANDLING] = "0"
    try:
        group = ProcessGroupNCCL(store, rank, size, options)
    finally:
        if before is None:
            del os.environ[_ERROR_HANDLING]
        else:
            os.environ[_ERROR_HANDLING] = before
    group.eager_connect_single_device(device)
    return group


def address_toward(host: str) -> str:
    """This machine's address on the interface that leads to `host`.

    >>> address_toward("127.0.0.1")
    '127.0.0.1'
    """
    family, _, _, _, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(address)  # sends nothing
        return str(probe.getsockname()[0])


def _wait_for_device(work: Any, until: float) -> None:
    while not work.is_completed():
        if time.monotonic() > until:
            raise TimeoutError
        time.sleep(_POLL_S)
    work.wait()


def _described(transfer: Transfer) -> str:
    if transfer.is_incoming:
        return f"message {transfer.tag} from {transfer.peer}"
    return f"message {transfer.tag} to {transfer.peer}"


def _failed(transfer: Transfer, error: Exception) -> WeightSyncError:
    text = _first_line(error)
    is_gone = any(word in text for word in GONE)
    why = "it closed the connection, or has ended" if is_gone else text
    return WeightSyncError(f"{_described(transfer)} failed: {why}")


def _first_line(error: Exception) -> str:
    return (str(error).strip() or repr(error)).splitlines()[0][:300]


def _text(error: Exception) -> str:
    return str(error) if isinstance(error, WeightSyncError) else _first_line(error)
