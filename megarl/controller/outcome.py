"""What a step's groups, batch and optimizer steps amount to, as metrics. Pure; knows no engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from megarl.advantage.group import reward_metrics
from megarl.config.schema import Config
from megarl.types import Batch, Group


def batch_metrics(groups: Sequence[Group], batch: Batch, config: Config) -> dict[str, float | int]:
    """Rewards, token counts, staleness and schedule of one rollout batch."""
    samples = [sample for group in groups for sample in group.samples]
    lengths = [len(sample.response_ids) for sample in samples]
    cut = sum(sample.finish_reason == "length" for sample in samples)
    return {
        **reward_metrics(groups),
        "tokens/generated": sum(lengths),
        "tokens/prompt": sum(len(sample.prompt_ids) for sample in samples),
        "tokens/mean_response": sum(lengths) / max(1, len(lengths)),
        "rollout/cut_by_length": cut / max(1, len(samples)),
        "buffer/samples": batch.num_samples,
        "buffer/left_out_samples": len(samples) - batch.num_samples,
        "buffer/truncated_samples": batch.num_truncated,
        "buffer/overlong_samples": batch.num_overlong,
        "buffer/staleness": batch.worst_staleness,
        "buffer/staleness_steps": config.worst_staleness_steps,
        "buffer/microbatches": sum(
            len(rank) for plan in batch.minibatches for rank in plan.schedule
        ),
        "packing/dp_imbalance": batch.dp_imbalance,
        "learn/optimizer_steps": len(batch.minibatches),
    }


SUMMED = frozenset({"optimizer/skipped_steps", "value/skipped_steps"})


def over_steps(steps: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The mean of each number over those of a rollout batch's optimizer steps that have it.

    Of skipped steps it is the sum.

    >>> over_steps([{"lr": 0.5, "optimizer/skipped_steps": 0.0}, {"optimizer/skipped_steps": 1.0}])
    {'lr': 0.5, 'optimizer/skipped_steps': 1.0}
    """
    names = dict.fromkeys(name for step in steps for name in step)
    found = {name: [step[name] for step in steps if name in step] for name in names}
    return {
        name: sum(values) / (1 if name in SUMMED else len(values)) for name, values in found.items()
    }
