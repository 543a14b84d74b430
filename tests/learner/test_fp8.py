"""FP8 in the learner, as far as a CPU goes: Megatron's objects, refusals, the emulated protocol."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from megarl.config.fp8_protocol import comparison_of, faults
from megarl.config.precision import PrecisionConfig
from megarl.errors import ConfigError
from megarl.learner.agent import set_environment
from tests.learner import random_model
from tests.megatron_engine import Engine

ROOT = Path(__file__).parents[2]
SIZES = {"hidden_size": 64, "head_dim": 16, "intermediate_size": 64}
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory, megatron_engine: Engine) -> dict[str, Any]:
    """What one process of `fp8_single.py` found."""
    printed = megatron_engine.run("tests.learner.fp8_single", tmp_path_factory.mktemp("fp8"))
    found: dict[str, Any] = json.loads(printed.splitlines()[-1])
    return found


def objects(answers: dict[str, Any], name: str) -> tuple[dict[str, Any], ...]:
    found = answers["objects"][name]
    return found["transformer"], found["buffers"], found["optimizer"]


def test_without_fp8_megatrons_objects_are_as_they_were(answers: dict[str, Any]) -> None:
    assert objects(answers, "off") == ({}, {}, {})


def test_megatron_gets_recipe_and_layers_in_bf16(answers: dict[str, Any]) -> None:
    """What is not listed is Megatron's default, such as one layer at the start in bf16."""
    transformer, buffers, optimizer = objects(answers, "blockwise")
    assert transformer == {
        "fp8": "e4m3",
        "fp8_recipe": "blockwise",
        "first_last_layers_bf16": True,
        "num_layers_at_end_in_bf16": 0,
        "fp8_amax_history_len": 1024,
        "fp8_amax_compute_algo": "max",
    }
    assert (buffers, optimizer) == ({}, {})


def test_megatron_gets_history_and_group_of_delayed_scales(answers: dict[str, Any]) -> None:
    """`delayed` and `most_recent` are Megatron's defaults."""
    transformer, buffers, optimizer = objects(answers, "delayed")
    assert transformer == {
        "fp8": "hybrid",
        "fp8_amax_history_len": 16,
        "tp_only_amax_red": True,
        "num_layers_at_start_in_bf16": 0,
        "num_layers_at_end_in_bf16": 0,
    }
    assert (buffers, optimizer) == ({}, {})


@pytest.mark.parametrize("recipe", ["mxfp8", "tensorwise"])
def test_weights_in_fp8_are_known_to_buffers_and_optimizer(
    answers: dict[str, Any], recipe: str
) -> None:
    transformer, buffers, optimizer = objects(answers, f"{recipe} weights")
    assert transformer["fp8_param"] and buffers["fp8_param_gather"]
    assert optimizer["fp8_recipe"] == recipe
    for fields in (buffers, optimizer):
        assert fields.get("reuse_grad_buf_for_mxfp8_param_ag", False) == (recipe == "mxfp8")


def test_megatron_refuses_what_the_settings_refuse_first(answers: dict[str, Any]) -> None:
    told = answers["objects"]["refused by Megatron"]["refused"]
    assert "Delayed scaling does not support first / last layer in BF16" in told


def test_learner_refuses_fp8_that_megatron_would_silently_leave_off(
    answers: dict[str, Any],
) -> None:
    assert answers["objects"]["blockwise"]["silently off"]
    no_gpu, no_engine, no_variable = answers["on a cpu"].splitlines()
    assert no_gpu.startswith("ConfigError: learner.precision.fp8 = e4m3: torch sees no GPU")
    assert "Transformer Engine is not installed" in no_engine
    assert no_variable.startswith("NVTE_FP8_BLOCK_SCALING_FP32_SCALES is not set")


def test_emulated_products_are_the_rule_written_out(answers: dict[str, Any]) -> None:
    assert answers["product"] == {"output": 0.0, "input": 0.0, "weight": 0.0}


@pytest.mark.parametrize(
    "run", ["blockwise", "hybrid", "tensorwise", "mxfp8", "two layers in bf16"]
)
def test_golden_batch_in_emulated_fp8_is_within_the_bounds_and_not_bf16(
    answers: dict[str, Any], run: str
) -> None:
    found = comparison_of(answers["runs"][run])
    assert faults(found) == []
    assert found.emulated and found.num_tokens == 47
    assert 0.9 < found.whole.cosine < 0.999
    assert found.mean_abs_logprob > 0.005
    assert found.rollout_bf16 == pytest.approx(9.0 - found.bf16_loss)  # all of them are -9
    assert found.rollout_fp8 == pytest.approx(9.0 - found.fp8_loss)
    assert list(found.gradients)[1:4] == ["layer 0", "layer 1", "layer 2"]


