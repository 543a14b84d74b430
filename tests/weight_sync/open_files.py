"""What a process holds open, in words that can be compared between two moments."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Sequence

import psutil


def open_files() -> list[str]:
    """Each open file of this process: its path, or for a connection both its ends."""
    ends = {found.fd: f"{found.laddr} to {found.raddr}" for found in _connections()}
    named = []
    for number in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{number}")
        except FileNotFoundError:  # of this listing itself
            continue
        named.append(ends.get(int(number), re.sub(r"\d{4,}", "N", target)))
    return sorted(named)


def more(now: Sequence[Sequence[str]], before: Sequence[Sequence[str]]) -> str:
    """What each process has open now and had not before: one line for each that has more."""
    lines = []
    for number, (mine, then) in enumerate(zip(now, before, strict=True)):
        added = Counter(mine) - Counter(then)
        if len(mine) > len(then):
            lines.append(f"process {number} has {dict(added)}, and had {dict(Counter(then))}")
    return "\n".join(lines)


def _connections() -> list[psutil._common.pconn]:
    process = psutil.Process()
    found = process.net_connections if hasattr(process, "net_connections") else process.connections
    return [one for one in found(kind="inet") if one.fd >= 0]
