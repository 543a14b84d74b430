"""Stage d: a sample's advantage, which for GRPO is its reward relative to its group's.

Owns which samples count in a group's statistics. Knows nothing of tokens, versions or the loss.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from megarl.config.advantage import AdvantageConfig
from megarl.types import Group, Sample

STD_EPS = 1e-6  # added to the deviation: verl's value (TRL's is 1e-4)


def group_advantages(rewards: Sequence[float], normalize_std: bool) -> list[float]:
    """Reward minus mean, over the unbiased deviation plus 1e-6 where `normalize_std`.

    Exactly 0 where all rewards are equal, so also for one reward alone.
    Source: Shao et al. 2024 (DeepSeekMath), section 4.1.

    >>> group_advantages([1.0, 0.0, 0.0, 1.0], normalize_std=False)
    [0.5, -0.5, -0.5, 0.5]
    >>> [round(a, 4) for a in group_advantages([1.0, 0.0], normalize_std=True)]
    [0.7071, -0.7071]
    >>> group_advantages([0.3, 0.3, 0.3], normalize_std=True)
    [0.0, 0.0, 0.0]
    """
    if all(reward == rewards[0] for reward in rewards):
        return [0.0] * len(rewards)
    mean = math.fsum(rewards) / len(rewards)
    centred = [reward - mean for reward in rewards]
    if not normalize_std:
        return centred
    std = math.sqrt(math.fsum(value * value for value in centred) / (len(rewards) - 1))
    return [value / (std + STD_EPS) for value in centred]


def assign(group: Group, config: AdvantageConfig) -> Group:
    """The group with every advantage set.

    Under `gae` it is the reward, as long as no value is known: the learner makes each token's of it
    (`gae.py`). Samples whose reward is no value, and samples without a loss token, are left out
    before any statistic: their advantage is None. The group must have been scored.
    """
    counted = [index for index, sample in enumerate(group.samples) if counts(sample)]
    rewards = [_value(group.samples[index]) for index in counted]
    if config.estimator == "grpo":
        advantages = group_advantages(rewards, config.normalize_std)
    else:
        advantages = rewards
    by_index = dict(zip(counted, advantages, strict=True))
    samples = tuple(
        replace(sample, advantage=by_index.get(index)) for index, sample in enumerate(group.samples)
    )
    return replace(group, samples=samples)


def counts(sample: Sample) -> bool:
    """Whether a sample enters statistics: its reward is a value, and it has a loss token."""
    assert sample.reward is not None, f"{sample.sample_id} was not scored"
    return sample.reward.state == "value" and sample.num_loss_tokens > 0


def is_degenerate(group: Group) -> bool:
    """Whether a group teaches nothing: fewer than two different rewards among what counts."""
    return len({_value(sample) for sample in group.samples if counts(sample)}) < 2


def reward_metrics(groups: Sequence[Group]) -> dict[str, float]:
    """The `reward/*` numbers of scored groups.

    `reward/mean`, `/std` (of the population), `/min`, `/max` are over samples that count, and
    absent where none does; `reward/failed` and `/timeout` are shares of all samples;
    `reward/degenerate_groups` is a share of groups.
    """
    samples = [sample for group in groups for sample in group.samples]
    values = [_value(sample) for sample in samples if counts(sample)]
    states = [sample.reward.state for sample in samples if sample.reward is not None]
    metrics = {
        "reward/failed": states.count("failed") / max(1, len(states)),
        "reward/timeout": states.count("timeout") / max(1, len(states)),
        "reward/degenerate_groups": sum(map(is_degenerate, groups)) / max(1, len(groups)),
    }
    if values:
        mean = math.fsum(values) / len(values)
        metrics["reward/mean"] = mean
        metrics["reward/std"] = math.sqrt(
            math.fsum((value - mean) ** 2 for value in values) / len(values)
        )
        metrics["reward/min"] = min(values)
        metrics["reward/max"] = max(values)
    return metrics


def _value(sample: Sample) -> float:
    assert sample.reward is not None and sample.reward.value is not None, sample.sample_id
    return sample.reward.value
