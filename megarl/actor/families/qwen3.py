"""Qwen3, dense. Data only. Queries and keys are normed per head, before rotation."""

from __future__ import annotations

from megarl.actor.families.dense import ENDS, QKV_BIAS, gated_mlp, grouped_query_attention
from megarl.actor.families.family import Family, Served

_ATTENTION = grouped_query_attention().without(*QKV_BIAS)

QWEN3 = Family(
    architecture="Qwen3ForCausalLM",
    model_types=("qwen3",),
    qkv_bias=False,
    qk_norm=True,
    head_dim=128,  # transformers' Qwen3Config
    kv_heads="required",
    fixed={
        "hidden_act": ("silu",),
        "attention_bias": (False,),  # true also puts a bias on o_proj
        "attention_dropout": (0, 0.0),
        "use_sliding_window": (False,),
        "layer_types": ("full_attention",),
        "partial_rotary_factor": (1, 1.0),
    },
    harmless=frozenset({"sliding_window", "max_window_layers"}),
    blocks={"dense": _ATTENTION + gated_mlp(), **ENDS},
    served=Served(attention_dp=True, pipeline=True, fp8=True, tied="copy"),
    ropes=("default", "llama3"),
)
