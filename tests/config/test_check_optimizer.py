"""An optimizer's state in host memory: what Megatron does not do yet is refused, never left off."""

from __future__ import annotations

import pytest

from megarl.config.optimizer import OptimizerConfig, offload_fields

HALF = ("--learner.optimizer.offload_fraction", "0.5")


def test_offload_on_a_cpu_is_refused_in_words(place) -> None:
    assert place.violation(*HALF) == (
        "learner.optimizer.offload_fraction = 0.5: all of the state is in host memory on a CPU; "
        "remove it, and see docs/memory.md for what else takes less memory"
    )


def test_offload_on_a_gpu_is_refused_with_its_reason(
    place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    told = place.violation("--launch.device", "cuda", *HALF)
    assert "a run cannot do it yet: Megatron-Core loads a checkpoint into a new hybrid" in told


def test_offload_of_a_critic_is_looked_at_where_there_is_one(place) -> None:
    told = place.violation(
        *("--advantage.estimator", "gae"), *("--critic.optimizer.offload_fraction", "1.0")
    )
    assert told.startswith("critic.optimizer.offload_fraction = 1.0: all of the state")


@pytest.mark.parametrize("fraction", ["-0.1", "1.1"])
def test_offload_is_a_share(place, fraction: str) -> None:
    assert "offload_fraction" in place.violation("--learner.optimizer.offload_fraction", fraction)


def test_megatron_is_asked_for_gradients_where_it_puts_them() -> None:
    fields = offload_fields(OptimizerConfig(offload_fraction=0.25))
    assert fields["optimizer_cpu_offload"] and fields["use_precision_aware_optimizer"]
    assert offload_fields(OptimizerConfig()) == {}
