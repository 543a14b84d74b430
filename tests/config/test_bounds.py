"""How far log-probs of the two engines may be apart."""

from __future__ import annotations

from megarl.config.bounds import FP32_BOUND, probe_bound
from megarl.config.bounds import mean_difference_bound as bound
from megarl.config.schema import Config


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


def test_probe_of_few_unlikely_tokens_is_looser_than_the_gate_but_in_fp32() -> None:
    assert probe_bound(config()) == FP32_BOUND
    assert probe_bound(config("bf16")) > bound(config("bf16"))
    assert probe_bound(config("bf16", max_mean_abs_logprob=0.3)) == 0.3


def test_probe_is_as_loose_for_a_learner_in_fp8_as_for_float8_servers() -> None:
    fp8 = config("bf16")
    for group, settings in (
        ("learner", {"precision": {"params": "bf16", "fp8": "e4m3"}}),
        ("rollout", {"precision": {"weights": "fp8"}}),
    ):
        assert probe_bound(Config.model_validate({**fp8.model_dump(), group: settings})) == 0.5


def test_gate_of_a_learner_in_fp8_goes_by_what_equal_weights_showed() -> None:
    """The baseline of bf16 servers has the learner's FP8 in it."""
    fp8 = config("bf16").model_dump()
    fp8["learner"]["precision"]["fp8"] = "e4m3"
    assert bound(Config.model_validate(fp8), 0.06) == 0.12
