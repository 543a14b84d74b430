"""The loop's own part: the order of what a pass does, and which error of several a user reads.

The components are stand-ins here; the real ones run together in tests/whole.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any, cast

import pytest

from megarl.config.schema import Config
from megarl.controller.ending import Ending
from megarl.controller.loop import Loop
from megarl.errors import MegarlError, RewardError, RolloutError
from megarl.types import Group, Prompt


class Rollout:
    """Yields a group for each prompt; fails after `good` of them where told to."""

    def __init__(self, good: int = 99) -> None:
        self.good = good

    async def collect(self, prompts: Sequence[Prompt], version: int) -> AsyncIterator[Group]:
        for index, prompt in enumerate(prompts):
            if index == self.good:
                raise RolloutError("server-0 failed for good")
            yield Group(f"g{index}", prompt, ())


class Reward:
    """Scores after a moment; fails where told to."""

    def __init__(self, error: MegarlError | None = None) -> None:
        self.error = error
        self.running = 0
        self.most_running = 0

    async def score(self, group: Group) -> Group:
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        await asyncio.sleep(0.01)
        self.running -= 1
        if self.error:
            raise self.error
        return group


class Buffer:
    """Remembers what was added."""

    def __init__(self) -> None:
        self.added: list[tuple[str, int]] = []

    def add(self, group: Group, version: int) -> None:
        self.added.append((group.group_id, version))


class Samples:
    """Remembers what was written."""

    def __init__(self) -> None:
        self.written: list[tuple[str, int]] = []

    def write(self, group: Group, version: int) -> None:
        self.written.append((group.group_id, version))


def collect(rollout: Rollout, reward: Reward, buffer: Buffer) -> list[Group]:
    parts: dict[str, Any] = dict.fromkeys(Loop.__slots__)
    config = Config.model_validate({"actor": {"model": "m"}})
    samples = Samples()
    parts.update(config=config, rollout=rollout, reward=reward, buffer=buffer, samples=samples)
    prompts = [Prompt(f"p{index}", (1,), "", "") for index in range(4)]
    return asyncio.run(cast(Any, Loop(**parts))._collect(prompts, 7))


class Saves:
    """Checkpoints and the turn of a run that ends early: what is saved, with which cursor."""

    def __init__(self, saved: int = -1) -> None:
        self.saved, self.made = saved, list[tuple[int, object]]()

    async def settle(self) -> None:
        self.made.append((self.saved, "settled"))

    def is_saved(self, version: int) -> bool:
        return version == self.saved

    async def save(self, version: int, prompts: object, values: object, must: bool) -> None:
        assert must and values == {"eval/accuracy": 0.5}
        self.made.append((version, prompts))

    @asynccontextmanager
    async def visit(self, stage: str) -> AsyncIterator[None]:
        assert stage == "saving"
        yield


@pytest.mark.parametrize(
    ("saved", "start", "expected"),
    [
        (4, 2, [(4, "settled"), (6, {"cursor": "before the draw"})]),
        (6, 2, [(6, "settled")]),  # saved, or about to be
        (2, 6, [(2, "settled")]),  # what this start began with
    ],
)
async def test_run_that_is_to_end_drops_what_is_generated_and_saves_what_is_not_saved(
    saved: int, start: int, expected: list[tuple[int, object]]
) -> None:
    saves, ending = Saves(saved), Ending()
    dropped = asyncio.Event()

    class Endless(Rollout):
        async def collect(self, prompts: Sequence[Prompt], version: int) -> AsyncIterator[Group]:
            ending.ask("SIGUSR1")
            try:
                await asyncio.Event().wait()
            finally:
                dropped.set()
            yield

    class Prompts:
        state, draw = (lambda self: {"cursor": "before the draw"}), (lambda self, number: [])

    parts: dict[str, Any] = dict.fromkeys(Loop.__slots__)
    config = Config.model_validate({"actor": {"model": "m"}})
    parts.update(config=config, rollout=Endless(), reward=Reward(), prompts=Prompts())
    parts.update(ending=ending, checkpoints=saves, turn=saves)
    loop = cast(Any, Loop(**parts))
    # from version 6 on, as if those before had been made since `start`
    step = loop._collect([], 6)
    assert await ending.unless(step) is None and dropped.is_set()
    await loop._end_early(6, start, {"cursor": "before the draw"}, {"eval/accuracy": 0.5})
    assert saves.made == expected


def test_groups_are_scored_side_by_side_and_each_is_added_once_at_its_version() -> None:
    reward, buffer = Reward(), Buffer()
    groups = collect(Rollout(), reward, buffer)
    assert sorted(group.group_id for group in groups) == ["g0", "g1", "g2", "g3"]
    assert sorted(buffer.added) == [(f"g{index}", 7) for index in range(4)]
    assert reward.most_running > 1


def test_error_of_a_reward_reaches_the_user_as_itself() -> None:
    with pytest.raises(RewardError, match="no such function"):
        collect(Rollout(), Reward(RewardError("no such function")), Buffer())


def test_error_of_the_rollout_reaches_the_user_as_itself() -> None:
    with pytest.raises(RolloutError, match="failed for good"):
        collect(Rollout(good=2), Reward(), Buffer())
