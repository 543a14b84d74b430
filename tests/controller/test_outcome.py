"""What a rollout batch amounts to, as metrics."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megarl.buffer.buffer import Buffer
from megarl.config.schema import Config
from megarl.controller.outcome import batch_metrics
from megarl.types import Group, Prompt, Reward, Sample


def scored_group(*advantages: float | None) -> Group:
    """A group of samples of four tokens each, two of them the response's."""
    prompt = Prompt("p", (1, 2), "", "")
    samples = []
    for index, advantage in enumerate(advantages):
        sample = Sample(f"a-{index}", "a", "p", prompt.prompt_ids, finish_reason="stop")
        sample = sample.extended([3, 4], [-0.1, -0.2], version=0)
        samples.append(replace(sample, reward=Reward("value", 1.0), advantage=advantage))
    return Group("a", prompt, tuple(samples), path="a.safetensors")


def metrics_of(group: Group) -> dict[str, float | int]:
    settings = {"actor": {"model": "m"}, "learner": {"max_tokens_per_microbatch": 8}}
    config = Config.model_validate(settings)
    buffer = Buffer(config)
    buffer.add(group, 0)
    return batch_metrics([group], buffer.take(0), config)


def test_padding_is_the_share_of_scheduled_tokens_that_are_filler() -> None:
    metrics = metrics_of(scored_group(1.0, -1.0, 0.0))
    assert metrics["buffer/microbatches"] == 2
    assert metrics["buffer/padding"] == pytest.approx(1 - 12 / 16)


def test_samples_that_the_learner_does_not_see_are_counted() -> None:
    metrics = metrics_of(scored_group(1.0, None, None))
    assert (metrics["buffer/samples"], metrics["buffer/left_out_samples"]) == (1, 2)
    assert metrics["tokens/generated"] == 6
