"""Stage c: scores groups, retries what failed or was late, and says when nothing can be scored.

Owns attempts and the rule that a reward is a value, a failure or a timeout, never a silent 0.0.
Knows nothing of processes (`pool.py`), of advantages, or of the batch.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from dataclasses import replace
from types import TracebackType
from typing import Self

from megarl.config.schema import Config
from megarl.errors import ConfigError, RewardError
from megarl.reward.pool import ScoringPool
from megarl.reward.worker import ScorerSpec
from megarl.types import Group, Reward

log = logging.getLogger(__name__)


class Scorer:
    """Scores responses in worker processes. Use as `async with Scorer(config) as scorer`."""

    def __init__(self, config: Config) -> None:
        self._kind = config.reward.kind
        self._attempts = config.reward.attempts
        self._pool = ScoringPool(
            ScorerSpec(
                kind=config.reward.kind,
                deadline_s=config.deadline.reward_s,
                function=config.reward.function,
                task=config.prompts.task,
                task_args=config.prompts.task_args,
            ),
            config.reward.workers,
        )
        self._max_lost_in_a_row = config.samples_per_step
        self._lost_in_a_row: list[Reward] = []
        self._num_lost = 0

    async def start(self) -> None:
        """Start the processes. Raises ConfigError where the scorer cannot be made."""
        try:
            await self._pool.start()
        except RewardError as error:
            raise ConfigError(str(error)) from error

    async def close(self) -> None:
        """End the processes."""
        await self._pool.close()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()

    async def score(self, group: Group) -> Group:
        """The group with every sample's reward set. Groups may be scored at one time.

        A score that fails or is late is tried `reward.attempts` times in all, then kept as failed
        or timeout. Raises RewardError when as many samples in a row as one step has were lost.
        """
        prompt = group.prompt
        tickets = [(sample.text, prompt.answer, prompt.facts) for sample in group.samples]
        first = await asyncio.gather(*(self._pool.submit(*ticket) for ticket in tickets))
        rewards = list(first)
        if any(reward.state != "value" for reward in first):
            rewards = await asyncio.gather(*map(self._retried, tickets, first))
        for reward in rewards:
            self._count(reward)
        samples = tuple(
            replace(sample, reward=reward)
            for sample, reward in zip(group.samples, rewards, strict=True)
        )
        return replace(group, samples=samples)

    async def _retried(
        self, ticket: tuple[str, str, Mapping[str, object]], reward: Reward
    ) -> Reward:
        """The reward, or that of another attempt, alone, while it is no value."""
        for _ in range(self._attempts - 1):
            if reward.state == "value":
                break
            reward = await self._pool.submit(*ticket, alone=True)
        return reward

    def _count(self, reward: Reward) -> None:
        """Tell of a lost sample, and end the run where a whole step's worth was: nothing is left.

        The 1st, 2nd, 4th, 8th, ... that is lost is told of with its reason, so that no run is
        flooded.
        """
        if reward.state == "value":
            self._lost_in_a_row.clear()
            return
        self._num_lost += 1
        if self._num_lost.bit_count() == 1:
            log.warning(
                "sample left out, its reward is lost state=%s lost_so_far=%d reason=%s",
                reward.state,
                self._num_lost,
                reward.reason,
            )
        self._lost_in_a_row.append(reward)
        if len(self._lost_in_a_row) >= self._max_lost_in_a_row:
            states = [lost.state for lost in self._lost_in_a_row]
            first = self._lost_in_a_row[0]
            raise RewardError(
                f"reward.kind = {self._kind!r}: {len(states)} samples in a row, a whole step's, "
                f"got no reward ({states.count('failed')} failed, {states.count('timeout')} timed "
                f"out); the first: {first.reason}; mend the reward, or its service, and start again"
            )
