"""Mode `hf`: full Hugging Face tensors by SGLang's own calls, for servers without megarl's loader.

Owns the two routes (a broadcast in SGLang's own process group; tensors in the request itself), the
order of calls to one server, and the payload. The tensors are `full`'s. SGLang proves nothing of
what it loaded, so that whoever calls this must ask for log-probs afterwards.

Only the policy is written: every call names the target model, and a draft model stays as it is.
"""

from __future__ import annotations

import base64
import logging
import pickle
import queue
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Literal
from urllib.parse import urlsplit

import torch
import torch.distributed as dist

from megarl.errors import WeightSyncError, in_words
from megarl.types import ServerEndpoint, ServerSync, SyncReport
from megarl.weight_sync.full import FullBucket, FullPolicy
from megarl.weight_sync.server_calls import SELECTOR, PauseMode, ServerCalls
from megarl.weight_sync.together import from_first
from megarl.weight_sync.transport.broadcast import Backend, Broadcast

log = logging.getLogger(__name__)

Via = Literal["auto", "broadcast", "request"]
BUCKETS = "flattened_bucket"  # SGLang's load_format for tensors one behind the other in one
_GRACE_S = 12.0  # past the deadline, for ending sessions
_LOOPBACK = ("127.", "localhost", "::1")

Finish = Callable[[ServerEndpoint, ServerCalls], None]
"""What follows the last tensor: label, resume, log-probs. Raises where they are wrong."""


@dataclass(frozen=True, slots=True)
class StockServer:
    """A server of one publish, and how tensors get there."""

    endpoint: ServerEndpoint
    via: Literal["broadcast", "request"]
    backend: Backend = "gloo"


def choose_via(wanted: Via, server: ServerEndpoint, host: str) -> Literal["broadcast", "request"]:
    """How `server` gets its tensors from a learner that listens on `host`.

    A server that tries to join a group and cannot reach it hangs for half an hour, so "auto" takes
    a broadcast only where the run has started the server, or both are on this machine.

    >>> here = ServerEndpoint("a", "http://127.0.0.1:1", tp=1, incarnation=0)
    >>> choose_via("auto", here, "127.0.0.1"), choose_via("auto", here, "10.0.0.1")
    ('broadcast', 'request')
    """
    if wanted != "auto":
        return wanted
    both = ((urlsplit(server.url).hostname or ""), host)
    is_local = all(name.startswith(_LOOPBACK) for name in both)
    is_ours = bool(server.nodes) and not any(name.startswith(_LOOPBACK) for name in both)
    return "broadcast" if is_local or is_ours else "request"


