"""What a rollout batch amounts to, as metrics."""

from __future__ import annotations

from dataclasses import replace

from megarl.actor.flops import SequenceFlops
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


def metrics_of(group: Group, **learner: object) -> dict[str, float | int]:
    settings = {"actor": {"model": "m"}, "learner": {"max_tokens_per_microbatch": 8, **learner}}
    config = Config.model_validate(settings)
    buffer = Buffer(config, SequenceFlops(1.0, 0.0, 0.0))
    buffer.add(group, 0)
    return batch_metrics([group], buffer.take(0), config)


def test_microbatches_are_counted_over_ranks_and_their_imbalance_told() -> None:
    metrics = metrics_of(scored_group(1.0, -1.0, 0.0))
    assert metrics["buffer/microbatches"] == 2
    assert metrics["packing/dp_imbalance"] == 0.0


def test_samples_that_the_learner_does_not_see_are_counted() -> None:
    metrics = metrics_of(scored_group(1.0, None, None))
    assert (metrics["buffer/samples"], metrics["buffer/left_out_samples"]) == (1, 2)
    assert metrics["tokens/generated"] == 6


def test_samples_over_the_token_budget_are_counted() -> None:
    group = scored_group(1.0, -1.0)
    long = group.samples[0].extended([5, 6, 7], [-0.1] * 3, version=0)
    group = replace(group, samples=(long, group.samples[1]))
    settings = {"max_tokens_per_microbatch": 5}
    cut = metrics_of(group, overlong_samples="truncate", **settings)
    assert (cut["buffer/truncated_samples"], cut["buffer/overlong_samples"]) == (1, 0)
    assert (cut["buffer/samples"], cut["buffer/left_out_samples"]) == (2, 0)
    left = metrics_of(group, overlong_samples="filter", **settings)
    assert (left["buffer/truncated_samples"], left["buffer/overlong_samples"]) == (0, 1)
    assert (left["buffer/samples"], left["buffer/left_out_samples"]) == (1, 1)
