"""GLM-4.5 and what is published in its form: GLM-4.5-Air, GLM-4.6. Data only."""

from __future__ import annotations

from megarl.actor.families.dense import ENDS, gated_mlp, grouped_query_attention
from megarl.actor.families.family import Family, FusesShared, Served
from megarl.actor.families.moe import ALL_TO_ALL, routed_experts, router, shared_experts
from megarl.actor.families.mtp import (
    DUPLICATES,
    ENTRY_AND_FINAL_NORM,
    MEGATRON_LAYER,
    SGLANG_LAYER,
)

_MOE = (
    grouped_query_attention() + router(float32_on_server=True) + routed_experts() + shared_experts()
)
_MTP_LAYER = (
    grouped_query_attention(megatron=MEGATRON_LAYER, sglang=SGLANG_LAYER)
    + router(megatron=MEGATRON_LAYER, sglang=SGLANG_LAYER, float32_on_server=True)
    + routed_experts(megatron=MEGATRON_LAYER, sglang=SGLANG_LAYER)
    + shared_experts(megatron=MEGATRON_LAYER, sglang=SGLANG_LAYER)
)

GLM4_MOE = Family(
    architecture="Glm4MoeForCausalLM",
    model_types=("glm4_moe",),
    qkv_bias="attention_bias",  # o_proj never has one
    qk_norm="use_qk_norm",
    head_dim="derived",
    kv_heads="required",
    fixed={
        "hidden_act": ("silu",),
        "attention_dropout": (0, 0.0),
        "scoring_func": ("sigmoid",),
        "topk_method": ("noaux_tc",),
    },
    harmless=frozenset({"output_router_logits", "router_aux_loss_coef"}),
    blocks={
        **ENDS,
        "dense": grouped_query_attention() + gated_mlp(),
        "moe": _MOE,
        "mtp": ENTRY_AND_FINAL_NORM + _MTP_LAYER,
    },
    rotary_fraction=0.5,  # transformers' Glm4MoeConfig
    experts="deepseek",
    served=Served(
        attention_dp=True,
        pipeline=True,
        fp8=True,
        dense_layers=True,
        dense_whole=True,
        all_to_all=ALL_TO_ALL,
        fuses_shared=FusesShared(),
        head_everywhere=True,
    ),
    duplicates=DUPLICATES,
)
