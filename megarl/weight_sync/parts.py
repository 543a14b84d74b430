"""Threads that share a list of independent parts of one piece of work.

For work on memory that releases Python's lock: two cores copy and read it faster than one. Owns the
threads and their number. Knows nothing of the work.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence

MOST = 4  # threads: a few cores use up what memory gives


def num_threads() -> int:
    """How many threads this process has cores for, up to MOST."""
    return min(MOST, len(os.sched_getaffinity(0)))


def run(parts: Sequence[Callable[[], object]], threads: int) -> None:
    """Carry out all parts, in no order, and return when the last has ended.

    Raises the first error; parts that no thread had begun by then are left out.
    """
    left = iter(list(parts))  # each part goes to one thread: a step of a list's iterator is atomic
    errors: list[Exception] = []

    def work() -> None:
        try:
            for part in left:
                if errors:
                    return
                part()
        except Exception as error:  # noqa: BLE001 - raised in the caller's thread
            errors.append(error)

    helpers = [
        threading.Thread(target=work, name="weight-sync-part", daemon=True)
        for _ in range(min(threads, len(parts)) - 1)
    ]
    for helper in helpers:
        helper.start()
    work()
    for helper in helpers:
        helper.join()
    if errors:
        raise errors[0]
