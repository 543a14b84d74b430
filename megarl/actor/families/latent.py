"""Multi-head latent attention: queries, keys and values through low ranks. Data only.

Megatron's names are those of its MLASelfAttention, megatron-core 0.19. Transformer Engine's spec
has the norms of the low ranks inside the projections up from them and the projections down whole on
every rank; the local spec has the norms beside them and cuts the projections down by rows. SGLang's
names are those of its deepseek_v2 model, sglang 0.5; what it derives from kv_b_proj (w_kc, w_vc) is
no parameter.

Hugging Face's kv_a_proj_with_mqa is `kv_down` beside low-rank queries, which SGLang fuses it with,
and `kv_down_alone` beside full-rank ones. Full-rank queries (Moonlight) have no norm of their own;
the class that Megatron itself chooses for them has one, so `compat/megatron_latent.py` builds the
spec's own.
"""

from __future__ import annotations

from megarl.actor.families.dense import HF, LOCAL, MEGATRON, TE
from megarl.actor.families.family import Held, Part, Weight


def latent_attention(hf: str = HF, megatron: str = MEGATRON, sglang: str = HF) -> Part:
    """The norm before it, the projections down and up, and the output."""
    stored, mine, served = f"{hf}self_attn.", f"{megatron}self_attention.", f"{sglang}self_attn."
    return (
        Part(
            (Weight("attention_norm", f"{hf}input_layernorm.weight", ("hidden",)),),
            (Held(f"{megatron}input_layernorm.weight", "whole", ("attention_norm",)),),
            (Held(f"{sglang}input_layernorm.weight", "whole", ("attention_norm",)),),
        )
        + _low_rank_queries(stored, mine, served)
        + _full_rank_queries(stored, mine, served)
        + _keys_values_output(stored, mine, served)
    )


def _down(mine: str, which: str, kind: str) -> tuple[Held, Held]:
    """Megatron's projection to a low rank, under each spec."""
    name = f"{mine}linear_{which}_down_proj.weight"
    return Held(name, "whole", (kind,), forms=TE), Held(name, "rows", (kind,), forms=LOCAL)


def _norm(mine: str, which: str, kind: str) -> tuple[Held, Held]:
    """Megatron's norm of a low rank, under each spec."""
    inside = f"{mine}linear_{which}_up_proj.layer_norm_weight"
    beside = f"{mine}{which}_layernorm.weight"
    return Held(inside, "whole", (kind,), forms=TE), Held(beside, "whole", (kind,), forms=LOCAL)


def _low_rank_queries(stored: str, mine: str, served: str) -> Part:
    fused = f"{served}fused_qkv_a_proj_with_mqa.weight"
    kv_down = f"{stored}kv_a_proj_with_mqa.weight"
    return Part(
        (
            Weight("query_down", f"{stored}q_a_proj.weight", ("q_lora", "hidden"), quantized=True),
            Weight("query_down_norm", f"{stored}q_a_layernorm.weight", ("q_lora",)),
            Weight("query_up", f"{stored}q_b_proj.weight", ("query", "q_lora"), quantized=True),
            Weight("kv_down", kv_down, ("kv_down", "hidden"), quantized=True),
        ),
        (
            *_down(mine, "q", "query_down"),
            *_norm(mine, "q", "query_down_norm"),
            Held(f"{mine}linear_q_up_proj.weight", "rows", ("query_up",)),
            *_down(mine, "kv", "kv_down"),
        ),
        (
            Held(fused, "whole", ("query_down", "kv_down")),
            Held(f"{served}q_a_layernorm.weight", "whole", ("query_down_norm",)),
            Held(f"{served}q_b_proj.weight", "rows", ("query_up",)),
        ),
    )


def _full_rank_queries(stored: str, mine: str, served: str) -> Part:
    kv_down = "kv_a_proj_with_mqa.weight"
    return Part(
        (
            Weight("query_full", f"{stored}q_proj.weight", ("query", "hidden"), quantized=True),
            Weight("kv_down_alone", f"{stored}{kv_down}", ("kv_down", "hidden"), quantized=True),
        ),
        (
            Held(f"{mine}linear_q_proj.weight", "rows", ("query_full",)),
            *_down(mine, "kv", "kv_down_alone"),
        ),
        (
            Held(f"{served}q_proj.weight", "rows", ("query_full",)),
            Held(f"{served}{kv_down}", "whole", ("kv_down_alone",)),
        ),
    )


def _keys_values_output(stored: str, mine: str, served: str) -> Part:
    output = ("hidden", "attention")
    return Part(
        (
            Weight("kv_down_norm", f"{stored}kv_a_layernorm.weight", ("kv_lora",)),
            Weight("kv_up", f"{stored}kv_b_proj.weight", ("kv_up", "kv_lora"), quantized=True),
            Weight("attention_output", f"{stored}o_proj.weight", output, quantized=True),
        ),
        (
            *_norm(mine, "kv", "kv_down_norm"),
            Held(f"{mine}linear_kv_up_proj.weight", "rows", ("kv_up",)),
            Held(f"{mine}linear_proj.weight", "columns", ("attention_output",)),
        ),
        (
            Held(f"{served}kv_a_layernorm.weight", "whole", ("kv_down_norm",)),
            Held(f"{served}kv_b_proj.weight", "rows", ("kv_up",)),
            Held(f"{served}o_proj.weight", "columns", ("attention_output",)),
        ),
    )