class StockSync:
    """One learner rank's part in mode `hf`. `policy` and `group` are of all ranks alike.

    `host` is the address that servers reach rank 0 by; `device` that of its tensors.
    """

    def __init__(
        self,
        policy: FullPolicy,
        rank: int,
        group: dist.ProcessGroup | None,
        host: str,
        pause: PauseMode = "retract",
        device: torch.device | None = None,
    ) -> None:
        self._policy, self._rank, self._group, self._host = policy, rank, group, host
        self._pause: PauseMode = pause
        self._device = device or torch.device("cpu")
        self._groups: dict[str, tuple[int, Broadcast]] = {}
        self._made = 0

    def publish(
        self, version: int, servers: Sequence[StockServer], until: float, finish: Finish
    ) -> SyncReport:
        """Bring `servers` (counted on rank 0) to what the parameters now hold. Collective.

        A server that fails is reported, not raised, and stays paused; nobody waits for one past
        `until`, a time of `time.monotonic` on rank 0. WeightSyncError, on every rank, is for what
        goes wrong in the learner.
        """
        start = time.monotonic()
        lines = [self._line(server, until, finish) for server in servers] if not self._rank else []
        for line in lines:
            line.start()
        try:
            last = len(self._policy.buckets) - 1
            for bucket, data in self._policy.stream(lambda: any(line.is_alive() for line in lines)):
                for line in lines:
                    assert data is not None
                    line.give(bucket, data, bucket.number == last)
                del data
        except WeightSyncError as error:
            for line in lines:
                line.stop(f"not sent whole: {error}")
            raise
        report = self._report(version, lines, until, start) if not self._rank else None
        told = from_first(self._group, report)
        assert told is not None
        return told

    def _report(
        self, version: int, lines: Sequence[_Line], until: float, start: float
    ) -> SyncReport:
        for line in lines:
            line.join(max(0.0, until + _GRACE_S - time.monotonic()))
        results = tuple(line.result for line in lines)
        for line in lines:
            if not line.result.verified:
                self._forget(line.server.endpoint.name)
        size = self._policy.num_bytes
        taken = sum(line.server.endpoint.tp for line in lines if line.result.verified) * size
        took_s = time.monotonic() - start
        return SyncReport(version, results, taken, len(lines) * size, took_s)

    def close(self) -> None:
        """Leave the groups."""
        for name in list(self._groups):
            self._forget(name)

    def _line(self, server: StockServer, until: float, finish: Finish) -> _Line:
        group = self._broadcast(server) if server.via == "broadcast" else None
        return _Line(server, group, self._device, self._pause, until, finish)

    def _broadcast(self, server: StockServer) -> Broadcast:
        """The server's group, which this incarnation may hold already."""
        name, incarnation = server.endpoint.name, server.endpoint.incarnation
        held = self._groups.get(name)
        if held is None or held[0] != incarnation or not held[1].is_open:
            self._forget(name)
            self._made += 1
            label = f"megarl_{name}_{incarnation}_{self._made}_{time.time_ns()}"
            made = Broadcast(label, self._host, server.endpoint.tp, server.backend)
            self._groups[name] = (incarnation, made)
        return self._groups[name][1]

    def _forget(self, name: str) -> None:
        held = self._groups.pop(name, None)
        if held is not None:
            held[1].close()


class _Line(threading.Thread):
    """One server's part of one publish, in a thread of learner rank 0."""

    def __init__(
        self,
        server: StockServer,
        group: Broadcast | None,
        device: torch.device,
        pause: PauseMode,
        until: float,
        finish: Finish,
    ) -> None:
        super().__init__(name=f"weight-sync-{server.endpoint.name}", daemon=True)
        self.server = server
        self._group, self._device, self._until = group, device, until
        self._pause: PauseMode = pause
        self._finish = finish
        self._free = threading.Semaphore(0)  # released when the next bucket may come
        self._todo: queue.SimpleQueue[tuple[FullBucket, torch.Tensor, bool] | str] = (
            queue.SimpleQueue()
        )
        name = server.endpoint.name
        self._result = ServerSync(
            name, server.endpoint.incarnation, False, f"{name}: no answer in time"
        )

    @property
    def result(self) -> ServerSync:
        """How it went, or that it has not ended."""
        return self._result

    def give(self, bucket: FullBucket, data: torch.Tensor, is_last: bool) -> None:
        """Hand a bucket over once the one before has been taken; not to a line that has ended."""
        while self.is_alive() and not self._free.acquire(timeout=0.05):
            if time.monotonic() > self._until + _GRACE_S:
                return
        if self.is_alive():
            self._todo.put((bucket, data, is_last))

    def stop(self, why: str) -> None:
        """Have it end without the rest."""
        self._todo.put(why)

    def run(self) -> None:
        """All calls to the server, in order. Raises nothing."""
        endpoint = self.server.endpoint
        calls = ServerCalls(endpoint, self._until)
        try:
            self._work(calls)
            self._result = ServerSync(endpoint.name, endpoint.incarnation, True)
        except Exception as error:  # noqa: BLE001 - one bad server does not spoil the others
            text = f"{endpoint.name}: {in_words(error)}"
            self._result = ServerSync(endpoint.name, endpoint.incarnation, False, text)
        finally:
            calls.close()

    def _work(self, calls: ServerCalls) -> None:
        calls.pause(self._pause)
        calls.begin()
        try:
            if self._group is not None and not self._group.is_open:
                group = self._group
                route = "/init_weights_update_group"
                group.open(lambda: calls.post(route, group.body), self._until)
            is_last = False
            while not is_last:
                self._free.release()
                bucket, data, is_last = self._next()
                self._send(calls, bucket, data, is_last)
                del data
        except Exception:
            with suppress(WeightSyncError):  # the first error is the one to tell
                calls.end()
            raise
        calls.end()
        self._finish(self.server.endpoint, calls)

    def _next(self) -> tuple[FullBucket, torch.Tensor, bool]:
        try:
            given = self._todo.get(timeout=max(0.0, self._until - time.monotonic()))
        except queue.Empty:
            raise WeightSyncError(
                "the learner did not bring the next tensors in time; raise deadline.sync_s"
            ) from None
        if isinstance(given, str):
            raise WeightSyncError(given)
        return given

    def _send(
        self, calls: ServerCalls, bucket: FullBucket, data: torch.Tensor, is_last: bool
    ) -> None:
        """One bucket; with the last one the prefix cache of the old weights goes."""
        flush = is_last and self._pause != "in_place"
        if self._group is None:
            payload = encode_bucket(bucket, data)
            calls.update(
                {
                    "serialized_named_tensors": [payload] * self.server.endpoint.tp,
                    "load_format": BUCKETS,
                    "flush_cache": flush,
                }
            )
            return
        body = {
            "names": [tensor.name for tensor in bucket.tensors],
            "dtypes": [dtype_name(tensor.dtype) for tensor in bucket.tensors],
            "shapes": [list(tensor.shape) for tensor in bucket.tensors],
            "group_name": self._group.name,
            "load_format": BUCKETS,
            "flush_cache": flush,
            "selector": SELECTOR,
        }
        there = data.to(self._device) if self.server.backend == "nccl" else data
        route = "/update_weights_from_distributed"
        self._group.send(there, lambda: calls.post(route, body), self._until)


