"""Hugging Face's weights of a learner's checkpoint, which Megatron-Core has gathered and written.

Tensor by tensor with torch, on purpose without megarl's layouts. Names and orders are those of
megatron-core 0.19.2.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
from torch.distributed.checkpoint import FileSystemReader, load
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from megarl.actor.shape import ModelShape

Tensors = dict[str, torch.Tensor]


def read(checkpoint: Path, shape: ModelShape) -> Tensors:
    """The policy under its parameters' names, the experts of a layer as one tensor."""
    saved = dict(_layer_by_layer(_model(checkpoint)))
    found = {
        "model.embed_tokens.weight": saved["embedding.word_embeddings.weight"][: shape.vocab_size],
        "model.norm.weight": saved["decoder.final_layernorm.weight"],
    }
    if not shape.tie_embeddings:
        found["lm_head.weight"] = saved["output_layer.weight"][: shape.vocab_size]
    for layer in range(shape.num_layers):
        mine = _under(saved, f"decoder.layers.{layer}.")
        attention = _latent_attention if shape.mla is not None else _grouped_attention
        parts = attention(shape, _under(mine, "self_attention."))
        parts |= {f"mlp.{name}": t for name, t in _mlp(_under(mine, "mlp.")).items()}
        for theirs, names in {
            "input_layernorm.weight": (
                "input_layernorm.weight",
                "self_attention.linear_qkv.layer_norm_weight",
            ),
            "post_attention_layernorm.weight": (
                "pre_mlp_layernorm.weight",
                "mlp.linear_fc1.layer_norm_weight",
            ),
        }.items():
            (parts[theirs],) = (mine[name] for name in names if name in mine)
        found |= {f"model.layers.{layer}.{name}": tensor for name, tensor in parts.items()}
    return {name: tensor.contiguous() for name, tensor in found.items()}


def _model(checkpoint: Path) -> Tensors:
    """The model's tensors, whole; not the optimizer's."""
    reader = FileSystemReader(str(checkpoint))
    wanted = {
        key: torch.empty(kept.size, dtype=kept.properties.dtype)
        for key, kept in reader.read_metadata().state_dict_metadata.items()
        if isinstance(kept, TensorStorageMetadata)
        and not key.startswith(("optimizer.", "chained_"))
    }
    load(wanted, storage_reader=reader, no_dist=True)
    return wanted


def _layer_by_layer(saved: Tensors) -> Iterator[tuple[str, torch.Tensor]]:
    """Layers that are alike are one tensor in the checkpoint; here each has its own."""
    stem = "decoder.layers."
    for key, tensor in saved.items():
        rest = key.removeprefix(stem)
        if rest == key or rest[0].isdigit():
            yield key, tensor
        else:
            yield from ((f"{stem}{layer}.{rest}", part) for layer, part in enumerate(tensor))


def _under(tensors: Tensors, prefix: str) -> Tensors:
    return {n.removeprefix(prefix): t for n, t in tensors.items() if n.startswith(prefix)}


def _grouped_attention(shape: ModelShape, mine: Tensors) -> Tensors:
    """Each group of fused rows is its queries, its key, its value."""
    groups, dim = shape.num_kv_heads, shape.head_dim
    heads = mine["linear_qkv.weight"].view(groups, -1, dim, shape.hidden_size)
    found = {"q": heads[:, :-2], "k": heads[:, -2], "v": heads[:, -1]}
    parts = {
        f"self_attn.{n}_proj.weight": t.reshape(-1, shape.hidden_size) for n, t in found.items()
    }
    parts["self_attn.o_proj.weight"] = mine["linear_proj.weight"]
    if shape.qk_norm:
        for name in "qk":
            parts[f"self_attn.{name}_norm.weight"] = mine[f"{name}_layernorm.weight"]
    return parts


def _latent_attention(shape: ModelShape, mine: Tensors) -> Tensors:
    names = {
        "q_a_proj": "linear_q_down_proj.weight",
        "q_a_layernorm": "linear_q_up_proj.layer_norm_weight",
        "q_b_proj": "linear_q_up_proj.weight",
        "kv_a_proj_with_mqa": "linear_kv_down_proj.weight",
        "kv_a_layernorm": "linear_kv_up_proj.layer_norm_weight",
        "kv_b_proj": "linear_kv_up_proj.weight",
        "o_proj": "linear_proj.weight",
    }
    return {f"self_attn.{theirs}.weight": mine[name] for theirs, name in names.items()}


def _mlp(mine: Tensors) -> Tensors:
    if "router.weight" not in mine:
        return _gated(mine, "")
    found = {"gate.weight": mine["router.weight"]}
    if "router.expert_bias" in mine:
        found["gate.e_score_correction_bias"] = mine["router.expert_bias"]
    found |= _gated(_under(mine, "experts.experts."), "experts.*.")
    if shared := _under(mine, "shared_experts."):
        found |= _gated(shared, "shared_experts.")
    return found


def _gated(mine: Tensors, prefix: str) -> Tensors:
    gate, up = mine["linear_fc1.weight"].chunk(2, dim=-2)
    parts = {"gate": gate, "up": up, "down": mine["linear_fc2.weight"]}
    return {f"{prefix}{name}_proj.weight": tensor for name, tensor in parts.items()}
