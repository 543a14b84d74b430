"""SGLang's layout against what SGLang's own loaders hold, and its refusals."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from megarl.actor.families import FAMILIES
from megarl.actor.parameters import parameter_table
from megarl.actor.shape import ModelShape, read_shape
from megarl.errors import LayoutError
from megarl.reshard.layout import full_layout
from megarl.reshard.mesh import ServerMesh
from megarl.reshard.plan import make_plan
from megarl.reshard.sglang import sglang_layout, sglang_rank
from tests.reshard.models import Arrays, assert_equal, execute, numbered, tiny_shape

MODELS = [
    (architecture, kv_heads, tie)
    for architecture in FAMILIES
    for kv_heads, tie in ((2, False), (1, True))
]
TENSOR_PARALLEL = (1, 2, 4)
CASES = [(model, tp) for model in range(len(MODELS)) for tp in TENSOR_PARALLEL]


@dataclass(frozen=True)
class Loaded:
    """What the loaders made of one case, and what a CPU server would have padded."""

    shape: ModelShape
    tensors: Arrays
    ranks: list[Arrays]
    padded: dict[str, int]


def save_model(folder: Path, shape: ModelShape) -> None:
    family = FAMILIES[shape.architecture]
    config = {
        "architectures": [shape.architecture],
        "model_type": family.model_type,
        "hidden_act": "silu",
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "vocab_size": shape.vocab_size,
        "max_position_embeddings": shape.max_positions,
        "rms_norm_eps": shape.rms_norm_eps,
        "rope_theta": shape.rope_theta,
        "tie_word_embeddings": shape.tie_embeddings,
        "torch_dtype": "float32",
    }
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    tensors = {name: array.astype(np.float32) for name, array in numbered(shape).items()}
    save_file(tensors, folder / "model.safetensors")
    assert read_shape(folder) == shape


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> list[Loaded]:
    root = tmp_path_factory.mktemp("sglang")
    shapes = [
        tiny_shape(
            architecture,
            hidden_size=32,
            head_dim=8,
            num_kv_heads=kv_heads,
            intermediate_size=64,
            tie_embeddings=tie,
        )
        for architecture, kv_heads, tie in MODELS
    ]
    for i, shape in enumerate(shapes):
        save_model(root / f"model{i}", shape)
    subprocess.run(
        [sys.executable, "-m", "tests.reshard.sglang_loaders", str(root)],
        input=json.dumps([[str(root / f"model{model}"), tp] for model, tp in CASES]),
        text=True,
        check=True,
        timeout=600,
        env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
    )
    return [
        Loaded(
            shapes[model],
            numbered(shapes[model]),
            [load_file(root / f"{case}-{rank}.safetensors") for rank in range(tp)],
            json.loads((root / f"{case}.json").read_text()),
        )
        for case, (model, tp) in enumerate(CASES)
    ]


@pytest.mark.parametrize("case", range(len(CASES)))
def test_plan_into_the_layout_writes_what_sglangs_loaders_hold(
    loaded: list[Loaded], case: int
) -> None:
    found, tp = loaded[case], CASES[case][1]
    rollout = sglang_layout(found.shape, ServerMesh(tp))
    files = full_layout(parameter_table(found.shape))
    ours = execute(make_plan(files, rollout), [found.tensors], rollout)
    assert_equal(ours, [{n: a.astype(np.int64) for n, a in r.items()} for r in found.ranks])


@pytest.mark.parametrize("case", range(len(CASES)))
def test_cpu_layout_is_refused_exactly_where_a_cpu_server_would_pad(
    loaded: list[Loaded], case: int
) -> None:
    found, mesh = loaded[case], ServerMesh(CASES[case][1], cpu=True)
    as_they_are = {
        "kv_heads": found.shape.num_kv_heads,
        "intermediate_size": found.shape.intermediate_size,
    }
    if found.padded == as_they_are:
        assert len(sglang_layout(found.shape, mesh).ranks) == mesh.tp
    else:
        with pytest.raises(LayoutError, match=f"rollout.parallel.tp={mesh.tp}"):
            sglang_layout(found.shape, mesh)


def test_refusal_of_padding_names_the_sizes_that_can_be_served() -> None:
    shape = tiny_shape(intermediate_size=128)
    with pytest.raises(
        LayoutError, match=r"2 kv heads .*tp=4.* use rollout\.parallel\.tp from 1, 2"
    ):
        sglang_layout(shape, ServerMesh(4, cpu=True))
    with pytest.raises(LayoutError, match=r"intermediate_size 48 .* no tp works"):
        sglang_layout(tiny_shape(intermediate_size=48), ServerMesh(1, cpu=True))


@pytest.mark.parametrize(
    ("changes", "tp", "words"),
    [
        ({"num_heads": 4}, 3, "4 attention heads do not split over rollout.parallel.tp=3"),
        ({"intermediate_size": 18}, 4, "18 columns of down_proj"),
        ({"num_heads": 12, "num_kv_heads": 4, "intermediate_size": 48}, 6, "4 kv heads"),
    ],
)
def test_size_that_does_not_split_is_named(changes: dict[str, int], tp: int, words: str) -> None:
    with pytest.raises(LayoutError, match=words) as caught:
        sglang_layout(tiny_shape(**changes), ServerMesh(tp))
    assert "use rollout.parallel.tp from 1, 2" in str(caught.value)


def test_kv_heads_are_copied_where_ranks_outnumber_them() -> None:
    layout = sglang_layout(tiny_shape(), ServerMesh(4))
    keys = [
        piece.box[0]
        for rank in layout.ranks
        for piece in rank.pieces
        if piece.tensor == "model.layers.0.self_attn.k_proj.weight"
    ]
    assert keys == [(0, 4), (0, 4), (4, 8), (4, 8)]


def test_rank_beyond_the_vocabulary_holds_only_padding() -> None:
    shape = tiny_shape(vocab_size=10)
    rank = sglang_rank(shape, ServerMesh(4), 3)
    assert not [p for p in rank.pieces if p.local == "lm_head.weight"]
    assert [p.box for p in rank.paddings if p.local == "lm_head.weight"] == [((0, 16), (0, 8))]


def test_tied_head_is_held_once() -> None:
    rank = sglang_rank(tiny_shape(tie_embeddings=True), ServerMesh(1), 0)
    assert "lm_head.weight" not in {tensor.name for tensor in rank.tensors}
