"""Parameter names that the dense decoders share: grouped queries, gated MLP, RMS norms.

Data only. Megatron's are those of its Transformer Engine layer spec (norms fused into the linear
that follows them), megatron-core 0.19; SGLang's are those of its llama, qwen2 and qwen3 models,
sglang 0.5.
"""

from __future__ import annotations

from collections.abc import Mapping

from megarl.actor.families.family import Kind, Names

_HF = "model.layers.{layer}."
_MEGATRON = "decoder.layers.{layer}."


def _attention(hf: str, megatron: str, sglang: str) -> Names:
    return Names(
        f"{_HF}self_attn.{hf}", f"{_MEGATRON}self_attention.{megatron}", f"{_HF}self_attn.{sglang}"
    )


def _mlp(hf: str, megatron: str, sglang: str) -> Names:
    return Names(f"{_HF}mlp.{hf}", f"{_MEGATRON}mlp.{megatron}", f"{_HF}mlp.{sglang}")


def _layer(hf: str, megatron: str) -> Names:
    return Names(f"{_HF}{hf}", f"{_MEGATRON}{megatron}", f"{_HF}{hf}")


NAMES: Mapping[Kind, Names] = {
    "embedding": Names(
        "model.embed_tokens.weight",
        "embedding.word_embeddings.weight",
        "model.embed_tokens.weight",
    ),
    "attention_norm": _layer(
        "input_layernorm.weight", "self_attention.linear_qkv.layer_norm_weight"
    ),
    "query": _attention("q_proj.weight", "linear_qkv.weight", "qkv_proj.weight"),
    "key": _attention("k_proj.weight", "linear_qkv.weight", "qkv_proj.weight"),
    "value": _attention("v_proj.weight", "linear_qkv.weight", "qkv_proj.weight"),
    "query_bias": _attention("q_proj.bias", "linear_qkv.bias", "qkv_proj.bias"),
    "key_bias": _attention("k_proj.bias", "linear_qkv.bias", "qkv_proj.bias"),
    "value_bias": _attention("v_proj.bias", "linear_qkv.bias", "qkv_proj.bias"),
    "query_norm": _attention("q_norm.weight", "q_layernorm.weight", "q_norm.weight"),
    "key_norm": _attention("k_norm.weight", "k_layernorm.weight", "k_norm.weight"),
    "attention_output": _attention("o_proj.weight", "linear_proj.weight", "o_proj.weight"),
    "mlp_norm": _layer("post_attention_layernorm.weight", "mlp.linear_fc1.layer_norm_weight"),
    "gate": _mlp("gate_proj.weight", "linear_fc1.weight", "gate_up_proj.weight"),
    "up": _mlp("up_proj.weight", "linear_fc1.weight", "gate_up_proj.weight"),
    "down": _mlp("down_proj.weight", "linear_fc2.weight", "down_proj.weight"),
    "final_norm": Names("model.norm.weight", "decoder.final_layernorm.weight", "model.norm.weight"),
    "head": Names("lm_head.weight", "output_layer.weight", "lm_head.weight"),
}
