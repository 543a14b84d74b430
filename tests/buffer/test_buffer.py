"""The buffer: admission by version, samples left out, and draining."""

from __future__ import annotations

import logging
from dataclasses import replace

import pytest

from megarl.actor.flops import SequenceFlops
from megarl.buffer.buffer import Buffer
from megarl.config.schema import ActorConfig, Config, LearnerConfig
from megarl.errors import ConfigError, RolloutError, StalenessError
from megarl.types import Group, Prompt, Sample


def run_config(max_staleness: int = 0, **learner: object) -> Config:
    config = Config(actor=ActorConfig(model="m"), learner=LearnerConfig.model_validate(learner))
    loop = config.loop.model_copy(update={"max_staleness": max_staleness})
    return config.model_copy(update={"loop": loop})


def new_buffer(max_staleness: int = 0, **learner: object) -> Buffer:
    return Buffer(run_config(max_staleness, **learner), SequenceFlops(1.0, 0.0, 0.0))


def one_group(name: str, versions: list[int], advantage: float | None = 1.0) -> Group:
    prompt = Prompt(f"p-{name}", (1, 2), "", "")
    samples = []
    for i, version in enumerate(versions):
        sample = Sample(f"{name}-{i}", name, prompt.prompt_id, prompt.prompt_ids)
        sample = sample.extended([3, 4], [-0.1, -0.2], version)
        samples.append(replace(sample, advantage=advantage))
    return Group(name, prompt, tuple(samples), path=f"{name}.safetensors")


def test_buffer_hands_out_what_it_got_and_is_then_empty() -> None:
    buffer = new_buffer(optimizer_steps_per_rollout=2)
    for name in ("a", "b"):
        buffer.add(one_group(name, [3, 3]), 3)
    batch = buffer.take(3)
    assert (batch.num_samples, batch.worst_staleness, len(batch.minibatches)) == (4, 0, 2)
    refs = [r for plan in batch.minibatches for micro in plan.schedule[0] for r in micro]
    assert sorted((r.path, r.index) for r in refs) == [
        (f"{name}.safetensors", i) for name in "ab" for i in (0, 1)
    ]
    assert buffer.take(4).minibatches == ()


def test_batch_says_which_samples_were_cut_at_their_token_limit() -> None:
    group, buffer = one_group("a", [0, 0, 0]), new_buffer()
    reasons = ("stop", "length", "stop")
    ended = [replace(s, finish_reason=why) for s, why in zip(group.samples, reasons, strict=True)]
    buffer.add(replace(group, samples=tuple(ended)), 0)
    refs = [r for each in buffer.take(0).minibatches[0].schedule[0] for r in each]
    assert {ref.sample_id: ref.is_cut for ref in refs} == {"a-0": False, "a-1": True, "a-2": False}


def test_buffer_refuses_sample_older_than_max_staleness() -> None:
    with pytest.raises(StalenessError, match=r"sample a-1 .* version 1, 2 behind .* 3.*allows 1"):
        new_buffer(max_staleness=1).add(one_group("a", [3, 1]), 3)


def test_buffer_refuses_sample_of_which_one_span_is_too_old() -> None:
    group = one_group("a", [3])
    mixed = group.samples[0].extended([5], [0.0], version=2)
    mixed = replace(mixed, version_spans=mixed.version_spans[::-1])
    with pytest.raises(StalenessError, match="a-0"):
        new_buffer().add(replace(group, samples=(mixed,)), 3)


def test_buffer_refuses_sample_from_a_version_that_the_learner_has_not_made() -> None:
    with pytest.raises(StalenessError, match="made by policy version 4, but the learner is at 3"):
        new_buffer().add(one_group("a", [4]), 3)


def test_sample_that_grew_too_old_while_it_waited_is_refused_when_taken() -> None:
    buffer = new_buffer(max_staleness=1)
    buffer.add(one_group("a", [3]), 3)
    with pytest.raises(StalenessError, match="a-0"):
        buffer.take(5)


def test_allowed_staleness_is_counted_in_the_batch() -> None:
    buffer = new_buffer(max_staleness=2)
    buffer.add(one_group("a", [3, 2]), 4)
    assert buffer.take(4).worst_staleness == 2


