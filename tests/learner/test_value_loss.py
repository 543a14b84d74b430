"""The critic's loss against its formula, one token at a time."""

from __future__ import annotations

import pytest
import torch

from megarl.errors import ShapeError
from megarl.learner.value_loss import value_loss


def drawn(seed: int = 2, num: int = 40) -> dict[str, torch.Tensor]:
    """Values and their targets in double precision; about two of three tokens count."""
    generator = torch.Generator().manual_seed(seed)
    value, old, target = torch.randn(3, num, generator=generator, dtype=torch.float64)
    mask = torch.rand(num, generator=generator) > 0.35
    return {"value_T": value, "old_value_T": old, "return_T": target, "loss_mask_T": mask}


@pytest.mark.parametrize("clip", [0.0, 0.2, 1.0])
def test_loss_and_its_gradient_are_those_of_the_formula(clip: float) -> None:
    given = drawn()
    mine = given["value_T"].clone().requires_grad_()
    sums = value_loss(**{**given, "value_T": mine}, clip=clip)
    sums.loss.backward()
    theirs = given["value_T"].clone().requires_grad_()
    expected, clipped = torch.zeros((), dtype=torch.float64), 0
    for v, old, target, counts in zip(theirs, *list(given.values())[1:], strict=True):
        if not counts:
            continue
        free = (v - target) ** 2
        if clip:
            near = min(max(v, old - clip), old + clip)
            clipped += int((near - target) ** 2 > free)
            free = torch.max(free, (near - target) ** 2)
        expected = expected + free / 2
    expected.backward()
    assert sums.loss.item() == pytest.approx(expected.item(), rel=1e-12)
    torch.testing.assert_close(mine.grad, theirs.grad)
    assert int(sums.clipped) == clipped
    assert bool(clipped) is (clip > 0)
    assert sums.stacked().tolist() == [sums.loss.item(), clipped]


def test_value_that_is_clipped_away_from_its_target_has_no_gradient() -> None:
    value = torch.tensor([0.9], requires_grad=True)
    one = {"old_value_T": torch.tensor([0.0]), "loss_mask_T": torch.tensor([True])}
    sums = value_loss(value, return_T=torch.tensor([1.0]), **one, clip=0.2)
    sums.loss.backward()
    assert sums.loss.item() == pytest.approx(0.5 * (0.2 - 1.0) ** 2)
    assert value.grad is not None and value.grad.item() == 0.0 and int(sums.clipped) == 1


def test_what_is_not_finite_under_the_mask_changes_nothing() -> None:
    given = drawn()
    spoilt = {
        name: tensor if name == "loss_mask_T" else torch.where(given["loss_mask_T"], tensor, bad)
        for (name, tensor), bad in zip(
            given.items(), (float("nan"), float("inf"), float("nan"), 0.0), strict=True
        )
    }
    expected = value_loss(**given, clip=0.2)
    spoilt["value_T"].requires_grad_()
    found = value_loss(**spoilt, clip=0.2)
    found.loss.backward()
    assert found.loss.item() == expected.loss.item()
    grad = spoilt["value_T"].grad
    assert grad is not None and grad.isfinite().all() and not grad[~given["loss_mask_T"]].any()


def test_inputs_of_two_lengths_are_refused() -> None:
    with pytest.raises(ShapeError, match="shapes"):
        value_loss(**{**drawn(), "return_T": torch.zeros(3)}, clip=0.2)
