"""Who asks a run to end before its last version: SIGUSR1, and the clock before a time limit.

Owns when that is. What an early end is, is `controller/ending.py`'s.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import time

from megarl.config.schema import Config
from megarl.controller.ending import Ending
from megarl.errors import ConfigError
from megarl.launch.slurm import end_time_s, time_limit_s

log = logging.getLogger(__name__)


def end_at_usr1(ending: Ending) -> None:
    """From now on SIGUSR1 asks for the end, also while no loop runs; it would kill the run."""

    def received(*_: object) -> None:
        try:
            asyncio.get_running_loop().call_soon_threadsafe(ending.ask, "SIGUSR1")
        except RuntimeError:  # none runs
            ending.ask("SIGUSR1")

    signal.signal(signal.SIGUSR1, received)


def check_time_limit(config: Config) -> None:
    """Raise ConfigError where the Slurm job is too short for anything but its end.

    It would be requeued, and end, again and again.
    """
    before_s, limit_s = config.checkpoint.before_end_s, time_limit_s(os.environ)
    if limit_s is not None and limit_s <= before_s:
        raise ConfigError(
            f"the time limit of the Slurm job is {limit_s:g} s, and checkpoint.before_end_s = "
            f"{before_s:g}: the run would end as soon as it began; raise the one or lower the other"
        )


def watch_the_clock(config: Config, ending: Ending) -> None:
    """End early where the time limit comes near: the Slurm job's, or the setting's."""
    before_s, limit_s = config.checkpoint.before_end_s, config.launch.time_limit_s
    ends = [time.time() + limit_s] if limit_s else []
    if before_s and (end_s := end_time_s(os.environ)) is not None:
        ends.append(end_s)
    if not before_s or not ends:
        return
    left_s = min(ends) - time.time()
    log.info("time limit left_s=%.0f before_end_s=%.0f", left_s, before_s)
    reason = f"the time limit is {before_s:g} s away (checkpoint.before_end_s)"
    if left_s <= before_s:  # no engine is started for nothing
        ending.ask(reason)
    else:
        asyncio.get_running_loop().call_later(left_s - before_s, ending.ask, reason)
