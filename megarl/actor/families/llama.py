"""Llama 3.x and what is published in its form. Data only."""

from __future__ import annotations

from megarl.actor.families.dense import (
    ENDS,
    HEAD_NORMS,
    QKV_BIAS,
    gated_mlp,
    grouped_query_attention,
)
from megarl.actor.families.family import Family, Served

_ATTENTION = grouped_query_attention().without(*QKV_BIAS, *HEAD_NORMS)

LLAMA = Family(
    architecture="LlamaForCausalLM",
    model_types=("llama",),
    qkv_bias=False,
    qk_norm=False,
    head_dim="derived",
    kv_heads="heads",
    fixed={
        "hidden_act": ("silu",),
        "attention_bias": (False,),  # true also puts a bias on o_proj
        "mlp_bias": (False,),  # SGLang's llama ignores it
        "bias": (False,),  # SGLang's llama reads it as attention_bias
        "attention_dropout": (0, 0.0),
        "rope_interleaved": (False,),
        "rope_is_neox_style": (True,),
        "partial_rotary_factor": (1, 1.0),
    },
    harmless=frozenset(),
    blocks={"dense": _ATTENTION + gated_mlp(), **ENDS},
    served=Served(pipeline=True, tied="one_stage", head_everywhere=True),
    ropes=("default", "llama3"),
)
