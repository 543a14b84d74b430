"""The end of a run before its last version: asked for by a signal or by the clock.

Owns what "end soon" means to the loop: drop what is being generated, and go on with nothing else.
Knows nothing of who asks, nor of checkpoints.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any, TypeVar

log = logging.getLogger(__name__)

Result = TypeVar("Result")


class Ending:
    """Whether the run is to end. `reason` says why; it is empty while nobody has asked."""

    def __init__(self) -> None:
        self.reason = ""
        self._asked = asyncio.Event()

    def ask(self, reason: str) -> None:
        """End the run as soon as nothing is lost by it but what is being generated."""
        if not self.reason:
            log.warning("ending the run early reason=%s", reason)
            self.reason = reason
            self._asked.set()

    async def unless(self, work: Coroutine[Any, Any, Result]) -> Result | None:
        """The result of `work`; None, with the work cancelled, where the run is to end first."""
        task, asked = asyncio.ensure_future(work), asyncio.ensure_future(self._asked.wait())
        try:
            await asyncio.wait({task, asked}, return_when=asyncio.FIRST_COMPLETED)
            return await task if task.done() and not self.reason else None
        finally:
            task.cancel()
            asked.cancel()
            await asyncio.gather(task, asked, return_exceptions=True)
