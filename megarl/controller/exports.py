"""The policy as Hugging Face folders, now and then: which versions, where, and when that fails.

Owns `RUN/export/v%06d`. What is in such a folder is the learner's.
"""

from __future__ import annotations

import asyncio
import logging
import shutil
from pathlib import Path

from megarl import run_paths
from megarl.config.schema import Config
from megarl.controller.checkpoints import PARTIAL, remove
from megarl.errors import CheckpointError, in_words
from megarl.learner.client import LearnerClient
from megarl.observe.metrics import MetricsLog
from megarl.observe.progress import Progress

log = logging.getLogger(__name__)


class Exports:
    """Has the learner write the versions that `export.*` says."""

    def __init__(
        self,
        config: Config,
        run_dir: Path,
        learner: LearnerClient,
        metrics: MetricsLog,
        progress: Progress,
    ) -> None:
        self._config, self._run_dir = config, run_dir
        self._learner, self._metrics, self._progress = learner, metrics, progress
        self._failed: dict[int, str] = {}

    def is_due(self, version: int) -> bool:
        """Whether `version`, just made, is to be exported."""
        settings, last = self._config.export, version == self._config.loop.versions
        return (settings.last and last) or (settings.every > 0 and version % settings.every == 0)

    async def export(self, version: int) -> None:
        """Write `version` to its folder, in the place of what an earlier start has written there.

        Where that fails it is told, and the run goes on.
        """
        folder = self.folder(version)
        try:
            await asyncio.to_thread(remove, folder)
            folder.parent.mkdir(parents=True, exist_ok=True)
            num_bytes = await self._learner.export(folder)
        except (CheckpointError, OSError) as error:
            text = self._failed[version] = in_words(error)
            log.warning("export failed version=%d why=%s", version, text)
            self._metrics.event("export_failed", version=version, error=text)
            self._progress.note(f"version {version} was not exported: {text}. The run goes on")
            return
        self._metrics.event("export", version=version, bytes=num_bytes, folder=str(folder))

    def check(self, version: int) -> None:
        """Raise CheckpointError where `version`, with which the run ends, was not exported."""
        if version in self._failed:
            raise CheckpointError(
                f"version {version} is saved, and was not exported: {self._failed[version]}. "
                f"`megarl convert {self._run_dir}/checkpoints/v{version:06d} FOLDER` makes of it "
                "what an export is"
            )

    def folder(self, version: int) -> Path:
        """Where `version` is, or would be, exported to."""
        return self._root / f"v{version:06d}"

    async def sweep(self) -> None:
        """Remove what exports that never ended have left."""
        for partial in self._root.glob(f"v*{PARTIAL}"):
            await asyncio.to_thread(shutil.rmtree, partial, ignore_errors=True)

    @property
    def _root(self) -> Path:
        named = self._config.export.dir
        if named:
            return Path(named).absolute() / self._config.run.name
        return self._run_dir / run_paths.EXPORTS
