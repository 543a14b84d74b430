"""Megatron's layout against real GPTModels and the logits of Hugging Face's models."""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.numpy import save_file
from torch import Tensor

from megarl.actor.config_rope import (
    LLAMA3_HIGH_FREQ_FACTOR,
    LLAMA3_LOW_FREQ_FACTOR,
    LLAMA3_ORIGINAL_MAX_POSITIONS,
)
from megarl.actor.parameters import parameter_table
from megarl.actor.shape import ModelShape
from tests.megatron_engine import Engine
from tests.reshard.megatron_cases import CASES, TOKENS, Case
from tests.reshard.models import random_weights

Shapes = dict[str, list[int]]
Key = tuple[int, int]
"""(number of ranks, number of the case)."""

KEYS = [(ranks, number) for ranks, cases in CASES.items() for number in range(len(cases))]
EVERY_CASE = pytest.mark.parametrize("key", KEYS, ids=lambda key: case_of(key).name)
MTP_CASES = pytest.mark.parametrize(
    "key",
    [(ranks, n) for ranks, n in KEYS if CASES[ranks][n].shape.num_mtp_layers],
    ids=lambda key: case_of(key).name,
)


def case_of(key: Key) -> Case:
    return CASES[key[0]][key[1]]


@dataclass(frozen=True)
class Built:
    """One case: each rank's tensors, the logits over the ranks, and what the MTP layers gave."""

    shapes: list[Shapes]
    logits: np.ndarray
    mtp: np.ndarray | None


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory, megatron_engine: Engine) -> Path:
    """The folder that all ranks have written."""
    out = tmp_path_factory.mktemp("megatron")
    for ranks in CASES:
        megatron_engine.run("tests.reshard.megatron_models", out, ranks=ranks)
    return out


@pytest.fixture(scope="module")
def built(ran: Path) -> dict[Key, Built]:
    return {key: read_case(ran, key) for key in KEYS}


def read_case(out: Path, key: Key) -> Built:
    shape, mesh = case_of(key).shape, case_of(key).mesh
    case = f"{key[0]}-{key[1]}"
    shapes = [json.loads((out / f"{case}-{rank}.json").read_text()) for rank in range(mesh.size)]
    last = range((mesh.pp - 1) * mesh.stage_size, mesh.size)
    parts = [np.load(out / f"{case}-{rank}.npy") for rank in last]
    for rank, part in enumerate(parts):  # the replicas agree
        np.testing.assert_allclose(part, parts[rank % mesh.tp], rtol=1e-5, atol=1e-5)
    logits = np.concatenate(parts[: mesh.tp], axis=-1)[..., : shape.vocab_size]
    mtp = [np.load(path) for path in sorted(out.glob(f"{case}-*-mtp.npy"))[:1]]
    return Built(shapes, logits, mtp[0] if mtp else None)


@EVERY_CASE
def test_layout_has_the_names_and_shapes_of_a_real_gpt_model(
    built: dict[Key, Built], key: Key
) -> None:
    ours = [{t.name: list(t.shape) for t in rank.tensors} for rank in case_of(key).layout.ranks]
    theirs = [dict(shapes) for shapes in built[key].shapes]
    dead = unused_heads(case_of(key))
    assert [rank for rank, shapes in enumerate(theirs) if dead & shapes.keys()] == (
        list(case_of(key).layout.stages[-1]) if dead else []
    )
    assert ours == [
        {name: shape for name, shape in shapes.items() if name not in dead} for shapes in theirs
    ]


def unused_heads(case: Case) -> set[str]:
    """The head beside a tied embedding's copy for MTP layers: Megatron allocates but ignores it."""
    chunk = case.pipeline.chunks[-1][-1]
    unused = case.shape.tie_embeddings and chunk.num_mtp and not chunk.embedding
    return {"output_layer.weight"} if unused else set()


@pytest.fixture(scope="module")
def hugging_face(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Any]:
    """Hugging Face's model of a shape with its random weights, as its own loader reads them."""
    import transformers

    @functools.cache
    def load(shape: ModelShape, num_layers: int) -> Any:
        folder = tmp_path_factory.mktemp("hf")
        stored = {}
        for parameter in parameter_table(shape):
            array = random_weights(shape)[parameter.name]
            names = parameter.stored_names()
            arrays = list(array) if parameter.stacked else [array]
            stored |= dict(zip(names, map(np.ascontiguousarray, arrays), strict=True))
        save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
        config = getattr(transformers, shape.architecture.replace("ForCausalLM", "Config"))(
            **hf_config(shape, num_layers)
        )
        config.save_pretrained(folder)
        return getattr(transformers, shape.architecture).from_pretrained(
            folder, dtype="float32", attn_implementation="eager"
        )

    return load


