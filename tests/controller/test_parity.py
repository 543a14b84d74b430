"""The parity gate's verdict, and the bound of a colocated run's batch."""

import math

import pytest

from megarl.config.schema import Config
from megarl.controller.parity import check, check_batch
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


def colocated(params: str = "fp32", probe_tokens: int = 16) -> Config:
    return Config.model_validate(
        {
            "actor": {"model": "m"},
            "learner": {"precision": {"params": params}},
            "placement": {"mode": "colocated"},
            "weight_sync": {"probe_tokens": probe_tokens},
        }
    )


@pytest.mark.parametrize("mean", [2e-4, math.nan])
def test_colocated_runs_batch_is_not_learned_from_where_its_log_probs_differ(mean: float) -> None:
    with pytest.raises(ParityError, match=r"at version 7 .*bound 1e-04.*weights were not changed"):
        check_batch(colocated(), {"mismatch/mean_abs_logprob": mean}, 7)


def test_batch_within_the_probes_bound_is_learned_from() -> None:
    check_batch(colocated(), {"mismatch/mean_abs_logprob": 9e-5}, 7)
    check_batch(colocated("bf16"), {"mismatch/mean_abs_logprob": 0.19}, 7)


def test_batch_is_not_held_to_a_bound_where_a_probe_was_made_or_is_turned_off() -> None:
    for setting in (config(), colocated(probe_tokens=0)):
        check_batch(setting, {"mismatch/mean_abs_logprob": 2.0}, 7)
