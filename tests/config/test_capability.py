"""The capability table: what is proved names its tests, what cannot work its reason."""

from __future__ import annotations

import ast
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megarl.actor.families import FAMILIES
from megarl.config.capability import (
    ROWS,
    SGLANG_VERSION,
    WEIGHT_LOADER,
    ServerFacts,
    can_write,
    find,
    server_facts,
)
from megarl.config.served import model_overrides
from megarl.errors import WeightSyncError
from megarl.rollout.engine_args import known_arguments
from megarl.weight_sync.control import LOAD_FORMAT

ROOT = Path(__file__).parents[2]
INFO = Path(__file__).with_name("server_info.json")
QWEN3 = "Qwen3ForCausalLM"
FACTS = ServerFacts("cpu", "none", "auto", "0.5.23", True, 1, 1, 1, False)
BLOCK = (128, 128)
FLOAT8 = replace(FACTS, quantization="fp8", fp8_block=BLOCK)


def test_proved_rows_name_tests_that_there_are() -> None:
    proved = [row for row in ROWS if row.verdict == "proved"]
    assert proved
    for row in proved:
        assert row.shown_by, row
        assert row.devices and row.quantizations and row.sglang_versions and row.architectures
        for test in row.shown_by:
            path, _, name = test.partition("::")
            tree = ast.parse((ROOT / path).read_text())
            assert name in {n.name for n in tree.body if isinstance(n, ast.FunctionDef)}, test


def test_nothing_is_proved_on_a_gpu_or_in_another_version_of_sglang() -> None:
    for architecture in FAMILIES:
        assert find("cuda", "none", "auto", "0.5.23", architecture).verdict == "unproved"
        assert find("cpu", "none", "auto", "0.5.24", architecture).verdict == "unproved"


@pytest.mark.parametrize(
    ("device", "quantization", "moe_backend", "architecture", "reason"),
    [
        ("cpu with AMX", "none", "auto", QWEN3, "packs weights for AMX"),
        ("cuda", "gptq_marlin", "auto", QWEN3, "Marlin"),
        ("cuda", "modelopt_fp4", "auto", QWEN3, "four-bit"),
        ("cuda", "w8a8_int8", "auto", QWEN3, "fp8 in square blocks"),
        ("cuda", "none", "triton_kernel", "DeepseekV3ForCausalLM", "transposed"),
        ("cuda", "none", "flashinfer_trtllm", "Glm4MoeForCausalLM", "shuffles"),
        ("cpu", "none", "auto", "GptOssForCausalLM", "no layout"),
    ],
)
def test_what_cannot_be_written_in_place_is_refused_with_its_reason(
    device: str, quantization: str, moe_backend: str, architecture: str, reason: str
) -> None:
    row = find(device, quantization, moe_backend, "0.5.23", architecture)
    assert row.verdict == "refused"
    assert reason in row.why


def test_experts_backend_is_no_matter_for_a_dense_policy() -> None:
    assert find("cpu", "none", "flashinfer_cutlass", "0.5.23", QWEN3).verdict == "proved"


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"has_loader": False}, "without --custom-weight-loader"),
        ({"unknown": ("enable_eplb=True",)}, "enable_eplb=True"),
        ({"copies": 2}, "2 data-parallel replicas"),
        ({"pp": 2}, "2 pipeline stages"),
    ],
)
def test_server_that_cannot_be_written_is_refused_whatever_the_table_says(
    change: dict[str, Any], reason: str
) -> None:
    row = can_write(replace(FACTS, **change), QWEN3)
    assert row.verdict == "refused"
    assert reason in row.why


@pytest.mark.parametrize(
    ("moe_backend", "up_first"), [("flashinfer_cutlass", False), ("auto", True)]
)
def test_server_with_the_other_order_of_experts_halves_than_the_plan_is_refused(
    moe_backend: str, up_first: bool
) -> None:
    """Neither side's checksums would show it: both follow the plan."""
    facts = replace(FACTS, device="cuda", moe_backend=moe_backend)
    row = can_write(facts, "Qwen3MoeForCausalLM", up_first)
    assert row.verdict == "refused" and "the settings say otherwise" in row.why
    assert can_write(facts, "Qwen3MoeForCausalLM", not up_first).verdict == "unproved"
    assert can_write(facts, QWEN3, up_first).verdict == "unproved"  # it has no experts
    blocks = replace(facts, quantization="fp8")  # always [gate, up]
    assert can_write(blocks, "Qwen3MoeForCausalLM", False).verdict == "unproved"


def test_facts_are_read_from_what_sglang_answers() -> None:
    """`server_info.json` is from an answer of SGLang 0.5.23 on a CPU: the fields that are read."""
    info = json.loads(INFO.read_text())
    assert server_facts(info) == replace(FACTS, has_loader=False)
    with_loader = {**info, "custom_weight_loader": ["a.b", LOAD_FORMAT]}
    assert server_facts(with_loader) == FACTS
    assert server_facts({**info, "attention_backend": "intel_amx"}).device == "cpu with AMX"
    assert server_facts({**info, "quantization": "fp8"}).quantization == "fp8"
    assert server_facts({**info, "enable_eplb": True}).unknown == ("enable_eplb=True",)
    assert server_facts({**info, "speculative_algorithm": "EAGLE"}).has_draft


def test_answer_of_another_server_is_refused_in_words() -> None:
    with pytest.raises(WeightSyncError, match="no usable 'device'.*0.4.1"):
        server_facts({"version": "0.4.1"})


def test_names_shared_with_the_weight_sync_and_the_engines_arguments_are_the_same() -> None:
    assert WEIGHT_LOADER == LOAD_FORMAT
    assert known_arguments()[0] == SGLANG_VERSION


def test_quantization_is_read_from_the_overrides_and_from_the_models_folder(tmp_path: Path) -> None:
    """SGLang says `quantization: null` of a server whose config.json has the quantization."""
    info = {**json.loads(INFO.read_text()), "custom_weight_loader": [LOAD_FORMAT]}
    assert info["quantization"] is None
    overridden = {**info, "json_model_override_args": model_overrides(BLOCK)}
    assert server_facts(overridden) == FLOAT8
    more = {**info, "json_model_override_args": '{"num_hidden_layers": 2}'}
    assert server_facts(more).unknown == ('json_model_override_args={"num_hidden_layers": 2}',)
    stored = json.loads(model_overrides(BLOCK))
    (tmp_path / "config.json").write_text(json.dumps(stored))
    assert server_facts({**info, "model_path": str(tmp_path)}) == FLOAT8
    stored["quantization_config"]["quant_method"] = "awq"
    (tmp_path / "config.json").write_text(json.dumps(stored))
    found = server_facts({**info, "model_path": str(tmp_path)})
    assert (found.quantization, found.fp8_block) == ("awq", None)
