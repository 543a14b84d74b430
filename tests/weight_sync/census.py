"""What processes hold open and hold in memory, as the kernel tells it of them from outside."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import psutil

from megarl.launch.cleanup import used_by

SETTLE_S = 2.0  # for what is ending to have ended


@dataclass(frozen=True)
class Held:
    """Of one process. `kib` is its memory without what it maps of files on a disk.

    The kernel drops and rereads pages of those as it likes.
    """

    files: int
    threads: int
    shared: tuple[str, ...]
    kib: int


def descendants(pid: int) -> list[psutil.Process]:
    """The process and all below it."""
    main = psutil.Process(pid)
    return [main, *main.children(recursive=True)]


def take(processes: Iterable[psutil.Process]) -> dict[str, Held]:
    """What each process holds, once it is the least of SETTLE_S: by its pid and its role."""
    found: dict[str, Held] = {}
    until = time.monotonic() + SETTLE_S
    family = {f"{process.pid} {role(process)}": process.pid for process in processes}
    while True:
        for name, pid in family.items():
            now = _of(pid)
            before = found.get(name, now)
            found[name] = Held(
                min(now.files, before.files),
                min(now.threads, before.threads),
                min(now.shared, before.shared, key=len),
                min(now.kib, before.kib),
            )
        if time.monotonic() > until:
            return found
        time.sleep(0.2)


def role(process: psutil.Process) -> str:
    """A word or two for what it does."""
    words = process.cmdline()
    named = [word for word in words if word.startswith(("megarl.", "tests.", "sglang::"))]
    return named[0].rsplit(".", 1)[-1] if named else " ".join(words)[:40]


def kib(pid: int) -> int:
    """`Held.kib` of a process now."""
    status = Path(f"/proc/{pid}/status").read_text()
    return sum(map(int, re.findall(r"^Rss(?:Anon|Shmem):\s+(\d+) kB", status, re.MULTILINE)))


def _of(pid: int) -> Held:
    return Held(
        len(os.listdir(f"/proc/{pid}/fd")),
        len(os.listdir(f"/proc/{pid}/task")),
        tuple(sorted(file.path for file in used_by([pid]))),
        kib(pid),
    )
