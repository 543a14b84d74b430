"""Learner rank 0 and the ranks of one server in the process group of SGLang's own calls.

Owns the group's life on our side: SGLang joins it by /init_weights_update_group and takes
broadcasts of rank 0 out of it. Both sides must act at the same time, so that each step is a call to
the server beside our own part, and ends when either fails. Knows nothing of what is sent. Gloo
carries host memory; the NCCL side has not been run.

The store's prefixes are those of sglang 0.5.23 (init_custom_process_group) and of torch
(_new_process_group_helper), so that both sides find each other's addresses.
"""

from __future__ import annotations

import queue
import socket
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Literal

import torch
from torch.distributed import (  # type: ignore[attr-defined]
    BroadcastOptions,
    PrefixStore,
    ProcessGroupGloo,
    TCPStore,
)

from megarl.errors import NoAnswerError, WeightSyncError
from megarl.weight_sync.transport.p2p import GONE, address_toward

Backend = Literal["gloo", "nccl"]
_SHORTEST_S = 0.05
_LATE = "did not end in time; see that server's log, or raise deadline.sync_s"
_PREFIX = {"gloo": "cpu/", "nccl": "cuda/"}  # the first device of each backend in torch's table


class Broadcast:
    """The group of one server of `num_ranks` ranks; ours is rank 0, listening on `host`."""

    def __init__(self, name: str, host: str, num_ranks: int, backend: Backend) -> None:
        self.name, self.backend = name, backend
        self._size = num_ranks + 1
        family = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0][0]
        listener = socket.create_server((host, 0), family=family, backlog=1024)
        self.address = (host, int(listener.getsockname()[1]))
        self._store = TCPStore(
            *self.address,
            is_master=True,
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
        )
        self._group: Any = None

    @property
    def is_open(self) -> bool:
        """Whether there is a group, on our side."""
        return self._group is not None

    @property
    def body(self) -> dict[str, object]:
        """What /init_weights_update_group needs to know."""
        return {
            "master_address": self.address[0],
            "master_port": self.address[1],
            "rank_offset": 1,
            "world_size": self._size,
            "group_name": self.name,
            "backend": self.backend,
        }

    def open(self, join: Callable[[], object], until: float) -> None:
        """Make the group, while `join` has the server's ranks do the same.

        Raises WeightSyncError where one side fails, or `until` (of `time.monotonic`) passes.
        """

        def ours() -> None:
            place = PrefixStore(f"{self.name}/", PrefixStore(self.name, self._store))
            place = PrefixStore(_PREFIX[self.backend], place)
            left = timedelta(seconds=max(_SHORTEST_S, until - time.monotonic()))
            make = _nccl if self.backend == "nccl" else _gloo
            self._group = make(place, self._size, self.address[0], left)

        side_by_side(join, ours, until, "the group of SGLang's update calls")

    def send(self, data: torch.Tensor, take: Callable[[], object], until: float) -> None:
        """Send `data` to all ranks of the server, while `take` has them receive and load it.

        Raises WeightSyncError, and ends the group, where one side fails or `until` passes.
        """

        def ours() -> None:
            options = BroadcastOptions()
            options.rootRank = options.rootTensor = 0
            left = timedelta(seconds=max(_SHORTEST_S, until - time.monotonic()))
            group = self._group  # held here: letting go of it waits for what is under way
            group.broadcast([data], options).wait(left)

        try:
            side_by_side(take, ours, until, "a broadcast")
        except WeightSyncError:
            self.close()
            raise

    def close(self) -> None:
        """Close all connections; what is under way ends."""
        group, self._group = self._group, None
        if group is not None:
            group.abort()


def side_by_side(
    theirs: Callable[[], object], ours: Callable[[], object], until: float, what: str
) -> None:
    """Do both at the same time; the first error of either ends the wait for the other.

    Raises NoAnswerError where `until` passes, and gives up threads that then still wait.
    """
    ends: queue.SimpleQueue[Exception | None] = queue.SimpleQueue()

    def run(work: Callable[[], object]) -> None:
        try:
            work()
            ends.put(None)
        except Exception as error:  # noqa: BLE001 - raised in the caller's thread
            ends.put(error)

    for work in (theirs, ours):
        threading.Thread(target=run, args=(work,), name="weight-sync-side", daemon=True).start()
    for _ in range(2):
        try:
            error = ends.get(timeout=max(_SHORTEST_S, until - time.monotonic()))
        except queue.Empty:
            raise NoAnswerError(f"{what} {_LATE}") from None
        if isinstance(error, WeightSyncError):
            raise error
        if error is not None:
            text = (str(error).strip() or repr(error)).splitlines()[0][:300]
            if time.monotonic() >= until:
                raise NoAnswerError(f"{what} {_LATE}") from error
            if any(word in text for word in GONE):
                raise NoAnswerError(f"{what} ended: the server has closed it, or has ended")
            raise WeightSyncError(f"{what} failed: {text}") from error


def _gloo(store: PrefixStore, size: int, host: str, left: timedelta) -> Any:
    options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._devices = [ProcessGroupGloo.create_device(hostname=address_toward(host))]
    options._timeout = left
    options._threads = 1
    return ProcessGroupGloo(store, 0, size, options)


def _nccl(store: PrefixStore, size: int, host: str, left: timedelta) -> Any:
    """Connects at the first broadcast, as SGLang's side does."""
    from torch.distributed import ProcessGroupNCCL

    options = ProcessGroupNCCL.Options()
    options._timeout = timedelta(days=1)  # deadlines are kept here, not by NCCL's watchdog
    return ProcessGroupNCCL(store, 0, size, options)
