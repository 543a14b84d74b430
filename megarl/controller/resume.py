"""Checkpoints of a run: what is saved, when one is whole, and which one a run continues from.

Owns `RUN/checkpoints/v%06d/{megatron/, state.json, COMPLETE}`. The learner writes `megatron/`; a
checkpoint without COMPLETE does not exist.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megarl import run_paths
from megarl.config.schema import Config
from megarl.errors import MALFORMED, CheckpointError
from megarl.learner.client import LearnerClient

COMPLETE = "COMPLETE"
STATE = "state.json"
PARTIAL = ".partial"


@dataclass(frozen=True, slots=True)
class SavedRun:
    """A whole checkpoint: policy version, the state of the prompt source, where the weights are."""

    version: int
    prompts: Mapping[str, Any]
    path: Path

    @property
    def weights(self) -> Path:
        """The learner's part."""
        return self.path / "megatron"


class Checkpoints:
    """Saves versions and keeps the newest `checkpoint.keep` of them."""

    def __init__(self, config: Config, run_dir: Path, learner: LearnerClient) -> None:
        self._config = config
        self._folder = run_dir / run_paths.CHECKPOINTS
        self._learner = learner

    def is_due(self, version: int) -> bool:
        """Whether `version`, just made, is to be saved."""
        every = self._config.checkpoint.every
        return version == self._config.loop.versions or (every > 0 and version % every == 0)

    async def save(self, version: int, prompts: Mapping[str, Any]) -> None:
        """Save everything that continuing from `version` needs; whole or not at all."""
        final = self._folder / f"v{version:06d}"
        partial = final.with_name(final.name + PARTIAL)
        await asyncio.to_thread(_remove, partial)
        partial.mkdir(parents=True)
        await self._learner.save(str(partial / "megatron"), version)
        state = {"version": version, "prompts": dict(prompts)}
        _write_through(partial / STATE, json.dumps(state, indent=1) + "\n")
        _write_through(partial / COMPLETE, "")
        await asyncio.to_thread(_remove, final)
        partial.rename(final)
        for old in whole_checkpoints(self._folder)[: -self._config.checkpoint.keep]:
            await asyncio.to_thread(_remove, old)


def _write_through(path: Path, text: str) -> None:
    """Write a file, and return when the disk has it: a node that dies must not leave it empty."""
    with path.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def _remove(folder: Path) -> None:
    """Remove a checkpoint, COMPLETE first: what is left of a removal must not count as whole."""
    (folder / COMPLETE).unlink(missing_ok=True)
    if folder.exists():
        shutil.rmtree(folder)


def whole_checkpoints(folder: Path) -> list[Path]:
    """Folders of the complete checkpoints, oldest first; a copy under another name is none."""
    found = [path.parent for path in folder.glob(f"v*/{COMPLETE}")]
    return sorted((path for path in found if run_paths.is_version(path)), key=run_paths.version_of)


def newest(run_dir: Path) -> SavedRun | None:
    """The checkpoint that a run continues from, or None. CheckpointError where it is broken."""
    found = whole_checkpoints(run_dir / run_paths.CHECKPOINTS)
    if not found:
        return None
    path = found[-1] / STATE
    try:
        state = json.loads(path.read_text())
        if state["version"] != run_paths.version_of(found[-1]):
            raise ValueError(f"it is of version {state['version']}")
        return SavedRun(run_paths.version_of(found[-1]), dict(state["prompts"]), found[-1])
    except (OSError, *MALFORMED) as error:
        raise CheckpointError(
            f"{path}: cannot be read ({error!r}); remove that folder to continue from an older one"
        ) from error
