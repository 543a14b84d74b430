"""The parity gate's bound and verdict."""

import math

import pytest

from megarl.config.schema import Config
from megarl.controller.parity import FP32_BOUND, bound, check
from megarl.errors import ParityError


def config(params: str = "fp32", **parity: float) -> Config:
    return Config.model_validate(
        {"actor": {"model": "m"}, "learner": {"precision": {"params": params}}, "parity": parity}
    )


def test_fp32_has_its_own_bound_whatever_the_baseline() -> None:
    assert bound(config(), None) == bound(config(), 1.0) == FP32_BOUND


def test_bf16_is_bounded_by_twice_what_equal_weights_showed() -> None:
    assert bound(config("bf16"), 0.04) == 0.08
    assert bound(config("bf16"), 0.001) == 0.05


def test_setting_overrides_the_bound() -> None:
    assert bound(config(max_mean_abs_logprob=0.3), None) == 0.3


def test_difference_after_a_sync_of_equal_engines_is_blamed_on_the_layout() -> None:
    with pytest.raises(ParityError, match="layout of the sent weights"):
        check(config(), 0.5, 1e-6, "after the first weight sync")


def test_difference_at_start_is_blamed_on_precision_or_processing() -> None:
    with pytest.raises(ParityError, match="precision"):
        check(config(), 0.5, None, "at start")


def test_difference_that_is_not_a_number_stops_the_run() -> None:
    with pytest.raises(ParityError):
        check(config(), math.nan, None, "at start")


def test_agreement_within_the_bound_passes() -> None:
    check(config(), 5e-6, None, "at start")
