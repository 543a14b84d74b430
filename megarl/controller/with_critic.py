"""The learner's client in a run whose critic has ranks of its own: what concerns both goes to both.

Owns the order between policy and critic: who scores first, what they give each other, and that a
checkpoint has both. To the loop it is the learner. Knows nothing of models or processes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, TypeVar

from megarl.actor.flops import SequenceFlops
from megarl.buffer.batches import BatchShape, scheduled_for
from megarl.config.layouts import critic_settings, critic_shape
from megarl.config.schema import Config
from megarl.errors import CheckpointError
from megarl.learner.client import CriticClient, LearnerClient
from megarl.types import Batch, MinibatchPlan

Mine = TypeVar("Mine")
Theirs = TypeVar("Theirs")


class LearnerWithCritic(LearnerClient):
    """The learner at `url`, and `critic` beside it.

    The critic gets every minibatch in a schedule of its own, of the same samples. Where rewards of
    tokens are the policy's to tell, it scores after the policy; else both do at once, as in every
    optimizer step.
    """

    def __init__(
        self, url: str, api_key: str, config: Config, failure_file: Path, critic: CriticClient
    ) -> None:
        super().__init__(url, api_key, config.deadline, failure_file)
        self._critic = critic
        self._needs_rewards = config.kl.where == "reward" and config.kl.coef > 0
        flops = SequenceFlops.of(critic_shape(config))
        self._schedule = BatchShape.of(critic_settings(config), flops).schedule

    async def score(self, batch: Batch) -> dict[str, float]:
        """As the learner's, and the numbers of the critic's values and advantages beside it."""
        theirs = scheduled_for(batch, self._schedule)
        if self._needs_rewards:
            scores = await super().score(batch)
            made = await self._critic.score(theirs, await self.token_rewards())
        else:
            scores, made = await _both(super().score(batch), self._critic.score(theirs, ()))
        await self.take_advantages(made.advantages)
        return {**scores, **made.metrics}

    async def step(self, minibatch: MinibatchPlan) -> dict[str, float]:
        """An optimizer step of both; the critic's `value/*` beside the policy's numbers."""
        (theirs,) = scheduled_for(Batch(0, (minibatch,), 0, 0), self._schedule).minibatches
        mine, values = await _both(super().step(minibatch), self._critic.step(theirs))
        return {**mine, **values}

    async def save(self, path: str | Path, version: int) -> None:
        """As the learner's; the critic's part is beside it, where a critic on its ranks has it."""
        await _both(super().save(path, version), self._critic.save(_beside(path), version))

    async def begin_save(self, path: str | Path, version: int) -> None:
        """As the learner's. Where one of the two cannot, the other's save is ended too."""
        try:
            mine = super().begin_save(path, version)
            await _both(mine, self._critic.begin_save(_beside(path), version))
        except CheckpointError:
            await self._end_saves()
            raise

    async def end_save(self, wait: bool = True) -> bool:
        """Whether both have ended theirs. Where one failed, it is raised when both have."""
        try:
            return all(await _both(super().end_save(wait), self._critic.end_save(wait)))
        except CheckpointError:
            await self._end_saves()
            raise

    async def _end_saves(self) -> None:
        mine, theirs = super().end_save(True), self._critic.end_save(True)
        for outcome in await asyncio.gather(mine, theirs, return_exceptions=True):
            if isinstance(outcome, BaseException) and not isinstance(outcome, CheckpointError):
                raise outcome

    async def check_saved(self, path: str | Path) -> str:
        """As the learner's, of both parts."""
        mine = super().check_saved(path)
        found = await _both(mine, self._critic.check_saved(_beside(path)))
        return found[0] or found[1]

    async def load(self, path: str | Path) -> int:
        """Both continue. Raises CheckpointError where they are of two versions."""
        mine, theirs = await _both(super().load(path), self._critic.load(_beside(path)))
        if mine != theirs:
            raise CheckpointError(
                f"{path}: the learner's part is version {mine}, the critic's in {_beside(path)} "
                f"is {theirs}; remove that checkpoint to continue from an older one"
            )
        return mine

    async def peaks(self) -> dict[str, int]:
        """`memory/*` of both, the critic's as `memory/critic_*`."""
        mine, theirs = await _both(super().peaks(), self._critic.peaks())
        of_critic = {name.replace("memory/", "memory/critic_"): n for name, n in theirs.items()}
        return {**mine, **of_critic}

    async def shutdown(self) -> None:
        """End both."""
        await _both(super().shutdown(), self._critic.shutdown())


def _beside(path: str | Path) -> str:
    return f"{path}-critic"


async def _both(
    mine: Coroutine[Any, Any, Mine], theirs: Coroutine[Any, Any, Theirs]
) -> tuple[Mine, Theirs]:
    """Both results. The first error is raised at once: the run ends with it."""
    first, second = await asyncio.gather(mine, theirs)
    return first, second
