"""Scoring processes from the controller's side: start, feed, time, end and replace them.

Owns the deadline of one score: a process that is silent for longer is killed and another takes its
place. Knows nothing of groups, attempts or what is scored.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import multiprocessing
import os
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megarl.errors import RewardError
from megarl.reward.worker import FLUSH_S, IDLE, Item, Outcome, ScorerSpec, late, serve
from megarl.types import Reward, RewardState

log = logging.getLogger(__name__)

START_S = 120.0  # a scorer may import much (reasoning-gym takes seconds on a busy machine)
GRACE_S = 0.1 + FLUSH_S  # for the message to come through
MAX_ITEMS = 256  # of one message
END_S = 2.0  # an idle process ends at once; the rest is killed


class ScoringProcess:
    """One process that scores. It is replaced by itself after it hung or died."""

    def __init__(self, spec: ScorerSpec) -> None:
        self._spec = spec
        self._process: Any = None
        self._connection: Any = None
        self._current: Any = None

    async def start(self) -> None:
        """Start it and wait until its scorer is ready. Raises RewardError where it is not."""
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._current = context.RawValue("i", IDLE)
        self._process = context.Process(
            target=serve,
            args=(theirs, self._current, self._spec),
            name="megarl-scorer",
            daemon=True,
        )
        self._process.start()
        theirs.close()
        try:
            refusal = await self._message(START_S)
        except TimeoutError:
            self.kill()
            raise RewardError(
                f"a scoring process was not ready within {START_S:g} s; does importing "
                f"reward.function = {self._spec.function!r} wait for something?"
            ) from None
        except (EOFError, OSError):
            cause = self._end_cause()
            self.kill()
            raise RewardError(
                f"a scoring process ended while it started ({cause}); see its output above"
            ) from None
        except BaseException:
            self.kill()
            raise
        if refusal:
            self.kill()
            raise RewardError(str(refusal))

    async def score(self, items: Sequence[Item]) -> list[Outcome]:
        """Outcomes of at least one of the items, and of all unless the process hung or died.

        Raises RewardError where the process cannot be replaced.
        """
        if not items:
            return []
        if self._process is None:
            await self.start()
        outcomes: list[Outcome] = []
        try:
            self._connection.send(list(items))
            while len(outcomes) < len(items):
                outcomes += await self._message(self._spec.deadline_s + GRACE_S)
        except TimeoutError:
            outcomes += self._blamed(items, outcomes, "timeout", late(self._spec.deadline_s))
            self.kill()
        except (EOFError, OSError):
            reason = f"its scoring process ended ({self._end_cause()})"
            outcomes += self._blamed(items, outcomes, "failed", reason)
            self.kill()
        except BaseException:  # cancelled: answers to these items must not meet the next ones
            self.kill()
            raise
        return outcomes

    def _blamed(
        self,
        items: Sequence[Item],
        outcomes: Sequence[Outcome],
        state: RewardState,
        reason: str,
    ) -> list[Outcome]:
        """The item that was being scored is lost; where that is unknown, all unanswered are."""
        answered = {outcome.number for outcome in outcomes}
        unanswered = [item.number for item in items if item.number not in answered]
        current = int(self._current.value)
        blamed = [current] if current in unanswered else unanswered
        log.warning("scoring process replaced pid=%s reason=%r", self._process.pid, reason)
        return [Outcome(number, state, None, reason) for number in blamed]

    async def _message(self, timeout_s: float) -> Any:
        """The next message. Raises TimeoutError, and EOFError or OSError where the process died."""
        loop = asyncio.get_running_loop()
        ready: asyncio.Future[None] = loop.create_future()
        descriptor = self._connection.fileno()
        loop.add_reader(descriptor, _set_once, ready)
        try:
            async with asyncio.timeout(timeout_s):
                await ready
        finally:
            loop.remove_reader(descriptor)
        return self._connection.recv()

    def _end_cause(self) -> str:
        self._process.join(END_S)
        code = self._process.exitcode
        if code is None:
            return "still running, but its pipe is closed"
        return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit status {code}"

    def kill(self) -> None:
        """End it now, with what it started. `score` starts another."""
        if self._process is None:
            return
        try:
            os.killpg(self._process.pid, signal.SIGKILL)  # it leads a session of its own
        except ProcessLookupError:
            self._process.kill()
        self._process.join()
        self._connection.close()
        self._process = None

    async def close(self) -> None:
        """End it; politely where it is idle."""
        if self._process is None:
            return
        with contextlib.suppress(OSError):
            self._connection.send(None)
        await asyncio.to_thread(self._process.join, END_S)
        self.kill()


def _set_once(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


@dataclass(frozen=True, slots=True, eq=False)
class _Ticket:
    """A response that waits for its reward. `alone`: not in one message with others."""

    response: str
    answer: str
    facts: Mapping[str, object]
    alone: bool
    reward: asyncio.Future[Reward]


class ScoringPool:
    """Several scoring processes behind one queue.

    A process that is free takes its share of all that waits, so many quick scores cost few
    messages, and slow ones are spread.
    """

    def __init__(self, spec: ScorerSpec, num_processes: int) -> None:
        self._processes = [ScoringProcess(spec) for _ in range(num_processes)]
        self._queue: asyncio.Queue[_Ticket] = asyncio.Queue()
        self._feeders: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Start all. Raises RewardError where a scorer cannot be made, and leaves none running."""
        started = await asyncio.gather(
            *(process.start() for process in self._processes), return_exceptions=True
        )
        failures = [result for result in started if isinstance(result, BaseException)]
        if failures:
            await self.close()
            raise failures[0]
        self._feeders = [asyncio.create_task(self._feed(process)) for process in self._processes]

    def submit(
        self, response: str, answer: str, facts: Mapping[str, object], alone: bool = False
    ) -> asyncio.Future[Reward]:
        """Ask for one reward. The future raises RewardError where a process cannot be replaced."""
        assert self._feeders, "start the scorer first"
        reward: asyncio.Future[Reward] = asyncio.get_running_loop().create_future()
        self._queue.put_nowait(_Ticket(response, answer, facts, alone, reward))
        return reward

    async def close(self) -> None:
        """End all. What still waits is cancelled."""
        for feeder in self._feeders:
            feeder.cancel()
        await asyncio.gather(*self._feeders, return_exceptions=True)
        self._feeders = []
        await asyncio.gather(*(process.close() for process in self._processes))
        while not self._queue.empty():
            self._queue.get_nowait().reward.cancel()

    async def _feed(self, process: ScoringProcess) -> None:
        """Give one process its share, again and again."""
        while True:
            tickets = self._share(await self._queue.get())
            items = [
                Item(number, ticket.response, ticket.answer, ticket.facts)
                for number, ticket in enumerate(tickets)
            ]
            try:
                outcomes = await process.score(items)
            except BaseException as error:
                for ticket in tickets:
                    _settle(ticket.reward, error)
                if isinstance(error, RewardError):
                    continue
                raise
            answered = {outcome.number: outcome.reward for outcome in outcomes}
            for number, ticket in enumerate(tickets):
                if number in answered:
                    _settle(ticket.reward, answered[number])
                else:
                    self._queue.put_nowait(ticket)

    def _share(self, first: _Ticket) -> list[_Ticket]:
        """The first and as many others as are one process's part of all that waits."""
        if first.alone:
            return [first]
        size = min(MAX_ITEMS, -(-(self._queue.qsize() + 1) // len(self._processes)))
        others = [self._queue.get_nowait() for _ in range(size - 1)]
        for ticket in others:
            if ticket.alone:
                self._queue.put_nowait(ticket)
        wanted = [ticket for ticket in [first, *others] if not ticket.alone]
        return [ticket for ticket in wanted if not ticket.reward.cancelled()]


def _settle(future: asyncio.Future[Reward], result: Reward | BaseException) -> None:
    if future.done():  # nobody waits any more
        return
    if isinstance(result, asyncio.CancelledError):
        future.cancel()
    elif isinstance(result, BaseException):
        future.set_exception(result)
    else:
        future.set_result(result)
