"""Recomputation that Megatron would refuse late, or silently leave off, is refused here."""

from __future__ import annotations

import pytest

from tests.config.conftest import EXPERTS

GPU = ("--launch.device", "cuda")
SELECTIVE = ("--learner.recompute.granularity", "selective", "--learner.recompute.modules")


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (
            "--learner.recompute.num_layers 2",
            "learner.recompute.num_layers has no meaning with learner.recompute.granularity = "
            "none; it is for full",
        ),
        (
            "--learner.recompute.granularity selective --learner.recompute.method block",
            "learner.recompute.method has no meaning with learner.recompute.granularity = "
            "selective; it is for full",
        ),
        (
            '--learner.recompute.granularity full --learner.recompute.modules ["mlp"]',
            "learner.recompute.modules has no meaning with learner.recompute.granularity = full; "
            "it is for selective",
        ),
        (
            "--learner.recompute.granularity full --learner.transformer_config.cpu_offloading true",
            "learner.transformer_config.cpu_offloading beside learner.recompute.granularity = "
            "full: activations are either sent to host memory or computed again; use one",
        ),
        (
            "--learner.transformer_config.recompute_granularity full",
            "learner.transformer_config.recompute_granularity: megarl sets it; use "
            "learner.recompute.granularity",
        ),
    ],
)
def test_combination_is_refused_in_words(place, arguments: str, text: str) -> None:
    assert place.violation(*arguments.split()) == text


@pytest.mark.parametrize("modules", ["[]", '["mlp", "mlp"]'])
def test_modules_are_named_each_once(place, modules: str) -> None:
    assert "name at least one, and each once" in place.violation(*SELECTIVE, modules)


@pytest.fixture
def on_gpu(place, monkeypatch: pytest.MonkeyPatch):
    """A machine that has a GPU by its environment, for the modules that need one."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    return place


@pytest.mark.parametrize("module", ["layernorm", "mla_up_proj", "moe", "moe_act", "shared_experts"])
def test_module_that_a_dense_model_lacks_is_refused(on_gpu, module: str) -> None:
    found = on_gpu.violation(*GPU, *SELECTIVE, f'["{module}"]')
    assert f"learner.recompute.modules: {module}: this model has no " in found
    assert found.endswith("so that nothing would be recomputed; leave it out")


def test_dense_mlps_of_a_model_of_experts_alone_are_refused(on_gpu) -> None:
    on_gpu.change_model(**EXPERTS)
    assert "mlp: this model has no dense MLP" in on_gpu.violation(*GPU, *SELECTIVE, '["mlp"]')
    recompute = on_gpu.load(*GPU, *SELECTIVE, '["layernorm", "moe_act"]').learner.recompute
    assert recompute.modules == ["layernorm", "moe_act"]


def test_module_that_needs_transformer_engine_is_refused_on_a_cpu(place) -> None:
    place.change_model(**EXPERTS)
    text = place.violation("--launch.device", "cpu", *SELECTIVE, '["layernorm", "moe_act"]')
    assert "layernorm and moe_act on a CPU: Megatron recomputes them with functions" in text


def test_experts_are_not_recomputed_twice(place) -> None:
    place.change_model(**EXPERTS)
    text, _ = place.violations(*SELECTIVE, '["moe", "shared_experts"]')
    assert text.startswith("learner.recompute.modules: moe recomputes shared_experts too, inside")
