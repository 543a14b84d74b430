"""Saving while training goes on: one save at a time, its numbers copied, its files written beside.

Owns when the parts of a checkpoint, the policy's and a critic's, are written, and what becomes of
an error that nobody waits for. What is in them is `checkpoint`'s. Import it after
`megatron_cpu.install()`.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Sequence
from pathlib import Path

import torch.distributed as dist

from megarl.errors import CheckpointError, in_words
from megarl.learner import checkpoint
from megarl.learner.checkpoint import Training, Writing

log = logging.getLogger(__name__)

NICENESS = 10  # of the thread that writes: training has the processor first
CRITIC = "-critic"  # behind the name of the policy's folder


class Saving:
    """The saves of one rank, of a model and, beside it, of critics. Methods are collective."""

    def __init__(self, model: Training, *critics: Training) -> None:
        self._model, self._critics = model, critics
        self._under_way: _Background | None = None
        self._checked = ""

    def begin(self, path: str, version: int) -> None:
        """Copy all that is saved as policy `version`, and begin to write it to the folder `path`.

        The state may change when it returns. Raises CheckpointError, with nothing left of it,
        where a save is under way or the folder cannot be made.
        """
        if self._under_way is not None:
            raise CheckpointError(f"{path}: another save is under way; end that one first")
        parts: list[Writing] = []
        try:
            for training, folder in self._parts(path):
                parts.append(checkpoint.begin(training, folder, version))
        except CheckpointError:
            _abandon(parts)
            raise
        self._under_way = _Background(parts)

    def end(self, wait: bool) -> bool:
        """Whether no save is under way any more; with `wait`, only then does it return.

        Raises CheckpointError, on every rank and once, where the save has failed on one; nothing
        is left of it then.
        """
        save = self._under_way
        if save is None:
            return True
        states: list[str] = [""] * dist.get_world_size()
        dist.all_gather_object(states, save.state(wait))
        if WRITING in states:
            return False
        self._under_way = None
        failed = [f"learner rank {rank}: {text}" for rank, text in enumerate(states) if text]
        try:
            if failed:
                more = f" (and on {len(failed) - 1} other ranks)" if len(failed) > 1 else ""
                raise CheckpointError(f"{failed[0]}{more}")
            for part in save.parts:
                part.finish()
        except CheckpointError:
            _abandon(save.parts)
            raise
        return True

    def damage(self, path: str) -> str:
        """How files in `path` are not as they were saved; "" where they are."""
        found = [text for _, folder in self._parts(path) if (text := checkpoint.damage(folder))]
        self._checked = "" if found else path
        return found[0] if found else ""

    def load(self, path: str) -> int:
        """Continue from `path`; returns its policy version. See `checkpoint.load`."""
        version, is_checked = 0, self._checked == path
        self._checked = ""
        for training, folder in self._parts(path):
            version = checkpoint.load(training, folder, is_checked)
        return version

    def _parts(self, path: str) -> list[tuple[Training, Path]]:
        """What a checkpoint is of, and the folder of each part."""
        critics = [(each, Path(f"{path}{CRITIC}")) for each in self._critics]
        return [(self._model, Path(path)), *critics]


WRITING = "writing"


class _Background:
    """The thread that writes this rank's files of a checkpoint's parts."""

    def __init__(self, parts: Sequence[Writing]) -> None:
        self.parts = parts
        self._error = ""
        self._thread = threading.Thread(target=self._write, name="checkpoint", daemon=True)
        self._thread.start()

    def state(self, wait: bool) -> str:
        """WRITING, or the error that it ended with, "" for none."""
        self._thread.join(None if wait else 0)
        return WRITING if self._thread.is_alive() else self._error

    def _write(self) -> None:
        try:
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
            for part in self.parts:
                part.write()
        except Exception as error:
            self._error = in_words(error)
            log.exception("checkpoint not written path=%s", self.parts[0].path)


def _abandon(parts: Sequence[Writing]) -> None:
    """Have nothing left of a save that failed, once no rank writes to it any more."""
    dist.barrier()
    if dist.get_rank() == 0:
        for part in parts:
            part.abandon()
