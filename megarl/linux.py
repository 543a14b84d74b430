"""Linux's ties between processes: death with the parent, and the adoption of orphans.

Owns the two prctl calls. Imports nothing of megarl and no engine, so that the ties hold from the
first line of a process.
"""

from __future__ import annotations

import ctypes
import functools
import os

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


def _prctl(option: int, value: int) -> None:
    if libc().prctl(option, int(value), 0, 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"prctl({option}, {value}): {os.strerror(number)}")
