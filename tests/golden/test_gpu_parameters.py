"""The learner's parameters on a CPU are those of the GPU's classes: names, shapes and marks.

`gpu_parameters.json` was made of the released sources of both engines (`gpu_parameters.py`).
"""

from __future__ import annotations

import importlib.metadata
import json
from pathlib import Path
from typing import Any

import pytest

from megarl.reshard.megatron import megatron_layout
from tests.golden.gpu_parameters import ENGINE_VERSION, GOLDEN, cases
from tests.megatron_engine import Engine

ROOT = Path(__file__).parents[2]
RECORDED: dict[str, Any] = json.loads(GOLDEN.read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def on_cpu(megatron_engine: Engine) -> dict[str, Any]:
    """What the learner builds in a process of its own, without Transformer Engine."""
    printed = megatron_engine.run("tests.golden.gpu_parameters")
    found: dict[str, Any] = json.loads(printed.splitlines()[-1])
    return found


def test_recorded_parameters_are_of_the_engines_that_are_pinned() -> None:
    assert RECORDED["versions"] == {
        "megatron-core": importlib.metadata.version("megatron-core"),
        "transformer-engine": ENGINE_VERSION,
    }
    pins = (ROOT / "requirements" / "gpu.txt").read_text(encoding="utf-8").splitlines()
    assert f"transformer-engine[core-cu13,pytorch]=={ENGINE_VERSION}" in pins


def test_recorded_parameters_are_of_transformer_engines_classes() -> None:
    classes = RECORDED["classes"]
    assert set(classes) == set(RECORDED["parameters"]) == set(cases())
    assert {"TELayerNormColumnParallelLinear", "TERowParallelLinear"} <= set(classes["qwen3"])
    grouped = {"TEColumnParallelGroupedLinear", "TERowParallelGroupedLinear"}
    assert grouped <= set(classes["qwen3-moe ep2"])
    latent = {"TELinear", "TELayerNormColumnParallelLinear"} | grouped
    assert latent <= set(classes["deepseek-v3 tp2 ep2"])
    ours = {"ColumnGroupedLinear", "WholeLinear", "NormedColumnParallelLinear"}
    assert not any(ours & set(found) for found in classes.values())


@pytest.mark.parametrize("case", cases())
def test_layout_of_a_learner_rank_is_what_the_gpus_classes_hold(case: str) -> None:
    shape, mesh, rank = cases()[case]
    laid_out = {t.name: list(t.shape) for t in megatron_layout(shape, mesh).rank(rank).tensors}
    buffers = {name for name in laid_out if name.endswith("expert_bias")}  # is no parameter
    held = {name: described[0] for name, described in RECORDED["parameters"][case].items()}
    assert {n: s for n, s in laid_out.items() if n not in buffers} == held


@pytest.mark.parametrize("case", cases())
def test_classes_for_cpus_have_the_parameters_of_those_for_gpus(
    on_cpu: dict[str, Any], case: str
) -> None:
    assert on_cpu["parameters"][case] == RECORDED["parameters"][case]
