"""Files written by several processes at once.

Owns the processes and what they report. Knows nothing of what they write.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection, wait
from typing import Any

from megarl.convert.progress import Progress
from megarl.errors import CheckpointError, MegarlError, in_words
from megarl.linux import libc, set_death_signal

Write = Callable[[int, Callable[[int], None]], Any]
"""Writes the file of a number, telling of the bytes that it wrote; what it returns is plain."""


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
