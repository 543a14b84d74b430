"""Mode `hf`: full Hugging Face tensors by SGLang's own calls, for servers without megarl's loader.

Owns which route a server takes, and how buckets are handed to all servers at once. The tensors are
`full`'s, the order of one server's sync is `exchange`'s. SGLang proves nothing of what it loaded,
so that without a log-prob probe nothing is known afterwards.

Only the policy is written: every call names the target model, and a draft model stays as it is.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
import torch.distributed as dist

from megarl.errors import WeightSyncError
from megarl.types import ServerEndpoint, SyncReport, is_loopback
from megarl.weight_sync.full import FullBucket, FullPolicy
from megarl.weight_sync.probe import Probe
from megarl.weight_sync.server_calls import PauseMode, ServerCalls
from megarl.weight_sync.stock_routes import BroadcastRoute, BucketRoute, RequestRoute
from megarl.weight_sync.transport.broadcast import Backend, Broadcast
from megarl.weight_sync.unproved import Line, Publish

log = logging.getLogger(__name__)

Via = Literal["broadcast", "request"]
_POLL_S = 0.02


@dataclass(frozen=True, slots=True)
class StockServer:
    """A server of one publish, and how tensors get there."""

    endpoint: ServerEndpoint
    via: Via
    backend: Backend = "gloo"


def choose_via(wanted: Literal["auto", "broadcast", "request"], url: str, host: str) -> Via:
    """How the server at `url` gets its tensors from a learner that listens on `host`.

    "auto" is a broadcast, but for a learner that listens on this machine only and a server that is
    elsewhere: it could not reach the group, and would hang in the attempt for half an hour.

    >>> choose_via("auto", "http://127.0.0.1:30000", "127.0.0.1")
    'broadcast'
    >>> choose_via("auto", "http://10.0.0.7:30000", "127.0.0.1")
    'request'
    """
    if wanted != "auto":
        return wanted
    return "broadcast" if is_loopback(url) or not is_loopback(f"//{host}") else "request"


class StockSync:
    """One learner rank's part in mode `hf`. `policy` and `group` are of all ranks alike.

    `host` is the address that servers reach rank 0 by, `device` that of its parameters.
    """

    def __init__(
        self,
        policy: FullPolicy,
        rank: int,
        group: dist.ProcessGroup | None,
        host: str,
        device: torch.device,
        pause: PauseMode = "retract",
    ) -> None:
        self._policy, self._rank, self._group = policy, rank, group
        self._host, self._device = host, device
        self._pause: PauseMode = pause
        self._groups: dict[str, tuple[int, Broadcast]] = {}
        self._num_groups = 0

    def publish(
        self,
        version: int,
        servers: Sequence[StockServer],
        until: float,
        score: Callable[[], Probe] | None,
    ) -> SyncReport:
        """Bring `servers` (counted on rank 0) to `version`, which is what the parameters now hold.

        Collective, as is `score`, after which servers are asked for the same tokens. A server that
        fails is reported, not raised, and stays paused; nobody waits for one past `until`, a time
        of `time.monotonic` on rank 0. Raises WeightSyncError, on every rank, for what goes wrong in
        the learner.
        """
        publish = Publish(version, self._pause, until)
        lines = [
            _Line(server.endpoint, publish, self._route(server))
            for server in (servers if self._rank == 0 else ())
        ]
        for line in lines:
            line.start()
        self._send(lines)
        try:
            return publish.conclude(self._group, self._rank, lines, self._policy.num_bytes, score)
        finally:
            for line in lines:
                if not line.result.verified:
                    self._forget(line.server.name)

    def _send(self, lines: Sequence[_Line]) -> None:
        """Give each bucket to all lines as it comes; each lets the next one in when it is done."""
        last = len(self._policy.buckets) - 1
        try:
            for bucket, data in self._policy.stream(lambda: any(line.is_open for line in lines)):
                for line in lines:
                    assert data is not None
                    line.give(bucket, data, bucket.number == last)
                del data
        except WeightSyncError as error:
            for line in lines:
                line.stop(str(error))
            raise

    def close(self) -> None:
        """Leave the groups."""
        for name in list(self._groups):
            self._forget(name)

    def _route(self, server: StockServer) -> BucketRoute:
        if server.via == "request":
            return RequestRoute(server.endpoint.tp)
        return BroadcastRoute(self._broadcast(server), self._device)

    def _broadcast(self, server: StockServer) -> Broadcast:
        """The server's group, which this incarnation may hold already."""
        name, incarnation = server.endpoint.name, server.endpoint.incarnation
        held = self._groups.get(name)
        if held is None or held[0] != incarnation or not held[1].is_open:
            self._forget(name)
            self._num_groups += 1
            label = f"megarl_{name}_{incarnation}_{self._num_groups}_{time.time_ns()}"
            made = Broadcast(label, self._host, server.endpoint.tp, server.backend)
            self._groups[name] = (incarnation, made)
        return self._groups[name][1]

    def _forget(self, name: str) -> None:
        held = self._groups.pop(name, None)
        if held is not None:
            held[1].close()


class _Line(Line):
    """One server's part of one publish: it takes bucket after bucket."""

    def __init__(self, server: ServerEndpoint, publish: Publish, route: BucketRoute) -> None:
        super().__init__(server, publish)
        self.copies, self._route = server.tp, route
        self._free = threading.Semaphore(0)  # released when the next bucket may come
        self._todo: queue.SimpleQueue[tuple[FullBucket, torch.Tensor, bool] | str] = (
            queue.SimpleQueue()
        )

    @property
    def is_open(self) -> bool:
        """Whether it can take another bucket: it has not failed, and its time has not passed."""
        return self.is_alive() and time.monotonic() < self.publish.until

    def give(self, bucket: FullBucket, data: torch.Tensor, is_last: bool) -> None:
        """Hand a bucket over once the one before has been taken; nothing to a line that is over."""
        while self.is_open:
            if self._free.acquire(timeout=_POLL_S):
                self._todo.put((bucket, data, is_last))
                return

    def stop(self, why: str) -> None:
        """Have it end without the rest."""
        self._todo.put(why)

    def write(self, calls: ServerCalls) -> None:
        """All buckets. With the last one goes the prefix cache of the old weights."""
        self._route.open(calls, self.publish.until)
        is_last = False
        while not is_last:
            self._free.release()
            bucket, data, is_last = self._next()
            flush = is_last and self.publish.pause != "in_place"
            self._route.send(calls, bucket, data, flush, self.publish.until)
            del data  # the next one is being filled

    def _next(self) -> tuple[FullBucket, torch.Tensor, bool]:
        try:
            given = self._todo.get(timeout=max(0.0, self.publish.until - time.monotonic()))
        except queue.Empty:
            raise WeightSyncError(
                "the learner's ranks did not bring the next tensors in time; raise deadline.sync_s"
            ) from None
        if isinstance(given, str):
            raise WeightSyncError(given)
        return given
