"""Saving a run: when, beside the next steps, and which checkpoints stay.

Owns the writing of `RUN/checkpoints/v%06d/`, its state and its COMPLETE, and what happens where a
save fails: the run goes on, says so, and saves the next version. The learner writes `megatron/`.
"""

from __future__ import annotations

import asyncio
import contextlib
import difflib
import json
import logging
import math
import os
import shutil
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from megarl import run_paths
from megarl.config.schema import Config
from megarl.controller.resume import COMPLETE, STATE, WEIGHTS, read_saved, whole_checkpoints
from megarl.durable import sync_path
from megarl.errors import CheckpointError, in_words
from megarl.learner.client import LearnerClient
from megarl.observe.metrics import MetricsLog
from megarl.observe.progress import Progress

log = logging.getLogger(__name__)

PARTIAL = ".partial"
POLL_S, MAX_POLL_S = 0.05, 2.0  # how often the learner is asked whether a save has ended
EVALUATION = ("eval/accuracy", "eval/scored")  # of versions that are evaluated
FAILURES = (CheckpointError, OSError)


class Checkpoints:
    """Saves versions, one at a time, and keeps those that `checkpoint.*` says."""

    def __init__(
        self,
        config: Config,
        run_dir: Path,
        learner: LearnerClient,
        metrics: MetricsLog,
        progress: Progress,
    ) -> None:
        self._config, self._settings = config, config.checkpoint
        self._folder = run_dir / run_paths.CHECKPOINTS
        self._learner, self._metrics, self._progress = learner, metrics, progress
        self._under_way: asyncio.Task[None] | None = None
        self._version = -1  # the newest that is saved, or is about to be
        self._is_owed = False  # the last save failed
        self._has_told = False  # that there is no metric `checkpoint.best`

    def is_due(self, version: int) -> bool:
        """Whether `version`, just made, is to be saved."""
        due = [every for every in (self._settings.every, self._settings.keep_every) if every > 0]
        is_last = version == self._config.loop.versions
        return is_last or self._is_owed or any(version % every == 0 for every in due)

    def is_saved(self, version: int) -> bool:
        """Whether `version` is saved, or a save of it is under way."""
        return version == self._version and not self._is_owed

    async def save(
        self,
        version: int,
        prompts: Mapping[str, Any],
        values: Mapping[str, Any] | None = None,
        must: bool = False,
    ) -> None:
        """Save everything that continuing from `version` needs; whole or not at all.

        Training may go on when it returns, while files are written, unless `checkpoint.background`
        is off or the version is the last. Another save is waited for. `values` are the metrics of
        the version. Where saving fails the run goes on, and the next version is due; but with
        `must`, and where it is the last version, the error is raised.
        """
        await self.settle()
        started_s = time.monotonic()
        must = must or version == self._config.loop.versions
        final = self._folder / f"v{version:06d}"
        partial = final.with_name(final.name + PARTIAL)
        best = (values or {}).get(self._settings.best)
        self._tell_of_best(version, values)
        state = {
            "version": version,
            "prompts": dict(prompts),
            "metrics": {} if best is None else {self._settings.best: best},
        }
        try:
            await asyncio.to_thread(_make_empty, partial)
            await self._learner.begin_save(str(partial / WEIGHTS), version)
        except FAILURES as error:
            self._failed(version, error, must)
            return
        self._version, self._is_owed = version, False
        stood_still_s = time.monotonic() - started_s
        waits = must or not self._settings.background
        finish = self._finish(partial, final, state, waits, started_s, stood_still_s)
        self._under_way = asyncio.create_task(finish)
        if waits:
            await self.settle(must)

    def _tell_of_best(self, version: int, values: Mapping[str, Any] | None) -> None:
        """Say once that `checkpoint.best` is no metric of a pass; evaluation has its own passes."""
        name = self._settings.best
        if not name or not values or name in values or name in EVALUATION or self._has_told:
            return
        self._has_told = True
        near = difflib.get_close_matches(name, [*values, *EVALUATION], 1)
        hint = f"; the nearest is {near[0]}" if near else ""
        self._progress.note(
            f"checkpoint.best = {name}: version {version} has no such metric, so that it is not "
            f"the best of any{hint}; docs/metrics.md has all"
        )

    async def settle(self, must: bool = False) -> None:
        """Wait for the save under way, if there is one. With `must` its error is raised."""
        task, self._under_way = self._under_way, None
        if task is None:
            return
        try:
            await task
        except FAILURES as error:
            self._failed(self._version, error, must)

    async def sweep(self) -> None:
        """Remove what saves that never ended have left."""
        for partial in self._folder.glob(f"v*{PARTIAL}"):
            await asyncio.to_thread(shutil.rmtree, partial, ignore_errors=True)

    async def close(self) -> None:
        """Forget the save under way: the run ends for another reason."""
        task, self._under_way = self._under_way, None
        if task is not None:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError, Exception):
                await task

    async def _finish(
        self,
        partial: Path,
        final: Path,
        state: Mapping[str, Any],
        wait: bool,
        started_s: float,
        stood_still_s: float,
    ) -> None:
        """What follows when the learner has written its part, which is asked for now and then."""
        pause_s = POLL_S
        while not await self._learner.end_save(wait):
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, MAX_POLL_S)
        await asyncio.to_thread(_complete, partial, final, state)
        took_s = time.monotonic() - started_s
        self._metrics.event(
            "checkpoint",
            version=state["version"],
            took_s=round(took_s, 3),
            stood_still_s=round(took_s if wait else stood_still_s, 3),
        )
        await asyncio.to_thread(self._remove_old)

    def _remove_old(self) -> None:
        """Remove the checkpoints that need not stay; a failure to is no reason to stop."""
        found = {run_paths.version_of(path): path for path in whole_checkpoints(self._folder)}
        values = {version: _value(path, self._settings.best) for version, path in found.items()}
        settings = self._settings
        stay = kept(values, settings.keep, settings.keep_every, settings.best_is)
        for version in found.keys() - stay:
            try:
                remove(found[version])
            except OSError as error:
                log.warning("checkpoint not removed version=%d why=%s", version, error)

    def _failed(self, version: int, error: Exception, must: bool) -> None:
        self._is_owed = True
        partial = self._folder / f"v{version:06d}{PARTIAL}"
        shutil.rmtree(partial, ignore_errors=True)
        if must:
            raise error
        text = in_words(error)
        log.warning("checkpoint failed version=%d why=%s", version, text)
        self._metrics.event("checkpoint_failed", version=version, error=text)
        self._progress.note(
            f"version {version} was not saved: {text}. Training goes on, and the next version is "
            "saved"
        )