def test_gradients_in_e5m2_are_less_like_bf16_and_the_forward_pass_is_the_same(
    answers: dict[str, Any],
) -> None:
    e4m3, hybrid = (comparison_of(answers["runs"][name]) for name in ("blockwise", "hybrid"))
    assert e4m3.fp8_loss == hybrid.fp8_loss
    assert hybrid.whole.cosine < e4m3.whole.cosine


def test_layers_kept_in_bf16_bring_the_gradient_nearer(answers: dict[str, Any]) -> None:
    all_fp8, one = (
        comparison_of(answers["runs"][name]) for name in ("blockwise", "two layers in bf16")
    )
    assert one.whole.cosine > all_fp8.whole.cosine
    assert one.mean_abs_logprob < all_fp8.mean_abs_logprob


@pytest.mark.parametrize("fault", ["unscaled gradients", "doubled weights"])
def test_wrong_scales_are_beyond_the_bounds(answers: dict[str, Any], fault: str) -> None:
    assert any(text.startswith("gradient: its cosine") for text in answers[fault])


def test_ranks_agree_on_magnitudes_over_a_stage_or_over_a_replica_of_it(
    answers: dict[str, Any],
) -> None:
    assert answers["amax groups"] == {"replicas": [0, 1, 2, 3], "tensor": [0, 1]}


def test_launcher_sets_what_transformer_engine_reads_and_overrides_nobody(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    name = "NVTE_FP8_BLOCK_SCALING_FP32_SCALES"
    environ = {"PATH": os.environ["PATH"]}
    monkeypatch.setattr(os, "environ", environ)
    set_environment(1, PrecisionConfig())
    assert name not in environ
    set_environment(1, PrecisionConfig(fp8="e4m3"))
    set_environment(1, PrecisionConfig(fp8="e4m3"))  # what it has set itself is no fault
    assert environ[name] == "1"
    environ[name] = "0"
    with pytest.raises(ConfigError, match=f"{name} = '0' is set"):
        set_environment(1, PrecisionConfig(fp8="e4m3"))


def settings(folder: Path, more: str = "") -> str:
    random_model.write(folder / "model", deviation=0.05, **SIZES)
    text = (
        f'[run]\ndir = "{folder}/runs"\n[actor]\nmodel = "{folder}/model"\n'
        f'[learner.precision]\nfp8 = "e4m3"\n{more}'
    )
    (folder / "run.toml").write_text(text)
    return str(folder / "run.toml")


def check_fp8(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "megarl", "check", "fp8", *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
        cwd=ROOT,
        env=ENVIRONMENT,
    )


def test_dry_check_prints_fields_bounds_and_refusals_without_an_engine(tmp_path: Path) -> None:
    path = settings(tmp_path, 'fp8_first_layers_bf16 = 1\nfp8_recipe = "delayed"\n')
    done = check_fp8(path, "--dry", "--learner.parallel.tp", "2")
    assert done.returncode == 0, done.stderr
    assert "TransformerConfig            fp8=e4m3 fp8_recipe=delayed" in done.stdout
    assert "padded to a multiple of 32 over learner.parallel.tp x cp = 2 x 1" in done.stdout
    assert "each layer's 0.7 or more" in done.stdout
    assert "tokens drawn at random by a fixed seed" in done.stdout
    (refused,) = (line for line in done.stdout.splitlines() if line.startswith("refused"))
    assert "with learner.precision.fp8_recipe = delayed" in refused


@pytest.mark.slow
def test_check_without_a_gpu_says_so_and_ends(tmp_path: Path) -> None:
    done = check_fp8(settings(tmp_path))
    assert done.returncode == 1
    assert "torch sees no GPU, and Megatron would silently compute without FP8" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_check_of_two_tensor_ranks_is_emulated_and_told_layer_by_layer(tmp_path: Path) -> None:
    done = check_fp8(settings(tmp_path), "--emulate", "--learner.parallel.tp", "2")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith("EMULATED on CPUs")
    assert "FP8: within its bounds" in done.stdout
    assert [line.split()[:2] for line in done.stdout.splitlines() if line.startswith("  ")] == [
        ["embedding.word_embeddings.weight", "cosine"],
        ["layer", "0"],
        ["layer", "1"],
        ["decoder.final_layernorm.weight", "cosine"],
    ]