def test_group_added_twice_is_refused() -> None:
    buffer = new_buffer()
    buffer.add(one_group("a", [0]), 0)
    with pytest.raises(RolloutError, match="a arrived twice"):
        buffer.add(one_group("a", [0]), 0)


def test_samples_without_advantage_or_loss_tokens_are_left_out() -> None:
    buffer = new_buffer()
    group = one_group("a", [0, 0, 0])
    silent = replace(group.samples[1], loss_mask=(False, False))
    empty = Sample("a-2", "a", "p-a", (1, 2), advantage=1.0)
    buffer.add(replace(group, samples=(group.samples[0], silent, empty)), 0)
    buffer.add(one_group("b", [0], advantage=None), 0)
    batch = buffer.take(0)
    assert batch.num_samples == 1 and batch.minibatches[0].num_loss_tokens == 2


def test_old_sample_that_is_left_out_anyway_is_no_error() -> None:
    buffer = new_buffer()
    buffer.add(one_group("a", [0], advantage=None), 9)
    assert buffer.take(9).minibatches == ()


def test_number_of_samples_left_out_is_logged_with_the_batch_they_miss(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    buffer = new_buffer()
    for name, advantage in (("a", None), ("b", 1.0), ("c", None)):
        buffer.add(one_group(name, [0, 0, 0], advantage=advantage), 0)
    buffer.take(0)
    assert caplog.messages == [
        "samples left out version=0 left_out=6 overlong=0 truncated=0 used=3"
    ]
    caplog.clear()
    buffer.add(one_group("d", [1]), 1)
    buffer.take(1)
    buffer.add(one_group("e", [2, 2], advantage=None), 2)
    buffer.take(2)
    assert caplog.messages == [
        "samples left out version=2 left_out=2 overlong=0 truncated=0 used=0"
    ]


def test_samples_of_a_group_that_are_used_do_not_count_as_left_out(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    buffer, group = new_buffer(), one_group("a", [0, 0, 0, 0])
    without = replace(group.samples[0], advantage=None)
    buffer.add(replace(group, samples=(without, *group.samples[1:])), 0)
    buffer.take(0)
    assert caplog.messages == [
        "samples left out version=0 left_out=1 overlong=0 truncated=0 used=3"
    ]


def test_sample_over_the_token_budget_is_an_error_unless_asked_otherwise() -> None:
    buffer = new_buffer(max_tokens_per_microbatch=3)
    buffer.add(one_group("a", [0]), 0)
    with pytest.raises(ConfigError, match=r"sample a-0 has 4 tokens.*overlong_samples"):
        buffer.take(0)


def test_sample_over_the_token_budget_is_left_out_where_asked() -> None:
    buffer = new_buffer(max_tokens_per_microbatch=3, overlong_samples="filter")
    buffer.add(one_group("a", [0, 0]), 0)
    batch = buffer.take(0)
    assert (batch.num_samples, batch.num_overlong, batch.minibatches) == (0, 2, ())
    assert buffer.take(1).num_overlong == 0


def test_response_is_truncated_at_the_token_budget_where_asked() -> None:
    buffer = new_buffer(max_tokens_per_microbatch=5, overlong_samples="truncate")
    group = one_group("a", [0, 0])
    long = group.samples[1].extended([7, 8], [-0.1] * 2, version=0, trainable=False)
    long = long.extended([9], [-0.1], version=0)
    buffer.add(replace(group, samples=(group.samples[0], long)), 0)
    batch = buffer.take(0)
    refs = {r.index: r for rank in batch.minibatches[0].schedule for micro in rank for r in micro}
    assert (refs[0].num_tokens, refs[0].num_loss_tokens, refs[0].is_truncated) == (4, 2, False)
    assert (refs[1].num_tokens, refs[1].num_loss_tokens, refs[1].is_truncated) == (5, 2, True)
    assert (batch.num_samples, batch.num_truncated, batch.num_overlong) == (2, 1, 0)
    assert batch.minibatches[0].num_loss_tokens == 4


def test_truncated_sample_without_a_loss_token_is_left_out() -> None:
    buffer = new_buffer(max_tokens_per_microbatch=2, overlong_samples="truncate")
    buffer.add(one_group("a", [0]), 0)
    batch = buffer.take(0)
    assert (batch.num_samples, batch.num_truncated, batch.num_overlong) == (0, 0, 1)
