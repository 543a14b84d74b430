"""Which tokens get advantages, what counts in the batch's statistics, and what is kept."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from megarl.config.advantage import AdvantageConfig
from megarl.errors import LearnerError
from megarl.learner.advantages import TokenAdvantages
from megarl.learner.packing import Multiples, PackedMicrobatch, pack_sequences
from megarl.types import SampleRef

SEQUENCES = [((1, 2), (3, 4, 5)), ((6,), (7,)), ((8,), (9, 10))]
REWARDS = (1.0, 0.0, 0.5)
SAMPLES = {
    str(i): SampleRef(str(i), "", i, 0, 0, reward, 0, is_cut=i == 2)
    for i, reward in enumerate(REWARDS)
}
NO_SAMPLES: frozenset[str] = frozenset()
DIRECT = {"gamma": 1.0, "gae_lambda": 0.0, "whiten": False}  # an advantage is one delta


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[None]:
    """A process group of this process."""
    dist.init_process_group(
        "gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1
    )
    yield
    dist.destroy_process_group()


def packed() -> PackedMicrobatch:
    (one,), _ = pack_sequences(SEQUENCES, 32, 1, 0, Multiples(microbatch=16))
    return one


def values(microbatch: PackedMicrobatch) -> torch.Tensor:
    """A tenth of each token's number, so that what is taken from where can be told."""
    return microbatch.tokens_T / 10


def made(
    skip: frozenset[str] = NO_SAMPLES,
    counts: bool = True,
    microbatch: PackedMicrobatch | None = None,
    **settings: object,
) -> TokenAdvantages:
    config = AdvantageConfig.model_validate({"estimator": "gae", **settings})
    table = TokenAdvantages(config, torch.device("cpu"))
    one = microbatch or packed()
    table.add(one, values(one), None, SAMPLES, skip, counts)
    return table


def test_reward_comes_with_the_last_action_and_a_cut_response_takes_the_next_value() -> None:
    one = packed()
    first, second, third = (segment.response for segment in one.segments)
    found = made(**DIRECT).advantages(one).advantage_T
    assert found[first].tolist() == pytest.approx([0.1, 0.1, 1.0 - 0.4])
    assert found[second].tolist() == pytest.approx([-0.6])
    assert found[third].tolist() == pytest.approx([0.1, 0.5 - 0.9])
    found = made(**DIRECT, cut_responses="continued").advantages(one).advantage_T
    assert found[second].tolist() == pytest.approx([-0.6])
    assert found[third].tolist() == pytest.approx([0.1, 0.5 + 1.0 - 0.9])


def test_inserted_tokens_are_no_actions() -> None:
    one = packed()
    place = one.segments[0].response.start + 1
    mask_T = one.loss_mask_T.clone()
    mask_T[place] = False
    inserted = replace(one, loss_mask_T=mask_T)
    found = made(microbatch=inserted, **DIRECT).advantages(inserted).advantage_T
    before, after = found[place - 1], found[place + 1]
    assert (float(before), float(after)) == pytest.approx((0.4 - 0.2, 1.0 - 0.4))


def test_sample_without_an_action_has_no_advantage_and_is_not_counted(alone: None) -> None:
    one = packed()
    mask_T = one.loss_mask_T.clone()
    mask_T[one.segments[1].response] = False
    table = made(microbatch=replace(one, loss_mask_T=mask_T), **DIRECT)
    assert table.finish()["value/mean"] == pytest.approx((0.2 + 0.3 + 0.4 + 0.8 + 0.9) / 5)


@pytest.mark.parametrize("whiten", [False, True])
def test_statistics_are_of_every_action_once_and_whiten_them(alone: None, whiten: bool) -> None:
    table, one = made(**{**DIRECT, "whiten": whiten}), packed()
    before = table.advantages(one).advantage_T[one.loss_mask_T].tolist()
    found = table.finish()
    old, returns = (tensor[one.loss_mask_T] for tensor in table.values(one))
    assert returns.tolist() == pytest.approx(
        [a + float(v) for a, v in zip(before, old, strict=False)]
    )
    std = statistics.pstdev(before)
    left = statistics.pvariance(before) / statistics.pvariance(returns.tolist())
    wanted = {
        "value/mean": statistics.fmean(old.tolist()),
        "returns/mean": statistics.fmean(returns.tolist()),
        "advantage/mean": statistics.fmean(before),
        "advantage/std": std,
        "value/explained_variance": 1 - left,
    }
    assert found == pytest.approx(wanted, rel=1e-5)
    after = table.advantages(one).advantage_T[one.loss_mask_T].tolist()
    mean = statistics.fmean(before)
    expected = [(a - mean) / (std + 1e-6) for a in before] if whiten else before
    assert after == pytest.approx(expected, rel=1e-4, abs=1e-6)


def test_samples_that_were_counted_before_are_kept_and_not_counted_again(alone: None) -> None:
    table, one = made(skip=frozenset({"0", "2"}), **DIRECT), packed()
    assert table.finish()["value/mean"] == pytest.approx(0.6)
    assert table.advantages(one).advantage_T[one.segments[0].response].any()


def test_rank_that_does_not_report_counts_nothing_and_a_batch_of_none_has_no_numbers(
    alone: None,
) -> None:
    assert made(counts=False).finish() == {}


def test_sample_of_another_batch_is_refused() -> None:
    table = made()
    table.clear()
    with pytest.raises(LearnerError, match="score the batch before its first step"):
        table.advantages(packed())
