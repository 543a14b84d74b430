"""Linux's ties between processes: death with the parent, adoption of orphans; and their memory.

Owns the two prctl calls, and what /proc says of a tree of processes. Imports nothing of megarl and
no engine, so that the ties hold from the first line of a process.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
from collections.abc import Iterable
from pathlib import Path

# From <linux/prctl.h>
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


def set_death_signal(signum: int) -> None:
    """Have the kernel send `signum` to this process when its parent ends.

    It holds for this process, not for its children, and follows the thread that started it. Where
    the parent may have ended already, compare `os.getppid()` afterwards.
    """
    _prctl(_PR_SET_PDEATHSIG, signum)


def adopt_orphans() -> None:
    """Make this process the new parent of any descendant whose own parent ends."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


@functools.cache
def libc() -> ctypes.CDLL:
    """The C library; load it before a fork whose child calls the others before exec."""
    return ctypes.CDLL(None, use_errno=True)


def memory_bytes() -> tuple[int, int]:
    """Resident and peak resident bytes of this process.

    >>> resident, peak = memory_bytes()
    >>> 1 << 20 < resident <= peak
    True
    """
    values = {}
    for line in Path("/proc/self/status").read_text().splitlines():
        name, _, rest = line.partition(":")
        if name in ("VmRSS", "VmHWM"):
            values[name] = int(rest.split()[0]) * 1024
    return values.get("VmRSS", 0), values.get("VmHWM", 0)


def available_bytes() -> int:
    """Memory of this machine that programs can still take; 0 where it is not told."""
    for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return 0


def process_ids() -> list[int]:
    """Every process of this node, also those that have ended but were not waited for yet."""
    return [int(entry) for entry in os.listdir("/proc") if entry.isdigit()]


def process_fields(pid: int) -> list[str] | None:
    """`/proc/PID/stat` from field 3 (the state) on, or None where there is no such process.

    man 5 proc: 3 state, 4 parent, 20 threads, 22 start, 24 resident pages; 2, the name, may hold
    anything.
    """
    try:
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return None
    return text.rpartition(")")[2].split()


def restart_peak() -> None:
    """Have the peak of `memory_bytes` begin anew, at what is resident now.

    Where the kernel lacks it (CONFIG_PROC_PAGE_MONITOR) the peak stays that of the whole life.

    >>> block = bytearray(8 << 20); del block
    >>> restart_peak()
    >>> resident, peak = memory_bytes()
    >>> peak - resident < 4 << 20
    True
    """
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")  # man 5 proc_pid_clear_refs, since 4.0


def tree_rss_bytes(pids: Iterable[int]) -> int:
    """Resident memory of these processes and all below them; shared pages count for each.

    >>> tree_rss_bytes([os.getpid()]) > 1 << 20, tree_rss_bytes([])
    (True, 0)
    """
    parents, sizes = {}, {}
    for pid in process_ids():
        fields = process_fields(pid)
        if fields is not None:
            parents[pid] = int(fields[1])
            sizes[pid] = int(fields[21]) * os.sysconf("SC_PAGE_SIZE")
    tree = set(pids) & sizes.keys()
    while below := {pid for pid, parent in parents.items() if parent in tree} - tree:
        tree |= below
    return sum(sizes[pid] for pid in tree)


def _prctl(option: int, value: int) -> None:
    if libc().prctl(option, int(value), 0, 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"prctl({option}, {value}): {os.strerror(number)}")