def dtype_name(dtype: torch.dtype) -> str:
    """A dtype as SGLang's requests spell it.

    >>> dtype_name(torch.bfloat16)
    'bfloat16'
    """
    return str(dtype).removeprefix("torch.")


def encode_bucket(bucket: FullBucket, data: torch.Tensor) -> str:
    """One entry of `serialized_named_tensors`: base64 of {flattened_tensor, metadata}.

    SGLang unpickles only what is on its list. `import megatron.core` replaces torch's storage
    loader by a function that is not, and then the server ends; so that the pickle is written with
    torch's own name for it, whatever stands there in this process. The metadata are plain
    namespaces, as sglang need not be installed here.
    """
    metadata = [
        SimpleNamespace(
            name=tensor.name,
            shape=tensor.shape,
            dtype=tensor.dtype,
            start_idx=tensor.offset,
            end_idx=tensor.offset + tensor.num_bytes,
            numel=tensor.num_bytes,
        )
        for tensor in bucket.tensors
    ]
    stream = b"".join(
        (
            pickle.PROTO + b"\x03",
            pickle.EMPTY_DICT + pickle.MARK,
            _part("metadata") + _part(metadata),
            _part("flattened_tensor") + _tensor_part(data),
            pickle.SETITEMS + pickle.STOP,
        )
    )
    return base64.b64encode(stream).decode("ascii")


def _part(value: object) -> bytes:
    """A value's pickle without its beginning and end: several make one stream.

    Protocol 3 numbers what it remembers, and each part remembers before it recalls.
    """
    return pickle.dumps(value, 3)[2:-1]


def _tensor_part(data: torch.Tensor) -> bytes:
    """What torch pickles of a tensor, with the storage's loader named by hand."""
    _, (storage, *rest) = data.__reduce_ex__(3)
    _, (saved,) = storage.__reduce__()
    return b"".join(
        (
            pickle.GLOBAL + b"torch._utils\n_rebuild_tensor_v2\n" + pickle.MARK,
            pickle.GLOBAL + b"torch.storage\n_load_from_bytes\n",
            _part(saved) + pickle.TUPLE1 + pickle.REDUCE,
            *map(_part, rest),
            pickle.TUPLE + pickle.REDUCE,
        )
    )
