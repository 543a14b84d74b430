"""A paused SGLang server waits for the next request, and does not look for it in a loop.

Owns that wait. An idle scheduler started with `--sleep-on-idle` sleeps until somebody speaks to it;
a paused one returns to the top of its loop before it comes there, and takes a whole core from the
learner for as long as the pause lasts. For CPU servers only: on a GPU machine there is a core for
each.

For: sglang 0.5.23 (https://github.com/sgl-project/sglang), the event loops in
srt/managers/scheduler.py. Ends when they sleep while they are paused.
"""

from __future__ import annotations

import functools
from typing import Any

from megarl.compat.after_import import after_import

MODULE = "sglang.srt.managers.scheduler"


def install() -> None:
    """Have schedulers sleep while they are paused, once SGLang's is imported."""
    after_import(MODULE, _wrap)


def _wrap(module: Any) -> None:
    scheduler = module.Scheduler
    record = scheduler._record_scheduler_state_for_paused_engine

    @functools.wraps(record)
    def record_and_sleep(self: Any) -> None:
        record(self)
        self.maybe_sleep_on_idle()  # nothing without --sleep-on-idle; else until a request comes

    scheduler._record_scheduler_state_for_paused_engine = record_and_sleep
