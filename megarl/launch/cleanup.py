"""What processes leave behind in /dev/shm and in the temp folder, and its removal.

Owns the rule of what may be removed: an entry of /dev/shm that appeared after we started, was seen
in a process of our own tree, and is used by no living process; or one, there or in the temp folder,
that carries the id of our run in its name. Entries of other jobs, and files that users keep there,
are never touched.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from megarl.launch.process import processes
from megarl.launch.tempdir import temp_folders

SHARED_MEMORY = Path("/dev/shm")
RUN_PREFIX = "megarl_"
_RUN_ID = re.compile(r"[A-Za-z0-9-]+")


@dataclass(frozen=True, slots=True)
class SharedFile:
    """A file below /dev/shm, known by its inode as well: names are used again."""

    path: str
    inode: int


def present() -> frozenset[SharedFile]:
    """Every file below /dev/shm now."""
    found = set()
    for folder, _, names in os.walk(SHARED_MEMORY):
        for name in names:
            path = os.path.join(folder, name)
            with contextlib.suppress(OSError):
                found.add(SharedFile(path, os.lstat(path).st_ino))
    return frozenset(found)


def used_by(pids: Iterable[int]) -> set[SharedFile]:
    """The files below /dev/shm that these processes map or hold open, where we may look.

    Inodes decide: glibc's sem_open maps a file under a name that it then replaces.
    """
    inodes: set[int] = set()
    for pid in pids:
        with contextlib.suppress(OSError):
            inodes |= _mapped(pid)
        with contextlib.suppress(OSError):
            inodes |= _opened(pid)
    return {file for file in present() if file.inode in inodes}


def _mapped(pid: int) -> set[int]:
    needle = f" {SHARED_MEMORY}/"
    with open(f"/proc/{pid}/maps", errors="replace") as maps:
        # man 5 proc: address, permissions, offset, device, inode, path
        return {int(line.split(maxsplit=5)[4]) for line in maps if needle in line}


def _opened(pid: int) -> set[int]:
    found = set()
    for descriptor in os.listdir(f"/proc/{pid}/fd"):
        link = f"/proc/{pid}/fd/{descriptor}"
        with contextlib.suppress(OSError):
            if os.readlink(link).startswith(f"{SHARED_MEMORY}/"):
                found.add(os.stat(link).st_ino)
    return found


def sweep(files: Iterable[SharedFile]) -> list[str]:
    """Remove those of `files` that no living process uses; returns the paths removed.

    Processes of other users cannot be looked into; they cannot open our files either.
    """
    candidates = set(files) & present()
    if not candidates:
        return []
    return sorted(file.path for file in candidates - used_by(processes()) if _remove(file))


def sweep_run(run_id: str) -> list[str]:
    """Remove megarl_<run_id>_* of /dev/shm and of the temp folder, in use or not; returns their
    paths.

    Only for a run whose processes have ended, or are ending.
    """
    if not _RUN_ID.fullmatch(run_id):
        return []
    prefix = run_prefix(run_id)
    start = f"{SHARED_MEMORY}/{prefix}"
    removed = sorted(f.path for f in present() if f.path.startswith(start) and _remove(f))
    for folder in temp_folders(prefix):
        shutil.rmtree(folder, ignore_errors=True)
        removed.append(str(folder))
    return removed


def run_prefix(run_id: str) -> str:
    """How names begin of what belongs to a start of a run; without an id, to any process of ours.

    >>> run_prefix("1130-004512-9f31c2")
    'megarl_1130-004512-9f31c2_'
    """
    return f"{RUN_PREFIX}{run_id}_" if _RUN_ID.fullmatch(run_id) else RUN_PREFIX


def is_run_file(file: SharedFile) -> bool:
    """Whether it belongs to a run as a whole, not to one process of it."""
    return os.path.basename(file.path).startswith(RUN_PREFIX)


def _remove(file: SharedFile) -> bool:
    try:
        if os.lstat(file.path).st_ino != file.inode:
            return False
        os.unlink(file.path)
    except OSError:
        return False
    return True
