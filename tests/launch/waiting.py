"""Small helpers of these tests: wait for a condition, look at processes."""

import time
from collections.abc import Callable
from pathlib import Path

from megarl.launch.process import read_process


def until(condition: Callable[[], object], limit_s: float = 10.0) -> None:
    """Wait until `condition` holds; fails after `limit_s` seconds."""
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline, f"still not so after {limit_s} s"
        time.sleep(0.02)


def are_gone(pids: list[int]) -> bool:
    """Whether every one has ended; a zombie has."""
    return all(read_process(pid) is None for pid in pids)


def read_pids(path: Path, count: int) -> list[int]:
    """The process ids that `count` processes append to `path`, one a line, once all are there."""
    until(lambda: path.exists() and len(path.read_text().split()) >= count)
    return [int(word) for word in path.read_text().split()]
