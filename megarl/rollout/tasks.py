"""Work side by side: all of it or none, and nothing left running. Knows nothing of what it is."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable, Sequence
from typing import Any, TypeVar

Result = TypeVar("Result")


async def all_or_none(work: Iterable[Coroutine[Any, Any, Result]]) -> list[Result]:
    """The results in order; where one fails, the others have been cancelled and have ended."""
    tasks = [asyncio.create_task(one) for one in work]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        await cancelled(tasks)


async def cancelled(tasks: Sequence[asyncio.Task[Any]]) -> None:
    """Cancel the tasks and wait until they have ended."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
