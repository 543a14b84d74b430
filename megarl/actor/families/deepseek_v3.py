"""DeepSeek-V3 and what is published in its form: R1, Kimi-K2, Moonlight. Data only."""

from __future__ import annotations

from megarl.actor.families.dense import ENDS, gated_mlp
from megarl.actor.families.family import Family, FusesShared, Served
from megarl.actor.families.latent import latent_attention
from megarl.actor.families.moe import ALL_TO_ALL, routed_experts, router, shared_experts
from megarl.actor.families.mtp import (
    DUPLICATES,
    ENTRY_AND_FINAL_NORM,
    MEGATRON_LAYER,
    SGLANG_LAYER,
)

_MOE = latent_attention() + router() + routed_experts() + shared_experts()
_MTP_LAYER = (
    latent_attention(megatron=MEGATRON_LAYER, sglang=SGLANG_LAYER)
    + router(megatron=MEGATRON_LAYER, sglang=SGLANG_LAYER)
    + routed_experts(megatron=MEGATRON_LAYER, sglang=SGLANG_LAYER)
    + shared_experts(megatron=MEGATRON_LAYER, sglang=SGLANG_LAYER)
)

DEEPSEEK_V3 = Family(
    architecture="DeepseekV3ForCausalLM",
    model_types=("deepseek_v3", "kimi_k2"),
    qkv_bias=False,
    qk_norm=False,
    head_dim="derived",
    kv_heads="heads",
    fixed={
        "hidden_act": ("silu",),
        "attention_bias": (False,),  # true puts one on the projections down and on o_proj
        "attention_dropout": (0, 0.0),
        "rope_interleave": (True,),
        "ep_size": (1,),
        "moe_layer_freq": (1,),
        "scoring_func": ("sigmoid",),
        "topk_method": ("noaux_tc",),
    },
    harmless=frozenset(
        {"aux_loss_alpha", "seq_aux", "output_router_logits", "router_aux_loss_coef", "auto_map"}
    ),
    blocks={
        **ENDS,
        "dense": latent_attention() + gated_mlp(),
        "moe": _MOE,
        "mtp": ENTRY_AND_FINAL_NORM + _MTP_LAYER,
    },
    ropes=("default", "yarn"),
    attention="latent",
    experts="deepseek",
    served=Served(
        attention_dp=True,
        pipeline=True,
        fp8=True,
        tied="one_stage",
        dense_layers=True,
        dense_whole=True,
        all_to_all=(*ALL_TO_ALL, "deepep_v2", "pplx"),
        fuses_shared=FusesShared(
            num_experts=(256,), only_one=True, overlapped=False, enforced=True
        ),
        embeds_for_draft=True,
    ),
    duplicates=DUPLICATES,
)
