"""Mode `disk`: the policy as a checkpoint on a file system that all share, which servers read.

Owns the folder of each version and the call that has servers read it; what the folder holds is
`checkpoint_files`'s. Older folders go when all servers have the newest.
"""

from __future__ import annotations

import secrets
import shutil
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch.distributed as dist

from megarl.errors import NoAnswerError, WeightSyncError, in_words
from megarl.types import ServerEndpoint, ServerSync, SyncReport
from megarl.weight_sync.checkpoint_files import CheckpointWriter
from megarl.weight_sync.control import stamp
from megarl.weight_sync.exchange import hand_over
from megarl.weight_sync.probe import PendingProbe, Probe
from megarl.weight_sync.server_calls import PauseMode, ServerCalls
from megarl.weight_sync.stock import GRACE_S, UNCHECKED
from megarl.weight_sync.together import from_first, settle_probe


class DiskSync:
    """One learner rank's part in mode `disk`; `root` gets one folder for each publish."""

    def __init__(
        self,
        writer: CheckpointWriter,
        root: Path,
        rank: int,
        group: dist.ProcessGroup | None,
        pause: PauseMode = "retract",
    ) -> None:
        self._writer, self._root, self._rank, self._group = writer, root, rank, group
        self._pause: PauseMode = pause

    def publish(
        self,
        version: int,
        servers: Sequence[ServerEndpoint],
        until: float,
        score: Callable[[], Probe] | None,
    ) -> SyncReport:
        """Write what the parameters now hold, and have `servers` (counted on rank 0) read it.

        Collective, as is `score`, after which servers are asked for the same tokens. A server that
        fails is reported, not raised, and stays paused. Older folders are removed once all servers
        have the new one. Raises WeightSyncError as `write` does.
        """
        start = time.monotonic()
        name = from_first(self._group, f"v{version:06d}-{secrets.token_hex(4)}")
        folder = self._root / name
        self._writer.write(folder)
        pending, label = PendingProbe(), stamp(version, secrets.token_hex(8))
        readers = [
            _Reader(label, server, folder, self._pause, until, pending)
            for server in (servers if self._rank == 0 else ())
        ]
        for reader in readers:
            reader.start()
        error = settle_probe(self._group, self._rank, score, pending)
        report = None
        if self._rank == 0:
            for reader in readers:
                reader.join(max(0.0, until + GRACE_S - time.monotonic()))
            results = tuple(reader.result for reader in readers)
            if all(result.verified for result in results):
                self._remove_others(folder)
            size = self._writer.num_bytes
            taken = sum(result.verified for result in results) * size
            took_s = time.monotonic() - start
            report = SyncReport(version, results, taken, len(servers) * size, took_s)
        told = from_first(self._group, report)
        assert told is not None
        if error:
            raise WeightSyncError(f"version {version} was not published: {error}")
        return told

    def _remove_others(self, newest: Path) -> None:
        for path in self._root.glob("v[0-9]*-*"):
            if path != newest:
                shutil.rmtree(path, ignore_errors=True)


class _Reader(threading.Thread):
    """One server reading a folder, in a thread of learner rank 0 that nobody waits for too long."""

    def __init__(
        self,
        label: str,
        server: ServerEndpoint,
        folder: Path,
        pause: PauseMode,
        until: float,
        probe: PendingProbe,
    ) -> None:
        super().__init__(name=f"weight-sync-{server.name}", daemon=True)
        self._label, self._server, self._folder = label, server, folder
        self._pause: PauseMode = pause
        self._until, self._probe = until, probe
        late = f"{server.name}: no answer in time"
        self.result = ServerSync(server.name, server.incarnation, False, late, is_lost=True)

    def run(self) -> None:
        """All calls to the server, in order. Raises nothing."""
        name, incarnation = self._server.name, self._server.incarnation
        calls = ServerCalls(self._server, self._until)
        body = {
            "model_path": str(self._folder),
            "load_format": "auto",  # else the server's own, which may be "dummy"
            "flush_cache": self._pause != "in_place",
        }
        try:
            _, difference = hand_over(
                calls,
                self._label,
                self._pause,
                lambda: calls.post("/update_weights_from_disk", body),
                lambda: self._probe.wait(self._until),
                in_session=False,
                suspect=UNCHECKED,
            )
            self.result = ServerSync(
                name, incarnation, True, probe_max_abs_logprob=difference, label=self._label
            )
        except Exception as error:  # noqa: BLE001 - one bad server does not spoil the others
            text, is_lost = f"{name}: {in_words(error)}", isinstance(error, NoAnswerError)
            self.result = ServerSync(name, incarnation, False, text, is_lost=is_lost)
        finally:
            calls.close()
