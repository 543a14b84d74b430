"""FP8 that Megatron or Transformer Engine would refuse, or silently leave off, is refused here."""

from __future__ import annotations

from typing import Any

import pytest

from megarl.actor.shape import read_shape
from megarl.config.check_fp8 import block_differences
from megarl.config.fp8 import (
    RECIPES,
    environment,
    environment_faults,
    gpu_faults,
    token_multiple,
)
from megarl.config.precision import PrecisionConfig
from tests.config.conftest import EXPERTS

FP8 = ("--learner.precision.fp8", "e4m3", "--launch.device", "cuda")
SIZES = {
    "hidden_size": 64,
    "head_dim": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 128,
}


@pytest.fixture
def fp8(place, monkeypatch: pytest.MonkeyPatch):
    """A model whose sizes FP8 takes, on a machine that has a GPU by its environment."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    place.change_model(**SIZES)
    return place


def test_run_in_fp8_is_taken(fp8) -> None:
    assert fp8.load(*FP8).learner.precision.uses_fp8


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (
            "--learner.precision.params fp32",
            "learner.precision.params = fp32 beside learner.precision.fp8 = e4m3: Transformer "
            "Engine's layers quantize bf16 numbers; use bf16",
        ),
        (
            "--learner.precision.fp8_recipe delayed --learner.precision.fp8_first_layers_bf16 1",
            "learner.precision.fp8_first_layers_bf16 with learner.precision.fp8_recipe = delayed: "
            "entering and leaving FP8 layer by layer breaks its reduction of largest magnitudes, "
            "and Megatron refuses it; use tensorwise, blockwise or mxfp8, or 0 layers",
        ),
        (
            "--learner.precision.fp8_first_layers_bf16 2 "
            "--learner.precision.fp8_last_layers_bf16 2",
            "learner.precision.fp8_first_layers_bf16 + learner.precision.fp8_last_layers_bf16 = "
            "2 + 2 leave none of 4 layers in FP8; use fewer, or learner.precision.fp8 = off",
        ),
        (
            "--learner.precision.fp8_last_layers_bf16 3 --learner.parallel.pp 2",
            "learner.precision.fp8_last_layers_bf16 = 3 is more than the 2 layers of a pipeline "
            "stage (4 over learner.parallel.pp = 2), which is what Megatron takes; use fewer",
        ),
        (
            "--learner.precision.fp8_param_gather",
            "learner.precision.fp8_param_gather without learner.precision.fp8_param: there are no "
            "weights in FP8 to gather; set both, or none",
        ),
        (
            "--learner.precision.fp8_amax_history 16",
            "learner.precision.fp8_amax_history = 16 is of delayed scales, and "
            "learner.precision.fp8_recipe = blockwise takes each from the numbers themselves; "
            "remove one",
        ),
        (
            "--learner.transformer_config.fp8_dot_product_attention true",
            "learner.transformer_config.fp8_dot_product_attention = true: Megatron ignores it with "
            "learner.precision.fp8_recipe = blockwise; remove it",
        ),
        (
            "--learner.transformer_config.fp8_wgrad false",
            "learner.transformer_config.fp8_wgrad = false: Megatron ignores it with "
            "learner.precision.fp8_recipe = blockwise; remove it",
        ),
        (
            "--learner.transformer_config.fp8 hybrid",
            "learner.transformer_config.fp8: megarl sets it; use learner.precision.fp8",
        ),
    ],
)
def test_combination_is_refused_in_words(fp8, arguments: str, text: str) -> None:
    assert fp8.violation(*FP8, *arguments.split()) == text


def test_fp8_on_a_cpu_is_refused_where_megatron_would_leave_it_off(fp8) -> None:
    text = fp8.violation("--learner.precision.fp8", "hybrid", "--launch.device", "cpu")
    assert "Megatron would silently compute without FP8" in text


def test_weights_in_fp8_without_their_gather_would_never_change_and_are_refused(fp8) -> None:
    stuck, not_yet = fp8.violations(*FP8, "--learner.precision.fp8_param")
    assert "no step would change them, without an error" in stuck
    assert not_yet.endswith("a run takes false as yet")


def test_weights_in_mxfp8_are_refused_for_what_a_sync_reads(fp8) -> None:
    given = ("fp8_param=true", "fp8_param_gather=true", "fp8_recipe=mxfp8")
    text = fp8.violation(*FP8, *(f"--learner.precision.{each}" for each in given))
    assert "every weight sync is read from the learner's live weights" in text
    assert "the buffer of weights, which a sync reads in place, is that of gradients" in text


@pytest.mark.parametrize("name", [n for n in PrecisionConfig.model_fields if n.startswith("fp8_")])
def test_setting_of_fp8_without_fp8_is_refused(fp8, name: str) -> None:
    other: dict[str, Any] = {
        "fp8_recipe": "mxfp8",
        "fp8_amax_history": 1,
        "fp8_amax_algorithm": "most_recent",
        "fp8_amax_group": "tensor",
        "fp8_first_layers_bf16": 1,
        "fp8_last_layers_bf16": 1,
    }
    text = fp8.violation(f"--learner.precision.{name}={str(other.get(name, True)).lower()}")
    assert text.startswith(f"learner.precision.{name}")
    assert "has no meaning with learner.precision.fp8 = off" in text


def test_size_that_tensor_ranks_cut_too_small_is_named_with_its_arithmetic(fp8) -> None:
    fp8.change_model(**{**SIZES, "intermediate_size": 96})
    given = ("--learner.parallel.tp", "4", "--learner.precision.fp8_recipe", "blockwise")
    assert fp8.violation(*FP8, *given) == (
        "learner.precision.fp8_recipe = blockwise: intermediate_size = 96 over "
        "learner.parallel.tp = 4 leaves 24 for a rank, which is no multiple of 16, as its products "
        "need; use a smaller learner.parallel.tp, or use learner.precision.fp8 = off"
    )


def test_size_of_a_model_that_no_layout_makes_right_is_named(fp8) -> None:
    fp8.change_model(**{**SIZES, "hidden_size": 72})
    assert fp8.violation(*FP8) == (
        "learner.precision.fp8_recipe = blockwise: hidden_size = 72 is no multiple of 16, as its "
        "products need; use learner.precision.fp8 = off"
    )


def test_experts_are_held_to_the_multiple_of_mxfp8_over_their_own_ranks(fp8) -> None:
    fp8.change_model(**{**SIZES, **EXPERTS, "moe_intermediate_size": 64})
    given = "--learner.precision.fp8_recipe mxfp8 --learner.parallel.etp 4 "
    given += "--placement.learner_gpus 4"
    text = fp8.violation(*FP8, *given.split())
    assert "moe_intermediate_size = 64 over learner.parallel.etp = 4 leaves 16" in text
    assert "no multiple of 32" in text


@pytest.mark.parametrize("recipe", ["delayed", "tensorwise", "mxfp8"])
def test_float8_servers_want_the_rule_of_blocks_in_the_learner(fp8, recipe: str) -> None:
    given = ("--rollout.precision.weights", "fp8", "--learner.precision.fp8_recipe", recipe)
    assert any(
        f"fp8_recipe = {recipe} beside rollout.precision.weights = fp8: servers have float8 in "
        "square blocks" in text
        for text in fp8.violations(*FP8, *given)
    )


def test_float8_servers_of_other_blocks_are_refused(fp8) -> None:
    given = ("--rollout.precision.weights", "fp8", "--rollout.precision.fp8_block", "64")
    assert any(
        "fp8_block = 64 beside learner.precision.fp8_recipe = blockwise" in text
        for text in fp8.violations(*FP8, *given)
    )


def test_variable_that_makes_another_recipe_is_refused_and_named(
    fp8, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NVTE_FP8_BLOCK_SCALING_FP32_SCALES", "0")
    text = fp8.violation(*FP8)
    assert text.startswith("NVTE_FP8_BLOCK_SCALING_FP32_SCALES = '0' is set")
    assert text.endswith("needs '1', which the launcher sets; unset it")
    assert list(environment_faults(PrecisionConfig(), {"NVTE_BACKWARD_OVERRIDE": "x"})) == []
    hybrid = PrecisionConfig(fp8="hybrid")
    assert "gradients" in next(environment_faults(hybrid, {"NVTE_BACKWARD_OVERRIDE": "x"}))


def test_launcher_gives_ranks_the_variables_of_their_recipe() -> None:
    found = {name: environment(PrecisionConfig(fp8="e4m3", fp8_recipe=name)) for name in RECIPES}
    assert found == {
        "delayed": {},
        "tensorwise": {"NVTE_FP8_CURRENT_SCALING_POWER_2_SCALES": "0"},
        "blockwise": {"NVTE_FP8_BLOCK_SCALING_FP32_SCALES": "1"},
        "mxfp8": {},
    }
    assert environment(PrecisionConfig()) == {}


@pytest.mark.parametrize(
    ("capability", "cuda", "able"),
    [
        ((8, 0), (13, 0), ()),
        ((8, 9), (12, 0), ()),
        ((8, 9), (12, 1), ("delayed", "tensorwise")),
        ((9, 0), (12, 4), ("delayed", "tensorwise")),
        ((9, 0), (12, 9), ("delayed", "tensorwise", "blockwise")),
        ((10, 0), (13, 0), ("delayed", "tensorwise", "mxfp8")),
        ((12, 0), (13, 0), ("delayed", "tensorwise")),
    ],
)
def test_gpu_is_held_to_capability_and_cuda_of_each_recipe(
    capability: tuple[int, int], cuda: tuple[int, int], able: tuple[str, ...]
) -> None:
    found = {}
    for recipe in RECIPES:
        faults = gpu_faults(
            PrecisionConfig(fp8="e4m3", fp8_recipe=recipe), "a GPU", capability, cuda
        )
        found[recipe] = not faults
        for text in faults:
            assert recipe in text and "a GPU" in text and f"{capability[0]}.{capability[1]}" in text
            assert "; use " in text or "; install a newer torch, or use " in text
    assert tuple(recipe for recipe, is_able in found.items() if is_able) == able


@pytest.mark.parametrize(
    ("recipe", "tp", "cp", "multiple"),
    [
        ("delayed", 1, 1, 16),
        ("tensorwise", 4, 2, 128),
        ("blockwise", 1, 2, 32),
        ("blockwise", 2, 1, 256),
        ("mxfp8", 1, 1, 32),
        ("mxfp8", 4, 1, 128),
    ],
)
def test_every_rank_has_whole_tokens_of_its_recipe(
    recipe: Any, tp: int, cp: int, multiple: int
) -> None:
    precision = PrecisionConfig(fp8="e4m3", fp8_recipe=recipe)
    assert token_multiple(precision, tp, cp) == multiple
    assert token_multiple(PrecisionConfig(), tp, cp) == tp * cp


def test_blocks_that_differ_from_those_of_servers_are_told(fp8) -> None:
    config = fp8.load(*FP8)
    told = block_differences(config, read_shape(fp8.model))
    assert ["heads of 32 rows" in text for text in told] == [True]
    fp8.change_model(**{**SIZES, "head_dim": 128})
    assert block_differences(config, read_shape(fp8.model)) == []
