"""The parity gate's verdict."""

import math

import pytest

from megarl.config.schema import Config
from megarl.controller.parity import check
from megarl.errors import ParityError


def config(params: str = "fp32", **parity: float) -> Config:
    return Config.model_validate(
        {"actor": {"model": "m"}, "learner": {"precision": {"params": params}}, "parity": parity}
    )


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
