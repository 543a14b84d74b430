"""The learner on one rank of a real Megatron-Core: what it refuses, keeps and repeats."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from tests.learner import tiny_models
from tests.megatron_engine import Engine


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory, megatron_engine: Engine) -> dict[str, Any]:
    """What one process of `single_rank.py` found."""
    folder = tmp_path_factory.mktemp("single")
    tiny_models.make("qwen3", folder / "model")
    printed = megatron_engine.run("tests.learner.single_rank", folder / "model", folder)
    found: dict[str, Any] = json.loads(printed.splitlines()[-1])
    return found


def test_unknown_transformer_field_is_refused_with_the_nearest(answers: dict[str, Any]) -> None:
    told = answers["fields"]["recompute_granularty"]
    assert told.startswith("ConfigError: learner.transformer_config.recompute_granularty")
    assert "recompute_granularity" in told


def test_transformer_field_that_megarl_sets_is_refused(answers: dict[str, Any]) -> None:
    assert "megarl sets it from the model's config.json" in answers["fields"]["num_layers"]


def test_every_field_that_megarl_sets_is_refused_with_the_settings(answers: dict[str, Any]) -> None:
    assert answers["settable"] == []


def test_transformer_field_that_is_a_setting_is_refused_with_its_name(
    answers: dict[str, Any],
) -> None:
    assert "megarl sets it; use learner.precision.fp8" in answers["fields"]["fp8"]


def test_fp4_without_transformer_engine_is_refused(answers: dict[str, Any]) -> None:
    assert "silently run without it" in answers["fields"]["fp4"]


def test_mesh_of_another_size_than_the_processes_is_refused(answers: dict[str, Any]) -> None:
    assert "1 processes, but tp=2" in answers["processes"]


def test_schedule_for_another_number_of_ranks_is_refused(answers: dict[str, Any]) -> None:
    assert answers["two ranks"].startswith("ShapeError: the schedule has microbatches [3, 3]")


def test_step_whose_gradient_is_not_finite_is_skipped_and_counted(answers: dict[str, Any]) -> None:
    found = answers["not a number"]
    assert found["skipped"] == [0.0, 1.0, 1.0, 0.0]
    assert found["stays"], "a skipped step changed weights, moments or the schedule"
    assert "grad_norm" not in found["skipped step"] and "lr" not in found["skipped step"]
    assert found["skipped step"]["packing/efficiency"] > 0.5
    assert all(math.isfinite(value) for value in found["skipped step"].values())


def test_step_after_skipped_ones_is_that_of_a_run_without_them(answers: dict[str, Any]) -> None:
    assert answers["not a number"]["goes on"]


def test_more_skipped_steps_in_a_row_than_allowed_end_the_run(answers: dict[str, Any]) -> None:
    found = answers["not a number"]
    assert found["in a row"] == [1.0, 1.0]
    for told in (found["told"], found["told again"]):
        assert told.startswith("LearnerError: the gradient norm is nan, for optimizer step 3 in a ")
        assert "learner.optimizer.max_skipped_steps = 2" in told
    assert found["unchanged"]


def test_learning_rate_rises_and_falls_as_its_formula_says_also_after_a_resume(
    answers: dict[str, Any],
) -> None:
    top, least, warm, last = 8e-4, 1e-4, 2, 7
    shapes = {
        "constant": lambda part: top,
        "linear": lambda part: top - (top - least) * part,
        "cosine": lambda part: least + (top - least) * (1 + math.cos(math.pi * part)) / 2,
    }
    for name, shape in shapes.items():
        found = answers["schedules"][name]
        expected = [
            top * step / warm if step <= warm else shape(min(1.0, (step - warm) / (last - warm)))
            for step in range(1, 11)
        ]
        assert found["lr"] == pytest.approx(expected, rel=1e-12), name
        assert found["again"] == found["lr"][4:]


def test_weight_decay_is_of_matrices_and_of_no_vector(answers: dict[str, Any]) -> None:
    found = answers["decayed"]
    assert found["vectors"] == 0.0
    assert found["matrices"] < 1e-6
    assert found["largest"] > 1e-3


def test_gradients_are_scaled_to_the_norm_they_are_clipped_at(answers: dict[str, Any]) -> None:
    found = answers["clipped"]
    assert found["told"] > 1.0
    assert found["applied"] == pytest.approx(0.25, rel=1e-5)
    assert found["moment"] == pytest.approx((1 - 0.9) * 0.25, rel=1e-5)


def test_learning_rate_warms_up_and_the_loss_falls(answers: dict[str, Any]) -> None:
    found = answers["warm-up"]
    assert found["lr"] == pytest.approx([1e-4, 2e-4, 3e-4, 3e-4])
    assert found["loss"] == sorted(found["loss"], reverse=True)


def test_same_run_again_gives_the_same_bits(answers: dict[str, Any]) -> None:
    assert answers["warm-up"]["same"]


def test_gradients_do_not_depend_on_where_and_in_which_parts_the_output_layer_runs(
    answers: dict[str, Any],
) -> None:
    found = answers["heads"]
    assert found["rows"][0] < found["rows"][1] / 1.5, "the output layer ran on too many positions"
    assert found["again"] == 0.0
    assert found["unselected"] < 1e-7
    assert 0.0 < found["in parts"] < 5e-6  # products of three rows are rounded otherwise


def test_learning_rate_of_zero_changes_no_weight(answers: dict[str, Any]) -> None:
    assert answers["still"]


def test_second_epoch_does_not_change_the_mismatch(answers: dict[str, Any]) -> None:
    assert answers["two epochs"] == answers["one epoch"]
    assert answers["one epoch"]["mismatch/mean_abs_logprob"] > 0.05


def test_nothing_to_score_is_no_mismatch(answers: dict[str, Any]) -> None:
    assert set(answers["no sample"].values()) == {0.0}
    assert answers["no sequence"] == []


def test_bf16_is_near_fp32_and_learns(answers: dict[str, Any]) -> None:
    found = answers["bf16"]
    assert found["types"] == ["torch.bfloat16"]
    pairs = zip(found["logprobs"], answers["fp32 logprobs"], strict=True)
    differences = [abs(a - b) for ours, theirs in pairs for a, b in zip(ours, theirs, strict=True)]
    assert 0 < sum(differences) / len(differences) < 0.05
    assert found["losses"][1] < found["losses"][0]


def test_weights_in_shared_memory_learn_save_and_load_as_in_private_memory(
    answers: dict[str, Any],
) -> None:
    assert answers["shared"] == {
        "inside": True,
        "file": True,
        "second": True,
        "closed": True,
        "same": True,
    }


def test_reference_of_another_checkpoint_scores_as_that_policy_does(
    answers: dict[str, Any],
) -> None:
    found = answers["reference"]["policy"]
    assert found["off"] == 0.0
    assert found["stays"]
    assert found["kl"] > 1e-3


def test_reference_in_float8_scores_nearly_so_for_less_memory_and_leaves_shared_weights_alone(
    answers: dict[str, Any],
) -> None:
    found, whole = answers["reference"]["fp8"], answers["reference"]["policy"]
    assert 0 < found["off"] < 0.5
    assert 0 < found["error"] < 0.04
    assert found["bytes"] < whole["bytes"]
    assert found["is shared"] and found["stays"]
