"""How a rank is tied to its launcher, and how it leaves: no rank outlives the launcher.

Imports no engine, so that the tie holds from the first line of a process.
"""

from __future__ import annotations

import os
import signal
import sys
from typing import NoReturn

from megarl.linux import set_death_signal

PARENT_PID = "MEGARL_PARENT_PID"  # the launcher's pid, set for its ranks


def die_with_parent(death_signal: signal.Signals) -> None:
    """Have the kernel send `death_signal` to this process when its parent ends.

    Ends this process at once where the parent, if PARENT_PID names it, is gone already.
    """
    set_death_signal(death_signal)
    expected = os.environ.get(PARENT_PID)
    if expected and os.getppid() != int(expected):
        os._exit(1)


def leave(status: int) -> NoReturn:
    """End this process now, with its output written.

    Tearing down an interpreter with torch in it takes seconds, and after a failure destructors of
    process groups would wait for ranks that are gone.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
