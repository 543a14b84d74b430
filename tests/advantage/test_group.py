"""GRPO advantages against brute force, and what is left out of them."""

from __future__ import annotations

import math
import statistics
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.advantage.group import assign, group_advantages, is_degenerate, reward_metrics
from megarl.config.advantage import AdvantageConfig
from megarl.types import Group, Prompt, Reward, Sample

GRPO = AdvantageConfig()


def scored(*rewards: float | str) -> Group:
    """A group with these rewards; a text is the state of a reward that has no value."""
    samples = []
    for i, reward in enumerate(rewards):
        given_reward = (
            Reward(reward, reason="r")  # type: ignore[arg-type]
            if isinstance(reward, str)
            else Reward("value", float(reward))
        )
        sample = Sample(f"s{i}", "g", "p", (1,)).extended([2], [-1.0], version=0)
        samples.append(replace(sample, reward=given_reward))
    return Group("g", Prompt("p", (1,), "", ""), tuple(samples))


def advantages(group: Group, config: AdvantageConfig = GRPO) -> list[float | None]:
    return [sample.advantage for sample in assign(group, config).samples]


@settings(max_examples=200)
@given(st.lists(st.floats(-10, 10), min_size=2, max_size=9), st.booleans())
def test_advantages_equal_brute_force(rewards: list[float], normalize: bool) -> None:
    found = group_advantages(rewards, normalize)
    if len(set(rewards)) == 1:
        assert found == [0.0] * len(rewards)
        return
    mean = statistics.fmean(rewards)
    scale = statistics.stdev(rewards) + 1e-6 if normalize else 1.0
    for reward, advantage in zip(rewards, found, strict=True):
        assert math.isclose(advantage, (reward - mean) / scale, rel_tol=1e-9, abs_tol=1e-9)


def test_failed_and_late_samples_are_left_out_before_the_mean() -> None:
    assert advantages(scored(1, "failed", 0, "timeout")) == [
        pytest.approx(0.5 / (math.sqrt(0.5) + 1e-6)),
        None,
        pytest.approx(-0.5 / (math.sqrt(0.5) + 1e-6)),
        None,
    ]


def test_sample_without_a_loss_token_is_left_out_before_the_mean() -> None:
    group = scored(1, 0, 1)
    silent = replace(group.samples[1], loss_mask=(False,))
    group = replace(group, samples=(group.samples[0], silent, group.samples[2]))
    assert advantages(group) == [0.0, None, 0.0]
    assert is_degenerate(group) and reward_metrics([group])["reward/mean"] == 1.0


def test_group_with_equal_rewards_has_advantages_of_exactly_zero() -> None:
    assert advantages(scored(0.1, 0.1, 0.1)) == [0.0, 0.0, 0.0]
    assert is_degenerate(scored(0.1, 0.1)) and not is_degenerate(scored(0.1, 0.2))


def test_group_with_three_different_rewards_is_not_degenerate() -> None:
    assert not is_degenerate(scored(0, 0.5, 1))


def test_single_counted_sample_has_advantage_zero() -> None:
    assert advantages(scored("failed", 3)) == [None, 0.0]


def test_group_without_any_value_has_no_advantages_and_is_degenerate() -> None:
    group = scored("failed", "timeout")
    assert advantages(group) == [None, None] and is_degenerate(group)


def test_metrics_are_over_the_samples_that_count_and_shares_over_all() -> None:
    metrics = reward_metrics([scored(1, 0, "failed", "timeout"), scored(1, 1, "failed", "failed")])
    assert metrics["reward/mean"] == 0.75
    assert (metrics["reward/min"], metrics["reward/max"]) == (0.0, 1.0)
    assert metrics["reward/std"] == pytest.approx(statistics.pstdev([1, 0, 1, 1]))
    assert metrics["reward/failed"] == 3 / 8 and metrics["reward/timeout"] == 1 / 8
    assert metrics["reward/degenerate_groups"] == 0.5


def test_metrics_without_any_value_have_no_mean() -> None:
    assert "reward/mean" not in reward_metrics([scored("failed")])


@pytest.mark.parametrize("state", ["failed", "timeout"])
def test_shares_of_one_sample_and_one_group_are_whole(state: str) -> None:
    metrics = reward_metrics([scored(state)])
    other = {"failed": "timeout", "timeout": "failed"}[state]
    assert metrics == {
        f"reward/{state}": 1.0,
        f"reward/{other}": 0.0,
        "reward/degenerate_groups": 1.0,
    }


def test_shares_of_no_groups_are_zero() -> None:
    assert set(reward_metrics([]).values()) == {0.0} and len(reward_metrics([])) == 3


def test_reward_is_what_tokens_advantages_are_made_of_under_gae() -> None:
    given = advantages(scored(1.0, "failed", 0.25), AdvantageConfig(estimator="gae"))
    assert given == [1.0, None, 0.25]
