"""Files written by several processes at once, and how far they are.

Owns the processes, what they report, and the line of progress. Knows nothing of what they write.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection, wait
from typing import Any

from megarl.errors import CheckpointError, MegarlError, in_words
from megarl.linux import libc, set_death_signal
from megarl.reshard.page import bytes_text

TOLD_EVERY_S = 0.5  # the line of progress on a terminal
LOGGED_EVERY_S = 10.0  # and elsewhere

Write = Callable[[int, Callable[[int], None]], Any]
"""Writes the file of a number, telling of the bytes that it wrote; what it returns is plain."""


class Progress:
    """The line of progress on stderr."""

    def __init__(self, total_bytes: int, done_bytes: int = 0) -> None:
        self._total, self._done, self._before = total_bytes, done_bytes, done_bytes
        self._begun = self._told = time.monotonic()
        self._is_terminal = sys.stderr.isatty()

    def add(self, num_bytes: int) -> None:
        """More bytes are written."""
        self._done += num_bytes
        now = time.monotonic()
        if now - self._told >= (TOLD_EVERY_S if self._is_terminal else LOGGED_EVERY_S):
            self._told = now
            self._tell()

    def end(self) -> None:
        """Nothing more is written."""
        if self._told > self._begun:
            self._tell()
            if self._is_terminal:
                sys.stderr.write("\n")

    def _tell(self) -> None:
        passed = max(time.monotonic() - self._begun, 1e-9)
        rate = (self._done - self._before) / passed
        left = (self._total - self._done) / rate if rate else float("inf")
        text = (
            f"{100 * self._done / max(1, self._total):5.1f} %  {bytes_text(self._done)} of "
            f"{bytes_text(self._total)}  {bytes_text(rate)}/s  {max(left, 0):.0f} s left"
        )
        begin, end = ("\r", "  ") if self._is_terminal else ("", "\n")
        sys.stderr.write(f"{begin}{text}{end}")
        sys.stderr.flush()


def write_all(
    numbers: Sequence[int], num_workers: int, write: Write, progress: Progress
) -> Iterator[tuple[int, Any]]:
    """(number, what `write` returned) of each file as it is written, by so many processes.

    Raises MegarlError where one could not be written: the others' processes are ended then.
    """
    context = multiprocessing.get_context("fork")  # the plan is large, and need not be sent
    rest = list(reversed(numbers))
    libc()
    workers: dict[Connection, Any] = {}
    parent = os.getpid()
    try:
        for _ in range(min(num_workers, len(rest))):
            ours, theirs = context.Pipe()
            process = context.Process(target=_work, args=(theirs, write, parent), daemon=True)
            process.start()
            theirs.close()
            workers[ours] = process
            ours.send(rest.pop())
        while workers:
            for pipe in wait(list(workers)):
                assert isinstance(pipe, Connection)
                kind, value = _told(pipe, workers[pipe])
                if kind == "bytes":
                    progress.add(value)
                elif kind == "failed":
                    raise CheckpointError(value)
                else:
                    if rest:
                        pipe.send(rest.pop())
                    else:
                        pipe.send(None)
                        workers.pop(pipe).join()
                    yield value
    finally:
        for process in workers.values():
            process.kill()
            process.join()
    progress.end()


def _told(pipe: Connection, process: Any) -> tuple[str, Any]:
    try:
        told: tuple[str, Any] = pipe.recv()
    except EOFError:
        process.join()
        raise CheckpointError(
            f"a worker of the conversion died (exit status {process.exitcode}); if it was killed "
            "for memory, use fewer --workers; the same command goes on where it stopped"
        ) from None
    return told


def _work(pipe: Connection, write: Write, parent: int) -> None:
    """A worker: writes the files whose numbers it is sent, until it is sent None."""
    import torch

    set_death_signal(signal.SIGKILL)
    if os.getppid() != parent:
        return
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends it
    torch.set_num_threads(1)
    while (number := pipe.recv()) is not None:
        try:
            made = write(number, lambda num_bytes: pipe.send(("bytes", num_bytes)))
        except (MegarlError, OSError) as error:
            pipe.send(("failed", in_words(error)))
            return
        pipe.send(("written", (number, made)))
