"""The scoring process: scores one list of responses after another, and says which it is at.

Owns what runs beside the controller. Knows nothing of groups or attempts; `pool.py`, at the other
end of the pipe, ends a process that takes too long.

Protocol. The process first sends "" when its scorer is ready, or the text of the error. Then it
receives lists of `Item` and answers each with lists of `Outcome`, in any split, until all are
answered; None ends it. Quick outcomes are sent together, so that a group costs one message each
way.
"""

from __future__ import annotations

import asyncio
import ctypes
import inspect
import os
import signal
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import NamedTuple

from megarl.errors import RewardError
from megarl.linux import set_death_signal
from megarl.reward.exact import score_exact
from megarl.reward.function import UserFunction, checked_value, is_async, load_function
from megarl.reward.gym import make_gym_scorer
from megarl.reward.math import score_number
from megarl.types import Reward, RewardState

FLUSH_S = 0.01  # outcomes are kept back no longer than this before the next score is begun
IDLE = -1  # of `current`, while no single response is being scored
MAX_REASON = 300


@dataclass(frozen=True, slots=True)
class ScorerSpec:
    """What a scoring process is made from. `deadline_s` is of one score."""

    kind: str
    deadline_s: float
    function: str = ""
    task: str = ""
    task_args: Mapping[str, object] = field(default_factory=dict)


class Item(NamedTuple):  # tuples: pickled ten times faster than slotted dataclasses
    """One response to score. `number` is the sender's name for it."""

    number: int
    response: str
    answer: str
    facts: Mapping[str, object]


class Outcome(NamedTuple):
    """What became of the item with this number."""

    number: int
    state: RewardState
    value: float | None
    reason: str

    @property
    def reward(self) -> Reward:
        """As the rest of the program knows it."""
        return Reward(self.state, self.value, reason=self.reason)


Send = Callable[[list[Outcome]], None]


def make_scorer(spec: ScorerSpec) -> UserFunction:
    """The score function of a kind. Raises RewardError where it cannot be made."""
    if spec.kind == "exact":
        return score_exact
    if spec.kind == "number":
        return score_number
    if spec.kind == "reasoning_gym":
        return make_gym_scorer(spec.task, spec.task_args)
    return load_function(spec.function)


def serve(connection: Connection, current: ctypes.c_int, spec: ScorerSpec) -> None:
    """The life of a scoring process. `current` is shared: the number being scored, or IDLE."""
    _leave_with_parent()
    try:
        scorer = make_scorer(spec)
    except RewardError as error:
        connection.send(str(error))
        return
    connection.send("")
    together = is_async(scorer)
    with asyncio.Runner() as runner:
        while True:
            try:
                items: list[Item] | None = connection.recv()
            except EOFError:  # the controller is gone
                return
            if items is None:
                return
            if together:
                runner.run(_score_together(scorer, items, connection.send, spec.deadline_s))
            else:
                _score_in_turn(scorer, items, connection.send, current)


def _score_in_turn(
    scorer: UserFunction, items: Sequence[Item], send: Send, current: ctypes.c_int
) -> None:
    """One after the other; `current` names each before it is begun."""
    unsent: list[Outcome] = []
    flushed = time.monotonic()
    for item in items:
        current.value = item.number
        try:
            returned = scorer(item.response, item.answer, dict(item.facts))
            if inspect.isawaitable(returned):
                raise TypeError("returned an awaitable; make it an async function")
            outcome = Outcome(item.number, "value", checked_value(returned), "")
        except Exception as error:  # noqa: BLE001  (a user's function may raise anything)
            outcome = Outcome(item.number, "failed", None, _reason(error))
        unsent.append(outcome)
        if time.monotonic() - flushed > FLUSH_S:
            send(unsent)
            unsent, flushed = [], time.monotonic()
    current.value = IDLE
    if unsent:
        send(unsent)


async def _score_together(
    scorer: UserFunction, items: Sequence[Item], send: Send, deadline_s: float
) -> None:
    """All at once, for an async function; each outcome is sent as it comes."""

    async def score(item: Item) -> None:
        limit = asyncio.timeout(deadline_s)
        try:
            async with limit:
                returned = scorer(item.response, item.answer, dict(item.facts))
                assert inspect.isawaitable(returned)
                outcome = Outcome(item.number, "value", checked_value(await returned), "")
        except Exception as error:  # noqa: BLE001  (a user's function may raise anything)
            if limit.expired():
                outcome = Outcome(item.number, "timeout", None, late(deadline_s))
            else:
                outcome = Outcome(item.number, "failed", None, _reason(error))
        send([outcome])

    await asyncio.gather(*(score(item) for item in items))


def late(deadline_s: float) -> str:
    """The reason of a timeout."""
    return f"no score within deadline.reward_s = {deadline_s:g} s"


def _reason(error: Exception) -> str:
    """The error, and the last line of code that it passed, but for our refusal of a value."""
    text = f"{type(error).__name__}: {error}"[:MAX_REASON]
    frames = traceback.extract_tb(error.__traceback__)
    if not frames or frames[-1].filename == checked_value.__code__.co_filename:
        return text
    return f"{text} ({frames[-1].filename}:{frames[-1].lineno})"


def _leave_with_parent() -> None:
    """Own session, so that Ctrl-C reaches the controller alone; killed when the controller dies."""
    os.setsid()
    set_death_signal(signal.SIGKILL)
