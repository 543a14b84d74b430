"""An optimizer's state in host memory: what of it Megatron would not do is refused."""

from __future__ import annotations

import pytest

from megarl.config.optimizer import OptimizerConfig, offload_fields

HALF = ("--learner.optimizer.offload_fraction", "0.5")


def test_offload_on_a_cpu_is_refused_in_words(place) -> None:
    assert place.violation(*HALF) == (
        "learner.optimizer.offload_fraction = 0.5 on a CPU: all of the state is in host memory "
        "there, and Megatron's hybrid optimizer moves what is on a GPU only; remove it"
    )


def test_offload_of_a_critic_is_looked_at_where_there_is_one(place) -> None:
    told = place.violation(
        *("--advantage.estimator", "gae"), *("--critic.optimizer.offload_fraction", "1.0")
    )
    assert told.startswith("critic.optimizer.offload_fraction = 1.0 on a CPU")


@pytest.mark.parametrize("fraction", ["-0.1", "1.1"])
def test_offload_is_a_share(place, fraction: str) -> None:
    assert "offload_fraction" in place.violation("--learner.optimizer.offload_fraction", fraction)


@pytest.fixture
def on_gpu(place, monkeypatch: pytest.MonkeyPatch):
    """A machine that has a GPU by its environment."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    return place


def test_offload_on_a_gpu_is_taken(on_gpu) -> None:
    assert on_gpu.load("--launch.device", "cuda", *HALF).learner.optimizer.offload_fraction == 0.5


def test_offload_of_weights_in_fp8_is_refused(on_gpu) -> None:
    told = on_gpu.violations(
        "--launch.device", "cuda", *HALF, "--learner.precision.fp8_param", "true"
    )
    assert any("weights in FP8 have no shard" in text for text in told)


def test_megatron_is_asked_for_gradients_where_it_puts_them() -> None:
    fields = offload_fields(OptimizerConfig(offload_fraction=0.25))
    assert fields["optimizer_cpu_offload"] and fields["use_precision_aware_optimizer"]
    assert offload_fields(OptimizerConfig()) == {}
