"""The loop: seven stages, once for each policy version, in this order, on one screen.

Knows the stages' names and nothing of how they work: prompts, rollout, reward, advantage, buffer,
learn, weight sync. Building them from a config is `training.py`'s job.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from megarl.advantage.group import assign
from megarl.buffer.buffer import Buffer
from megarl.config.schema import Config
from megarl.controller.checkpoints import Checkpoints
from megarl.controller.ending import Ending
from megarl.controller.evaluation import Evaluation
from megarl.controller.exports import Exports
from megarl.controller.outcome import batch_metrics, over_steps
from megarl.controller.parity import check_batch
from megarl.controller.publisher import Publisher
from megarl.controller.turn import Turn
from megarl.learner.client import LearnerClient
from megarl.observe.metrics import MetricsLog, StepMetrics
from megarl.observe.progress import Progress
from megarl.observe.samples import SampleLog
from megarl.prompts.sampler import PromptSampler
from megarl.reward.scorer import Scorer
from megarl.rollout.collect import Collector
from megarl.types import Group, Prompt


@dataclass(frozen=True, slots=True)
class Loop:
    """The components, wired. `run` makes policy versions until there are `loop.versions`."""

    config: Config
    prompts: PromptSampler
    rollout: Collector
    reward: Scorer
    buffer: Buffer
    learner: LearnerClient
    weight_sync: Publisher
    turn: Turn
    evaluation: Evaluation
    checkpoints: Checkpoints
    exports: Exports
    ending: Ending
    samples: SampleLog
    metrics: MetricsLog
    progress: Progress

    async def run(self, start: int) -> None:
        """Continue from policy version `start`, whose weights the servers already hold.

        Where the run is to end early, the version of the moment is saved first.
        """
        made: Mapping[str, object] = {}  # the numbers of the step that made `version`
        for version in range(start, self.config.loop.versions):
            step = StepMetrics(step=version, version=version)
            if version == 0:
                step.add(await self.ending.unless(self.evaluation.accuracy(0)) or {})
            cursor = self.prompts.state()
            prompts = self.prompts.draw(self.config.rollout.prompts_per_step)  # a
            with step.timed("rollout"):
                groups = await self.ending.unless(self._collect(prompts, version))  # b c d
            if groups is None:
                await self._end_early(version, start, cursor, made)
                return
            batch = self.buffer.take(version)  # e
            step.add(batch_metrics(groups, batch, self.config))
            step.add(await self.turn.to("learning"))
            with step.timed("score"):
                scores = await self.learner.score(batch)  # f
            check_batch(self.config, scores, version)
            step.add(scores)
            await self.weight_sync.leave_version()
            with step.timed("learn"):
                steps = [await self.learner.step(m) for m in batch.minibatches]  # f
            step.add(over_steps(steps))
            step.add(await self.turn.to("syncing"))
            with step.timed("weight_sync"):
                step.add(await self.weight_sync.publish(version + 1))  # g
            step.add(await self.turn.to("generating"))
            step.add(await self.learner.peaks())
            await self._after(version + 1, step)
            made = step.values
        self.exports.check(self.config.loop.versions)

    async def _collect(self, prompts: Sequence[Prompt], version: int) -> list[Group]:
        """Stages b to d: each group is scored and gets its advantages as soon as it ends."""
        finished: list[Group] = []

        async def finish(group: Group) -> None:
            scored = assign(await self.reward.score(group), self.config.advantage)  # c d
            self.samples.write(scored, version)
            self.buffer.add(scored, version)  # e
            finished.append(scored)

        try:
            async with asyncio.TaskGroup() as tasks:
                async for group in self.rollout.collect(prompts, version):  # b
                    tasks.create_task(finish(group))
        except ExceptionGroup as failures:
            raise failures.exceptions[0] from failures  # the first is the one to tell
        return finished

    async def _after(self, version: int, step: StepMetrics) -> None:
        """What follows a new version: evaluation, a checkpoint, and the step's numbers."""
        if self.evaluation.is_due(version):
            with step.timed("eval"):
                step.add(await self.ending.unless(self.evaluation.accuracy(version)) or {})
        step.close()
        self.metrics.write(step)
        self.progress.step(step.values)
        # In this order, so that a start after a crash has what it does not make again.
        if self.exports.is_due(version):
            async with self.turn.visit("saving"):
                await self.exports.export(version)
        if self.checkpoints.is_due(version):
            async with self.turn.visit("saving"):
                await self.checkpoints.save(version, self.prompts.state(), step.values)

    async def _end_early(
        self, version: int, start: int, cursor: Mapping[str, object], made: Mapping[str, object]
    ) -> None:
        """Save `version`, whose numbers are `made`, unless it is what this start began with."""
        await self.checkpoints.settle()
        if version > start and not self.checkpoints.is_saved(version):
            async with self.turn.visit("saving"):
                await self.checkpoints.save(version, cursor, made, must=True)