def hf_config(shape: ModelShape, num_layers: int) -> dict[str, object]:
    config: dict[str, object] = {
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "num_hidden_layers": num_layers,
        "vocab_size": shape.vocab_size,
        "rms_norm_eps": shape.rms_norm_eps,
        "tie_word_embeddings": shape.tie_embeddings,
        "rope_parameters": rope_parameters(shape),
        "pad_token_id": None,
    }
    if shape.architecture == "Glm4MoeForCausalLM":
        config |= {"attention_bias": shape.qkv_bias, "use_qk_norm": shape.qk_norm}
    if shape.mla is not None:
        del config["head_dim"]
        config |= dataclasses.asdict(shape.mla)
    if shape.moe is not None:
        moe = shape.moe
        shared = {"n_shared_experts": moe.shared_intermediate_size // moe.expert_intermediate_size}
        config |= {
            "num_experts" if moe.scoring == "softmax" else "n_routed_experts": moe.num_experts,
            "num_experts_per_tok": moe.experts_per_token,
            "moe_intermediate_size": moe.expert_intermediate_size,
            "norm_topk_prob": moe.normalize,
        }
        if moe.scoring == "sigmoid":
            config |= {
                **shared,
                "n_group": moe.num_groups,
                "topk_group": moe.groups_per_token,
                "routed_scaling_factor": moe.scaling,
                "first_k_dense_replace": len(moe.dense_layers),
            }
    return config


def rope_parameters(shape: ModelShape) -> dict[str, object]:
    plain: dict[str, object] = {"rope_type": "default", "rope_theta": shape.rope_theta}
    if shape.rotary_fraction != 1.0:
        plain["partial_rotary_factor"] = shape.rotary_fraction
    if shape.rope_scaling is None:
        return plain
    return plain | {
        "rope_type": "llama3",
        "factor": shape.rope_scaling.factor,
        "low_freq_factor": LLAMA3_LOW_FREQ_FACTOR,
        "high_freq_factor": LLAMA3_HIGH_FREQ_FACTOR,
        "original_max_position_embeddings": LLAMA3_ORIGINAL_MAX_POSITIONS,
    }


@EVERY_CASE
def test_gpt_model_filled_by_the_layout_has_the_logits_of_hugging_faces_model(
    built: dict[Key, Built], hugging_face: Callable[..., Any], key: Key
) -> None:
    shape = case_of(key).shape
    with torch.no_grad():
        wanted = hugging_face(shape, shape.num_layers)(torch.tensor(TOKENS)).logits.numpy()
    assert np.abs(built[key].logits - wanted).max() < 1e-5 * np.abs(wanted).max()


@MTP_CASES
def test_mtp_layer_filled_by_the_layout_gives_what_hugging_faces_layer_gives(
    built: dict[Key, Built], hugging_face: Callable[..., Any], key: Key
) -> None:
    shape = case_of(key).shape
    before = len(shape.layer_kinds)
    tokens = torch.tensor(TOKENS)
    with torch.no_grad():
        final = hugging_face(shape, before).model(tokens).last_hidden_state
        wanted = mtp_layer(hugging_face(shape, before + 1).model, shape, tokens, final)
    found = built[key].mtp
    assert found is not None
    main, ahead = np.split(found, 2)  # [2 x tokens, batch, hidden]
    last = tokens.shape[1] - 1  # behind the last token there is none to look ahead to
    assert np.abs(main.swapaxes(0, 1) - final.numpy()).max() < 1e-5 * np.abs(final.numpy()).max()
    difference = np.abs(ahead.swapaxes(0, 1) - wanted.numpy())[:, :last]
    assert difference.max() < 1e-5 * np.abs(wanted.numpy()).max()


def mtp_layer(model: Any, shape: ModelShape, tokens: Tensor, hidden: Tensor) -> Tensor:
    """The MTP layer by hand around Hugging Face's decoder layer: [batch, tokens, hidden]."""
    own = f"model.layers.{shape.num_layers}."
    weights = {name: torch.from_numpy(array) for name, array in random_weights(shape).items()}

    def norm(x: Tensor, name: str) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], weights[own + name], shape.rms_norm_eps)

    ahead = model.embed_tokens(tokens.roll(-1, dims=1))
    both = torch.cat([norm(ahead, "enorm.weight"), norm(hidden, "hnorm.weight")], dim=-1)
    positions = torch.arange(tokens.shape[1])[None]
    blocked = torch.full((tokens.shape[1],) * 2, float("-inf")).triu(1)[None, None]
    out = model.layers[shape.num_layers](
        both @ weights[own + "eh_proj.weight"].T,
        attention_mask=blocked,
        position_ids=positions,
        position_embeddings=model.rotary_emb(both, positions),
    )
    return norm(out[0] if isinstance(out, tuple) else out, "shared_head.norm.weight")
