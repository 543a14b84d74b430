"""Stage e: the minibatches of a rollout batch, made once and centrally.

Owns which samples make one optimizer step; where each goes is `schedule.py`'s. Pure: knows
references only; no tokens, files, rewards or collectives.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from megarl.actor.flops import SequenceFlops
from megarl.buffer.schedule import ScheduleShape, dp_imbalance, make_schedule
from megarl.config.fp8 import token_multiple
from megarl.config.layouts import learner_mesh
from megarl.config.schema import Config
from megarl.types import Batch, MinibatchPlan, SampleRef


@dataclass(frozen=True, slots=True)
class BatchShape:
    """The settings that shape a batch; `schedule` shapes each of its optimizer steps."""

    num_minibatches: int
    num_epochs: int
    seed: int
    schedule: ScheduleShape

    @classmethod
    def of(cls, config: Config, flops: SequenceFlops) -> BatchShape:
        """The shape that a run's settings ask for, of a policy that takes `flops`."""
        parallel, mesh = config.learner.parallel, learner_mesh(config)
        return cls(
            num_minibatches=config.learner.optimizer_steps_per_rollout,
            num_epochs=config.learner.epochs_per_rollout,
            seed=config.run.seed,
            schedule=ScheduleShape(
                data_parallel=config.data_parallel,
                max_tokens=config.learner.max_tokens_per_microbatch,
                flops=flops,
                is_pipelined=parallel.pp > 1,
                count=parallel.pp if parallel.vpp > 1 else 1,  # Megatron's interleaved schedule
                sequence_multiple=mesh.sequence_multiple,
                token_multiple=token_multiple(config.learner.precision, mesh.tp, mesh.cp),
            ),
        )


def make_batch(groups: Sequence[Sequence[SampleRef]], version: int, shape: BatchShape) -> Batch:
    """The optimizer steps of one rollout batch, in order, for the learner at `version`.

    `groups` holds each group's usable samples; their order does not matter to the result. Every
    epoch uses every sample once, in an order drawn from (seed, version, epoch). There are fewer
    minibatches than asked where there are fewer samples, and none where there are no samples.

    Raises ConfigError for a sample longer than a microbatch.
    """
    kept = sorted((tuple(group) for group in groups if group), key=lambda refs: refs[0].sample_id)
    refs = [ref for group in kept for ref in group]
    minibatches: list[MinibatchPlan] = []
    for epoch in range(shape.num_epochs):
        order = list(kept)
        # A string seed is hashed with SHA-512 by random.Random: the same on every machine.
        random.Random(f"minibatches/{shape.seed}/{version}/{epoch}").shuffle(order)
        for part in split_minibatches(order, shape.num_minibatches):
            minibatches.append(make_schedule(part, shape.schedule))
    return Batch(
        version=version,
        minibatches=tuple(minibatches),
        worst_staleness=max((version - ref.version for ref in refs), default=0),
        num_samples=len(refs),
        num_truncated=sum(ref.is_truncated for ref in refs),
        dp_imbalance=dp_imbalance(minibatches, shape.schedule),
    )


def scheduled_for(batch: Batch, shape: ScheduleShape) -> Batch:
    """The same minibatches for other ranks: each of the same samples, placed anew by `shape`.

    Raises ConfigError for a sample longer than a microbatch.
    """
    plans = []
    for plan in batch.minibatches:
        refs = [ref for rank in plan.schedule for microbatch in rank for ref in microbatch]
        plans.append(make_schedule(refs, shape))
    return replace(batch, minibatches=tuple(plans), dp_imbalance=dp_imbalance(plans, shape))


def split_minibatches(
    groups: Sequence[Sequence[SampleRef]], num_minibatches: int
) -> list[list[SampleRef]]:
    """Split whole samples into at most `num_minibatches` non-empty parts of about equal counts.

    Groups stay whole where there are at least as many groups as parts; else the samples are cut in
    order, into counts that differ by at most one.
    """
    if len(groups) >= num_minibatches:
        parts: list[list[SampleRef]] = [[] for _ in range(num_minibatches)]
        for group in sorted(groups, key=len, reverse=True):  # stable: keeps the shuffled order
            min(parts, key=len).extend(group)
        return [part for part in parts if part]
    refs = [ref for group in groups for ref in group]
    num_parts = min(num_minibatches, len(refs))
    cuts = [len(refs) * part // num_parts for part in range(num_parts + 1)] if refs else []
    return [refs[start:end] for start, end in pairwise(cuts)]
