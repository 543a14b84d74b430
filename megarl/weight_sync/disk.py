"""Mode `disk`: the policy as a checkpoint on a file system that all share, which servers read.

Owns the folder of each version and the call that has servers read it; what the folder holds is
`checkpoint_files`'s. Older folders go when all servers have the newest.
"""

from __future__ import annotations

import secrets
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import torch.distributed as dist

from megarl.errors import CheckpointError, WeightSyncError
from megarl.types import ServerEndpoint, SyncReport
from megarl.weight_sync.checkpoint_files import CheckpointWriter
from megarl.weight_sync.probe import Probe
from megarl.weight_sync.server_calls import PauseMode, ServerCalls
from megarl.weight_sync.together import from_first
from megarl.weight_sync.unproved import Line, Publish


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
        publish = Publish(version, self._pause, until)
        name = from_first(self._group, f"v{version:06d}-{secrets.token_hex(4)}")
        folder = self._root / name
        try:
            self._writer.write(folder)
        except CheckpointError as error:
            raise WeightSyncError(f"{error}; see weight_sync.disk_dir") from error
        readers = [
            _Reader(server, publish, folder) for server in (servers if self._rank == 0 else ())
        ]
        for reader in readers:
            reader.start()
        size = self._writer.num_bytes
        report = publish.conclude(self._group, self._rank, readers, size, score)
        if self._rank == 0 and all(result.verified for result in report.servers):
            self._remove_others(folder)
        return report

    def _remove_others(self, newest: Path) -> None:
        for path in self._root.glob("v[0-9]*-*"):
            if path != newest:
                shutil.rmtree(path, ignore_errors=True)


class _Reader(Line):
    """One server reading a folder."""

    in_session = False

    def __init__(self, server: ServerEndpoint, publish: Publish, folder: Path) -> None:
        super().__init__(server, publish)
        self._folder = folder

    def write(self, calls: ServerCalls) -> None:
        """Have the server read it."""
        body = {
            "model_path": str(self._folder),
            "load_format": "auto",  # else the server's own, which may be "dummy"
            "flush_cache": self.publish.pause != "in_place",
        }
        calls.post("/update_weights_from_disk", body)
