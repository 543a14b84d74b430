"""Qwen2 and Qwen2.5, dense. Data only. Its q, k and v projections always have a bias."""

from __future__ import annotations

from megarl.actor.families.dense import ENDS, HEAD_NORMS, gated_mlp, grouped_query_attention
from megarl.actor.families.family import Family, Served

_ATTENTION = grouped_query_attention().without(*HEAD_NORMS)

QWEN2 = Family(
    architecture="Qwen2ForCausalLM",
    model_types=("qwen2",),
    qkv_bias=True,
    qk_norm=False,
    head_dim="derived",
    kv_heads="required",
    fixed={
        "hidden_act": ("silu",),
        "attention_dropout": (0, 0.0),
        "use_sliding_window": (False,),
        "layer_types": ("full_attention",),
        "partial_rotary_factor": (1, 1.0),
    },
    harmless=frozenset({"sliding_window", "max_window_layers"}),
    blocks={"dense": _ATTENTION + gated_mlp(), **ENDS},
    served=Served(pipeline=True, tied="copy"),
    ropes=("default", "llama3"),
)
