"""Publishing by SGLang's own calls, which prove nothing: what modes `hf` and `disk` share.

Owns the thread that brings one server to a version and the end of a publish on all learner ranks.
How weights get there is `stock`'s and `disk`'s, the order of one server's sync is `exchange`'s.
"""

from __future__ import annotations

import secrets
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

import torch.distributed as dist

from megarl.errors import WeightSyncError
from megarl.types import ServerEndpoint, SyncReport
from megarl.weight_sync.control import stamp
from megarl.weight_sync.exchange import failed, hand_over, late, proved
from megarl.weight_sync.probe import PendingProbe, Probe
from megarl.weight_sync.server_calls import PauseMode, ServerCalls
from megarl.weight_sync.together import from_first, settle_probe

UNCHECKED = (
    "Nothing else shows what SGLang loaded: suspect a tensor that its loader took for another, or "
    "left out without a word"
)
GRACE_S = 12.0  # past the deadline, for ending sessions; then a server counts as not answering


class Publish:
    """One publish of `version` on one learner rank, up to `until`, a time of `time.monotonic` on
    rank 0."""

    def __init__(self, version: int, pause: PauseMode, until: float) -> None:
        self.version, self.pause, self.until = version, pause, until
        self.label = stamp(version, secrets.token_hex(8))
        self.probe = PendingProbe()
        self._start = time.monotonic()

    def conclude(
        self,
        group: dist.ProcessGroup | None,
        rank: int,
        lines: Sequence[Line],
        num_bytes: int,
        score: Callable[[], Probe] | None,
    ) -> SyncReport:
        """The report on all ranks, once every line has ended or is given up. Collective.

        `num_bytes` are the policy's. Raises WeightSyncError, on all ranks, where `score` failed.
        """
        error, report = settle_probe(group, rank, score, self.probe), None
        if rank == 0:
            for line in lines:
                line.join(max(0.0, self.until + GRACE_S - time.monotonic()))
            results = tuple(line.result for line in lines)
            taken = sum(line.copies for line in lines if line.result.verified) * num_bytes
            took_s = time.monotonic() - self._start
            report = SyncReport(self.version, results, taken, len(lines) * num_bytes, took_s)
        told = from_first(group, report)
        assert told is not None
        if error:
            raise WeightSyncError(f"version {self.version} was not published: {error}")
        return told


class Line(threading.Thread, ABC):
    """One server's part of a publish, in a thread of learner rank 0 that nobody waits for too long.

    `copies` are how often the policy is taken by it.
    """

    in_session = True
    copies = 1

    def __init__(self, server: ServerEndpoint, publish: Publish) -> None:
        super().__init__(name=f"weight-sync-{server.name}", daemon=True)
        self.server, self.publish = server, publish
        self.result = late(server)

    def run(self) -> None:
        """All calls to the server, in order. Raises nothing."""
        calls = ServerCalls(self.server, self.publish.until)
        try:
            _, difference = hand_over(
                calls,
                self.publish.label,
                self.publish.pause,
                lambda: self.write(calls),
                lambda: self.publish.probe.wait(self.publish.until),
                in_session=self.in_session,
                suspect=UNCHECKED,
            )
            self.result = proved(self.server, self.publish.label, difference)
        except Exception as error:  # noqa: BLE001 - one bad server does not spoil the others
            self.result = failed(self.server, error)
        finally:
            calls.close()

    @abstractmethod
    def write(self, calls: ServerCalls) -> None:
        """Have the server load the weights. Raises WeightSyncError."""
