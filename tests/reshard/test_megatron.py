"""Megatron's layout against real GPTModels, and its refusals."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from megarl.actor.shape import (
    LLAMA3_HIGH_FREQ_FACTOR,
    LLAMA3_LOW_FREQ_FACTOR,
    LLAMA3_ORIGINAL_MAX_POSITIONS,
    ModelShape,
)
from megarl.errors import LayoutError
from megarl.reshard.megatron import megatron_layout, megatron_rank, padded_vocab_size
from megarl.reshard.mesh import LearnerMesh
from tests.reshard.megatron_cases import CASES, TOKENS, VOCAB_DIVISOR
from tests.reshard.models import random_weights, tiny_shape

Shapes = dict[str, list[int]]


@dataclass(frozen=True)
class Built:
    """One case: each rank's parameters, and the logits put together over the ranks."""

    shapes: list[Shapes]
    logits: np.ndarray


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> list[Built]:
    out = tmp_path_factory.mktemp("megatron")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    program = ["--nproc-per-node", "2", "-m", "tests.reshard.megatron_models", str(out)]
    subprocess.run(
        torchrun + program,
        check=True,
        timeout=600,
        env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
    )
    return [read_case(out, case) for case in range(len(CASES))]


def read_case(out: Path, case: int) -> Built:
    shapes = [json.loads((out / f"{case}-{rank}.json").read_text()) for rank in range(2)]
    parts = [np.load(path) for path in sorted(out.glob(f"{case}-*.npy"))]
    logits = np.concatenate(parts, axis=-1) if CASES[case][1].tp > 1 else parts[-1]
    return Built(shapes, logits[..., : CASES[case][0].vocab_size])


@pytest.mark.parametrize("case", range(len(CASES)))
def test_layout_has_the_names_and_shapes_of_a_real_gpt_model(built: list[Built], case: int) -> None:
    layout = megatron_layout(*CASES[case], VOCAB_DIVISOR)
    ours = [{t.name: list(t.shape) for t in rank.tensors} for rank in layout.ranks]
    assert ours == built[case].shapes


def rope_parameters(shape: ModelShape) -> dict[str, object]:
    plain = {"rope_type": "default", "rope_theta": shape.rope_theta}
    if shape.rope_scaling is None:
        return plain
    return plain | {
        "rope_type": "llama3",
        "factor": shape.rope_scaling.factor,
        "low_freq_factor": LLAMA3_LOW_FREQ_FACTOR,
        "high_freq_factor": LLAMA3_HIGH_FREQ_FACTOR,
        "original_max_position_embeddings": LLAMA3_ORIGINAL_MAX_POSITIONS,
    }


@pytest.mark.parametrize("case", range(len(CASES)))
def test_gpt_model_filled_by_a_plan_has_the_logits_of_hugging_faces_model(
    built: list[Built], case: int
) -> None:
    transformers = pytest.importorskip("transformers")
    import torch

    shape = CASES[case][0]
    config = getattr(transformers, shape.architecture.replace("ForCausalLM", "Config"))(
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        num_hidden_layers=shape.num_layers,
        vocab_size=shape.vocab_size,
        rms_norm_eps=shape.rms_norm_eps,
        tie_word_embeddings=shape.tie_embeddings,
        rope_parameters=rope_parameters(shape),
        attn_implementation="eager",
    )
    model = getattr(transformers, shape.architecture)(config).eval()
    weights = {name: torch.from_numpy(array) for name, array in random_weights(shape).items()}
    missing, unexpected = model.load_state_dict(weights, strict=False)
    assert not unexpected
    assert set(missing) <= ({"lm_head.weight"} if shape.tie_embeddings else set())
    with torch.no_grad():
        wanted = model(torch.tensor(TOKENS)).logits.numpy()
    assert np.abs(built[case].logits - wanted).max() < 1e-5 * np.abs(wanted).max()


def test_tied_embedding_has_a_second_holder_on_the_last_stage_only() -> None:
    def holders(mesh: LearnerMesh) -> list[tuple[int, str]]:
        layout = megatron_layout(tiny_shape(tie_embeddings=True), mesh)
        return [
            (rank.rank, piece.local)
            for rank in layout.ranks
            for piece in rank.pieces
            if piece.tensor == "model.embed_tokens.weight"
        ]

    assert holders(LearnerMesh()) == [(0, "embedding.word_embeddings.weight")]
    assert holders(LearnerMesh(pp=2)) == [
        (0, "embedding.word_embeddings.weight"),
        (1, "output_layer.weight"),
    ]


def test_stages_number_their_layers_from_zero() -> None:
    layout = megatron_layout(tiny_shape(num_layers=4), LearnerMesh(pp=2))
    second = {p.local: p.tensor for p in layout.ranks[1].pieces}
    assert second["decoder.layers.0.mlp.linear_fc2.weight"] == "model.layers.2.mlp.down_proj.weight"


def test_rank_above_the_kv_heads_holds_a_part_of_a_head() -> None:
    # One group of 4 query heads, a key and a value, 4 rows each, over 4 ranks of 6 rows.
    rank = megatron_rank(tiny_shape(num_kv_heads=1), LearnerMesh(tp=4), 2)
    fused = [
        (piece.tensor.split(".")[4], piece.box[0], piece.at[0])
        for piece in rank.pieces
        if piece.local == "decoder.layers.0.self_attention.linear_qkv.weight"
    ]
    assert fused == [("q_proj", (12, 16), 0), ("k_proj", (0, 2), 4)]


def test_vocabulary_is_padded_to_a_multiple_of_divisor_times_tp() -> None:
    assert padded_vocab_size(151936, tp=8) == 152576
    assert padded_vocab_size(128, tp=1) == 128
    rank = megatron_rank(tiny_shape(vocab_size=100), LearnerMesh(tp=2), 1)
    paddings = {padding.local: padding.box for padding in rank.paddings}
    assert paddings["output_layer.weight"] == ((0, 128), (0, 8))


@pytest.mark.parametrize(
    ("changes", "mesh", "words"),
    [
        ({}, LearnerMesh(pp=3), r"2 layers .* learner.parallel.pp=3; use a pp that divides 2"),
        ({}, LearnerMesh(tp=3), r"4 attention heads .* learner.parallel.tp=3"),
        ({"intermediate_size": 18}, LearnerMesh(tp=4), r"18 rows of the gate"),
        ({"num_heads": 12, "num_kv_heads": 4, "intermediate_size": 48}, LearnerMesh(tp=6), "4 kv"),
        ({"num_kv_heads": 1, "head_dim": 1}, LearnerMesh(tp=4), r"6 rows of the fused qkv"),
    ],
)
def test_size_that_does_not_split_is_named(
    changes: dict[str, int], mesh: LearnerMesh, words: str
) -> None:
    with pytest.raises(LayoutError, match=words):
        megatron_layout(tiny_shape(**changes), mesh)
