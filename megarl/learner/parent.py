"""Linux ties between a process and its parent: no rank outlives its launcher, no child its rank.

Imports nothing of megarl and no engine, so that the ties hold from the first line of a process.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from typing import NoReturn

PARENT_PID = "MEGARL_PARENT_PID"  # the launcher's pid, set for its ranks

# From <linux/prctl.h>
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


def die_with_parent(death_signal: signal.Signals) -> None:
    """Have the kernel send `death_signal` to this process when its parent ends.

    Ends this process at once where the parent, if PARENT_PID names it, is gone already.
    """
    _prctl(_PR_SET_PDEATHSIG, death_signal)
    expected = os.environ.get(PARENT_PID)
    if expected and os.getppid() != int(expected):
        os._exit(1)


def adopt_orphans() -> None:
    """Make this process the parent of its descendants' orphans, so that it can end them."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def leave(status: int) -> NoReturn:
    """End this process now, with its output written.

    Tearing down an interpreter with torch in it takes seconds, and after a failure destructors of
    process groups would wait for ranks that are gone.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _prctl(option: int, value: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, int(value), 0, 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"prctl({option}, {value}): {os.strerror(number)}")
