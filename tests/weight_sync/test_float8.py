"""Weights to float8 servers: SGLang's own models on every rank, and what is refused."""

from __future__ import annotations

import json
import subprocess
import sys
import weakref
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch

from megarl.errors import LayoutError, WeightSyncError
from megarl.float8 import BlockScaling
from megarl.reshard.mesh import LearnerMesh, ServerMesh
from megarl.weight_sync import compiled
from megarl.weight_sync.control import SourceSpec
from megarl.weight_sync.places import ServerKind
from megarl.weight_sync.quantized import by_layer
from megarl.weight_sync.sender import Sender
from tests.reshard.test_sglang_loaders import DEEPSEEK, GLM, LATENT, QWEN3, QWEN3_MOE, large
from tests.weight_sync import tiny

ROOT = Path(__file__).parents[2]
BLOCK = BlockScaling(128, 128)
CASES: dict[str, dict[str, Any]] = {
    "qwen3": {
        "shape": large(QWEN3), "learner": {"tp": 2}, "server": {"tp": 1},
        "forms": ["te", "sequential"],
    },
    "qwen3 moe": {
        "shape": large(QWEN3_MOE), "learner": {"tp": 2, "ep": 2}, "server": {"tp": 2, "ep": 2},
        "forms": ["te", "per_expert"],
    },
    "deepseek": {
        "shape": large(DEEPSEEK, num_heads=4, mla=LATENT), "learner": {"pp": 2},
        "server": {"tp": 2}, "forms": ["local", "per_expert"],
    },
    "glm": {
        "shape": large(GLM), "learner": {"tp": 2, "ep": 2}, "server": {"tp": 2},
        "forms": ["te", "per_expert"],
    },
}  # fmt: skip


@pytest.mark.parametrize(
    "family",
    ["deepseek", *(pytest.param(name, marks=pytest.mark.slow) for name in CASES)],
)
def test_sglangs_float8_models_end_with_what_they_load_from_a_quantized_checkpoint(
    family: str, tmp_path: Path
) -> None:
    case = {**CASES[family], "shape": asdict(CASES[family]["shape"])}
    answer = subprocess.run(
        [sys.executable, "-m", "tests.weight_sync.float8_servers", str(tmp_path)],
        input=json.dumps([case]), text=True, capture_output=True, cwd=ROOT, check=False,
    )  # fmt: skip
    assert answer.returncode == 0, answer.stderr[-3000:]
    found = json.loads(answer.stdout)
    assert found["float8"] >= 8
    assert found["verdicts"] == [[], []]
    assert found["differing"] == [[]] * len(found["differing"])


SHAPE = large(QWEN3)


def source(mesh: LearnerMesh, block: BlockScaling = BLOCK) -> SourceSpec:
    return SourceSpec(SHAPE, mesh, 8, ("te", "sequential"), None, block)


def test_learner_that_cuts_blocks_is_refused_with_what_to_use() -> None:
    narrow = large(QWEN3, num_heads=4, num_kv_heads=4, head_dim=64)
    spec = SourceSpec(narrow, LearnerMesh(tp=4), 8, ("te", "sequential"), None, BLOCK)
    with pytest.raises(LayoutError, match=r"do not hold whole blocks of \[128, 128\].*use a learn"):
        spec.layout()


def test_weight_that_is_no_number_is_named_and_nothing_is_sent() -> None:
    spec = source(LearnerMesh())
    parameters = tiny.on_learner(spec, tiny.weights(SHAPE, 0))[0]
    sender = Sender("float8test", spec, 0, parameters, "bf16")
    parameters["decoder.layers.1.mlp.linear_fc2.weight"][3, 200] = torch.nan
    with pytest.raises(WeightSyncError, match=r"learner rank 0: model.layers.1.mlp.down_proj.w"):
        sender.prepare()


@pytest.mark.parametrize("keeps", [True, False])
def test_quantized_copies_outlive_a_sync_only_where_memory_is_not_shared(keeps: bool) -> None:
    spec = source(LearnerMesh())
    (parameters,) = tiny.on_learner(spec, tiny.weights(spec.shape, 3))
    sender = Sender(
        "float8kept", spec, 0, parameters, "bf16", arenas="kept" if keeps else "released"
    )
    sums = []
    for _ in range(2):
        sender.prepare()
        copy = weakref.ref(next(iter(sender._quantized._copies.values())))
        sums.append(sender.checksums())
        errors = sender.quantization_errors
        sender.withdraw()
        assert (copy() is not None) == keeps
        assert sender.quantization_errors == errors
    assert sums[0] == sums[1]
    sender.close()


def test_float8_has_the_same_checksums_where_nothing_was_compiled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    spec = source(LearnerMesh())
    (parameters,) = tiny.on_learner(spec, tiny.weights(spec.shape, 3))
    sender = Sender("float8sums", spec, 0, parameters, "bf16")
    assert sender.quantization_errors == {}  # before anything was quantized
    sender.prepare()
    wanted = sender.checksums()
    assert any(name.endswith("_scale_inv") for name in wanted)
    monkeypatch.setattr(compiled, "find", lambda: None)
    assert sender.checksums() == wanted
    sender.close()


def test_what_float8_loses_is_told_by_layer() -> None:
    spec = source(LearnerMesh(tp=2))
    weights = tiny.weights(SHAPE, 0)
    senders = [
        Sender(f"float8loss{rank}", spec, rank, parameters, "bf16")
        for rank, parameters in enumerate(tiny.on_learner(spec, weights))
    ]
    for sender in senders:
        sender.prepare()
    found = by_layer(sender.quantization_errors for sender in senders)
    assert set(found) == {"model.layers.0", "model.layers.1"}
    for layer, error in found.items():
        lost = whole = 0.0
        for name, tensor in weights.items():
            if name.startswith(layer) and name.endswith("proj.weight"):
                float8 = torch.empty_like(tensor)
                for row in range(0, tensor.shape[0], 128):
                    for column in range(0, tensor.shape[1], 128):
                        part = tensor[row : row + 128, column : column + 128]
                        scale = part.abs().max() / 448
                        float8[row : row + 128, column : column + 128] = (part / scale).to(
                            torch.float8_e4m3fn
                        ).to(torch.float32) * scale
                lost += float((float8 - tensor).square().sum())
                whole += float(tensor.square().sum())
        assert error == pytest.approx((lost / whole) ** 0.5, rel=1e-5)


def test_float8_travels_as_one_byte_an_element_and_a_scale_a_block() -> None:
    half = SourceSpec(SHAPE, LearnerMesh(), 8)
    sizes = {}
    for name, spec in {"bf16": half, "float8": source(LearnerMesh())}.items():
        parameters = tiny.on_learner(spec, tiny.weights(SHAPE, 0))[0]
        sender = Sender(f"size{name}", spec, 0, parameters, "bf16")
        sizes[name] = sender.route(ServerKind(ServerMesh(1))).num_bytes
    linear = sum(
        tensor.numel() for name, tensor in tiny.weights(SHAPE, 0).items() if "_proj.weight" in name
    )
    scales = 4 * linear // (128 * 128)
    assert sizes["bf16"] - sizes["float8"] == pytest.approx(linear - scales, abs=64 * 100)
