"""What is going on when a run is asked to end: dropped, whether it has just ended or not."""

import asyncio

from megarl.controller.ending import Ending


async def test_work_that_ends_as_the_run_is_asked_to_counts_as_dropped() -> None:
    ending, may_end = Ending(), asyncio.Event()

    async def work() -> str:
        await may_end.wait()
        return "done"

    waiting = asyncio.create_task(ending.unless(work()))
    await asyncio.sleep(0)
    may_end.set()
    ending.ask("SIGUSR1")
    assert await waiting is None


async def test_first_reason_stays_and_work_is_cancelled() -> None:
    ending, ends = Ending(), list[str]()

    async def work() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ends.append("cancelled")

    waiting = asyncio.create_task(ending.unless(work()))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    ending.ask("the time limit")
    ending.ask("SIGUSR1")
    assert await waiting is None and ends == ["cancelled"]
    assert ending.reason == "the time limit"


async def test_work_of_a_run_that_goes_on_is_done() -> None:
    async def work() -> str:
        return "done"

    assert await Ending().unless(work()) == "done"
