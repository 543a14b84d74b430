"""The verdict on FP8: each figure beyond its bound is named, and nothing else is."""

from __future__ import annotations

import dataclasses
import json
import math

import pytest

from megarl.config.fp8_protocol import Comparison, Likeness, comparison_of, faults, page

GOOD = Comparison(
    num_tokens=100,
    bf16_loss=2.0,
    fp8_loss=2.01,
    gradients={
        "embedding.word_embeddings.weight": Likeness(0.99, 1.0, 1.0),
        "layer 0": Likeness(0.98, 1.0, 1.0),
        "layer 1": Likeness(3.96, 4.0, 4.0),
    },
    mean_abs_logprob=0.03,
    max_abs_logprob=0.4,
    rollout_bf16=0.05,
    rollout_fp8=0.06,
    emulated=False,
)


def changed(**fields: object) -> list[str]:
    return faults(dataclasses.replace(GOOD, **fields))  # type: ignore[arg-type]


def test_comparison_within_its_bounds_has_no_fault() -> None:
    assert faults(GOOD) == []


def test_fp8_that_differs_in_nothing_was_silently_left_off() -> None:
    (text,) = changed(fp8_loss=2.0, mean_abs_logprob=0.0, max_abs_logprob=0.0)
    assert text.endswith("so nothing was computed in FP8")


@pytest.mark.parametrize("loss", [1.89, 2.11, math.nan, math.inf])
def test_loss_that_is_further_off_than_its_bound_is_a_fault(loss: float) -> None:
    (text,) = changed(fp8_loss=loss)
    assert text.startswith(f"loss: {loss:.6g} in FP8, 2 in bf16, apart by ")


def test_layer_that_points_elsewhere_is_named_even_where_the_whole_gradient_is_right() -> None:
    gradients = {**GOOD.gradients, "layer 2": Likeness(0.0005, 0.001, 0.001)}
    assert changed(gradients=gradients) == [
        "layers: the cosine of the gradient with that in bf16 is below 0.7 in layer 2 (0.5000)"
    ]


def test_gradient_that_points_elsewhere_as_a_whole_is_a_fault() -> None:
    texts = changed(gradients={"layer 0": Likeness(0.89, 1.0, 1.0)})
    assert texts == ["gradient: its cosine with that in bf16 is 0.8900; the bound is 0.9"]


@pytest.mark.parametrize("factor", [0.7, 1.3])
def test_gradient_of_another_length_is_a_fault_though_it_points_the_same_way(factor: float) -> None:
    texts = changed(gradients={"layer 0": Likeness(factor, 1.0, factor**2)})
    assert texts == [
        f"layers: the gradient is longer or shorter than in bf16 by over 25% in layer 0 "
        f"({factor:.4f})"
    ]


def test_gradient_that_is_not_finite_is_a_fault() -> None:
    texts = changed(gradients={"layer 0": Likeness(math.nan, 1.0, math.nan)})
    assert [text.partition(":")[0] for text in texts] == ["gradient", "layers", "layers"]


def test_many_layers_are_counted_and_few_named() -> None:
    wrong = {f"layer {number}": Likeness(0.1, 1.0, 1.0) for number in range(9)}
    assert any("layer 4 (0.1000) and 4 more" in text for text in changed(gradients=wrong))


def test_logprobs_far_from_bf16_are_a_fault() -> None:
    assert changed(mean_abs_logprob=0.26) == [
        "log-probs: 0.26 nats from those in bf16 in the mean; the bound is 0.25"
    ]


def test_rollout_engine_may_be_as_far_off_as_it_is_from_bf16_and_little_further() -> None:
    assert changed(rollout_bf16=0.2, rollout_fp8=0.44) == []
    assert changed(rollout_bf16=0.2, rollout_fp8=0.46) == [
        "rollout: log-probs in FP8 are 0.46 nats from the rollout engine's in the mean, those in "
        "bf16 0.2; the bound is 0.45"
    ]
    assert changed(rollout_bf16=None, rollout_fp8=None) == []


def test_cosine_is_that_of_all_parts_together() -> None:
    """[1, 0] and [0, 2] beside [1, 1] and [1, 1]: cos of [1, 0, 1, 1] and [0, 2, 1, 1]."""
    whole = Likeness(0.0, 1.0, 4.0) + Likeness(2.0, 2.0, 2.0)
    assert whole.cosine == pytest.approx(2 / math.sqrt(3 * 6))
    assert whole.length == pytest.approx(math.sqrt(2))
    assert Likeness(0.0, 0.0, 0.0).cosine == Likeness(0.0, 0.0, 0.0).length == 1.0
    assert Likeness(0.0, 0.0, 1.0).cosine == 0.0


def test_comparison_survives_json_and_is_printed_with_every_layer() -> None:
    again = comparison_of(json.loads(json.dumps(dataclasses.asdict(GOOD))))
    assert again == GOOD
    text = page(again)
    assert "bf16 2, FP8 2.01 nats a token (0.500% apart) over 100 tokens" in text
    assert [line.split()[0:2] for line in text.splitlines()[-2:]] == [
        ["layer", "0"],
        ["layer", "1"],
    ]
