"""Qwen3 with routed experts in every layer or every few. Data only."""

from __future__ import annotations

from megarl.actor.families.dense import ENDS, QKV_BIAS, gated_mlp, grouped_query_attention
from megarl.actor.families.family import Family, Served
from megarl.actor.families.moe import ALL_TO_ALL, routed_experts, router

_ATTENTION = grouped_query_attention().without(*QKV_BIAS)
_ROUTER = router().without("router_bias")

QWEN3_MOE = Family(
    architecture="Qwen3MoeForCausalLM",
    model_types=("qwen3_moe",),
    qkv_bias=False,
    qk_norm=True,
    head_dim="derived",  # transformers' Qwen3MoeAttention
    kv_heads="required",
    fixed={
        "hidden_act": ("silu",),
        "attention_bias": (False,),  # true also puts a bias on o_proj
        "attention_dropout": (0, 0.0),
        "use_sliding_window": (False,),
        "layer_types": ("full_attention",),
        "partial_rotary_factor": (1, 1.0),
    },
    harmless=frozenset(
        {"sliding_window", "max_window_layers", "output_router_logits", "router_aux_loss_coef"}
    ),
    blocks={
        **ENDS,
        "dense": _ATTENTION + gated_mlp(),
        "moe": _ATTENTION + _ROUTER + routed_experts(),
    },
    experts="qwen3",
    served=Served(
        attention_dp=True,
        pipeline=True,
        fp8=True,
        all_to_all=ALL_TO_ALL,
        head_everywhere=True,
    ),
)