def kept(
    versions: Mapping[int, float | None],
    newest: int,
    every: int,
    best_is: Literal["highest", "lowest"],
) -> set[int]:
    """Which of the saved versions stay. Of each the value of the metric is given that says which
    is the best; of equals it is the newest.

    >>> sorted(kept({10: 0.5, 20: 0.9, 30: None, 40: 0.1, 50: 0.2}, 2, 30, "highest"))
    [20, 30, 40, 50]
    """
    stay = set(sorted(versions)[-newest:])
    stay |= {version for version in versions if every > 0 and version % every == 0}
    sign = 1 if best_is == "highest" else -1
    rated = [
        (sign * value, version)
        for version, value in versions.items()
        if value is not None and math.isfinite(value)
    ]
    return stay | {version for _, version in sorted(rated)[-1:]}


def _value(path: Path, metric: str) -> float | None:
    """What a checkpoint was saved with of a metric."""
    if not metric:
        return None
    try:
        return read_saved(path).metrics.get(metric)
    except CheckpointError:
        return None


def _complete(partial: Path, final: Path, state: Mapping[str, Any]) -> None:
    """Make the folder a checkpoint, and have it survive a crash from then on."""
    _write_through(partial / STATE, json.dumps(state, indent=1) + "\n")
    sync_path(partial)
    _write_through(partial / COMPLETE, "")
    sync_path(partial)
    remove(final)
    partial.rename(final)
    sync_path(final.parent)


def _write_through(path: Path, text: str) -> None:
    """Write a file, and return when the disk has it: a node that dies must not leave it empty."""
    with path.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def _make_empty(partial: Path) -> None:
    remove(partial)
    partial.mkdir(parents=True)


def remove(folder: Path) -> None:
    """Remove a folder that counts as whole by its name: it loses that first.

    What is left where a removal is cut short has a name that is swept at the next start.
    """
    if folder.exists():
        removed = folder.with_name(f"{folder.name}.removed{PARTIAL}")
        shutil.rmtree(removed, ignore_errors=True)
        folder.rename(removed)
        shutil.rmtree(removed)
