"""Greedy evaluation of one policy version on fixed prompts. Knows nothing of training."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from megarl.config.schema import Config
from megarl.reward.scorer import Scorer
from megarl.rollout.collect import Collector
from megarl.types import Group, Prompt


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Fixed prompts, answered greedily, scored by the run's own reward; may have no prompts."""

    config: Config
    prompts: Sequence[Prompt]
    rollout: Collector
    reward: Scorer

    def is_due(self, version: int) -> bool:
        """Whether `version`, just made, is to be evaluated."""
        every = self.config.eval.every
        last = version == self.config.loop.versions
        return bool(self.prompts) and (last or (every > 0 and version % every == 0))

    async def accuracy(self, version: int) -> dict[str, float | int]:
        """`eval/accuracy`: mean reward over the answers that were scored; empty without prompts.

        `eval/version` is the policy version it belongs to, `eval/scored` how many answers count.
        """
        if not self.prompts:
            return {}
        samples = await self.rollout.evaluate(self.prompts, version)
        groups = [
            Group(sample.group_id, prompt, (sample,))
            for sample, prompt in zip(samples, self.prompts, strict=True)
        ]
        scored = await asyncio.gather(*(self.reward.score(group) for group in groups))
        rewards = [group.samples[0].reward for group in scored]
        values = [reward.value for reward in rewards if reward and reward.value is not None]
        result: dict[str, float | int] = {"eval/version": version, "eval/scored": len(values)}
        if values:
            result["eval/accuracy"] = sum(values) / len(values)
        return result
