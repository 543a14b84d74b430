"""The loss against the same formulas written out token by token, in float64."""

from __future__ import annotations

import math
import random

import pytest
import torch

from megarl.errors import ShapeError
from megarl.learner.loss import LossSums, LossWeights, policy_loss

WEIGHTS = LossWeights(clip_low=0.2, clip_high=0.28, entropy_coef=0.02, kl_coef=0.1)
TOKENS = 60


def tokens(seed: int) -> dict[str, torch.Tensor]:
    """Random inputs of the loss; the ratios reach far beyond both bounds."""
    draw = torch.Generator().manual_seed(seed)
    logp = -3 * torch.rand(TOKENS, generator=draw, dtype=torch.float64)
    return {
        "logp_T": logp,
        "entropy_T": torch.rand(TOKENS, generator=draw, dtype=torch.float64),
        "old_logp_T": logp + 0.5 * torch.randn(TOKENS, generator=draw, dtype=torch.float64),
        "advantage_T": torch.randn(TOKENS, generator=draw, dtype=torch.float64),
        "reference_logp_T": logp + 0.5 * torch.randn(TOKENS, generator=draw, dtype=torch.float64),
        "loss_mask_T": torch.rand(TOKENS, generator=draw) < 0.6,
    }


def sums_of(inputs: dict[str, torch.Tensor], weights: LossWeights = WEIGHTS) -> LossSums:
    return policy_loss(**inputs, weights=weights)  # type: ignore[arg-type]


def brute_force(inputs: dict[str, torch.Tensor], weights: LossWeights) -> dict[str, float]:
    """Sums over loss tokens, one number at a time, without torch."""
    rows = {name: values.tolist() for name, values in inputs.items()}
    sums = dict.fromkeys(("total", "policy", "clipped", "kl", "entropy"), 0.0)
    for t in range(TOKENS):
        if not rows["loss_mask_T"][t]:
            continue
        ratio = math.exp(rows["logp_T"][t] - rows["old_logp_T"][t])
        bounded = min(max(ratio, 1 - weights.clip_low), 1 + weights.clip_high)
        advantage = rows["advantage_T"][t]
        policy = max(-ratio * advantage, -bounded * advantage)
        away = rows["reference_logp_T"][t] - rows["logp_T"][t]
        kl = math.exp(away) - away - 1
        sums["policy"] += policy
        sums["clipped"] += float(policy > -ratio * advantage)
        sums["kl"] += kl
        sums["entropy"] += rows["entropy_T"][t]
        sums["total"] += policy + weights.kl_coef * kl - weights.entropy_coef * rows["entropy_T"][t]
    return sums


@pytest.mark.parametrize("seed", range(5))
def test_sums_are_those_written_out_token_by_token(seed: int) -> None:
    inputs = tokens(seed)
    found, expected = sums_of(inputs), brute_force(inputs, WEIGHTS)
    assert expected["clipped"] > 0
    for name, value in expected.items():
        assert float(getattr(found, name)) == pytest.approx(value, rel=1e-12), name


@pytest.mark.parametrize("name", ["logp_T", "entropy_T"])
def test_gradient_of_the_total_is_that_of_finite_differences(name: str) -> None:
    inputs = tokens(9)
    inputs[name] = inputs[name].clone().requires_grad_()
    sums_of(inputs).total.backward()
    found = inputs[name].grad
    assert found is not None
    plain = {key: value.detach() for key, value in inputs.items()}
    for t in random.Random(0).sample(range(TOKENS), 20):
        moved = []
        for step in (1e-6, -1e-6):
            values = plain[name].clone()
            values[t] += step
            moved.append(brute_force({**plain, name: values}, WEIGHTS)["total"])
        slope = (moved[0] - moved[1]) / 2e-6
        assert float(found[t]) == pytest.approx(slope, rel=1e-5, abs=1e-8)


def test_sums_of_the_parts_of_a_minibatch_add_up_to_those_of_the_whole() -> None:
    inputs = tokens(1)
    parts = [{name: v[part] for name, v in inputs.items()} for part in (slice(0, 7), slice(7, 60))]
    added = sum(sums_of(part).stacked() for part in parts)
    torch.testing.assert_close(added, sums_of(inputs).stacked())


def test_numbers_off_the_mask_do_not_matter_even_where_they_are_infinite_or_not_numbers() -> None:
    inputs = tokens(2)
    expected = sums_of(inputs).stacked()
    off = ~inputs["loss_mask_T"]
    for bad in (float("nan"), float("inf"), -1e30):
        spoiled = {
            name: values if name == "loss_mask_T" else torch.where(off, bad, values)
            for name, values in inputs.items()
        }
        spoiled["logp_T"] = spoiled["logp_T"].requires_grad_()
        found = sums_of(spoiled)
        found.total.backward()
        torch.testing.assert_close(found.stacked(), expected)
        grad = spoiled["logp_T"].grad
        assert grad is not None
        assert torch.isfinite(grad).all()
        assert not grad[off].any()


def test_loss_without_a_reference_has_no_kl_and_refuses_a_weight_for_it() -> None:
    inputs = {**tokens(3), "reference_logp_T": None}
    free = LossWeights(clip_low=0.2, clip_high=0.2)
    assert float(sums_of(inputs, free).kl) == 0.0  # type: ignore[arg-type]
    with pytest.raises(ShapeError, match="reference"):
        sums_of(inputs)  # type: ignore[arg-type]


def test_loss_refuses_inputs_of_different_lengths() -> None:
    inputs = tokens(4)
    inputs["advantage_T"] = inputs["advantage_T"][:-1]
    with pytest.raises(ShapeError, match="shapes"):
        sums_of(inputs)
