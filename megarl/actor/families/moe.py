"""The parts of layers with routed experts: router, experts, shared experts. Data only.

Megatron's names are those of its MoELayer, megatron-core 0.19 (transformer/moe); SGLang's those of
its FusedMoE and of its qwen3_moe, deepseek_v2 and glm4_moe models, sglang 0.5, with the shared
experts apart (SGLang fuses them into w13 and w2 unless --disable-shared-experts-fusion is given).
"""

from __future__ import annotations

from megarl.actor.families.dense import HF, MEGATRON
from megarl.actor.families.family import Axis, Held, Part, Weight

_GATE_UP = ("expert_gate", "expert_up")

ALL_TO_ALL = ("deepep", "mooncake", "nixl", "mori", "flashinfer")
"""With each of these SGLang's models here have whole shared experts; others are not read yet."""


def router(
    hf: str = HF, megatron: str = MEGATRON, sglang: str = HF, float32_on_server: bool = False
) -> Part:
    """The norm before the experts, the router and, where it has one, its correction bias.

    The norm is a module of its own in both of Megatron's specs: router and experts all read it.
    """
    norm = "post_attention_layernorm.weight"
    bias = "mlp.gate.e_score_correction_bias"
    return Part(
        (
            Weight("mlp_norm", f"{hf}{norm}", ("hidden",)),
            Weight("router", f"{hf}mlp.gate.weight", ("experts", "hidden")),
            Weight("router_bias", f"{hf}{bias}", ("experts",), float32=True),
        ),
        (
            Held(f"{megatron}pre_mlp_layernorm.weight", "whole", ("mlp_norm",), "mlp"),
            Held(f"{megatron}mlp.router.weight", "whole", ("router",), "mlp"),
            Held(f"{megatron}mlp.router.expert_bias", "whole", ("router_bias",), "mlp", (), True),
        ),
        (
            Held(f"{sglang}{norm}", "whole", ("mlp_norm",), "mlp"),
            Held(
                f"{sglang}mlp.gate.weight", "whole", ("router",), "mlp", float32=float32_on_server
            ),
            Held(f"{sglang}{bias}", "whole", ("router_bias",), "mlp"),
        ),
    )


def routed_experts(hf: str = HF, megatron: str = MEGATRON, sglang: str = HF) -> Part:
    """The gated MLPs of the routed experts, as stacks."""
    stored, mine = f"{hf}mlp.experts.{{expert}}.", f"{megatron}mlp.experts."
    one = f"{mine}local_experts.{{expert}}."
    inner, outer = ("expert_inner", "hidden"), ("hidden", "expert_inner")
    each, together, apart = ("per_expert",), ("grouped",), ("sequential",)
    return Part(
        (
            Weight("expert_gate", f"{stored}gate_proj.weight", inner, quantized=True),
            Weight("expert_up", f"{stored}up_proj.weight", inner, quantized=True),
            Weight("expert_down", f"{stored}down_proj.weight", outer, quantized=True),
        ),
        (
            Held(f"{mine}linear_fc1.weight{{expert}}", "rows", _GATE_UP, "experts", each),
            Held(
                f"{mine}linear_fc2.weight{{expert}}", "columns", ("expert_down",), "experts", each
            ),
            Held(f"{mine}linear_fc1.weight", "rows", _GATE_UP, "experts", together),
            Held(f"{mine}linear_fc2.weight", "columns", ("expert_down",), "experts", together),
            Held(f"{one}linear_fc1.weight", "rows", _GATE_UP, "experts", apart),
            Held(f"{one}linear_fc2.weight", "columns", ("expert_down",), "experts", apart),
        ),
        (
            Held(f"{sglang}mlp.experts.w13_weight", "rows", _GATE_UP, "experts"),
            Held(f"{sglang}mlp.experts.w2_weight", "columns", ("expert_down",), "experts"),
        ),
    )


def shared_experts(hf: str = HF, megatron: str = MEGATRON, sglang: str = HF) -> Part:
    """The gated MLP that every token passes, without a gate of its own."""
    stored, mine, served = (f"{prefix}mlp.shared_experts." for prefix in (hf, megatron, sglang))
    inner, outer = ("shared_inner", "hidden"), ("hidden", "shared_inner")
    axis: Axis = "shared_experts"
    return Part(
        (
            Weight("shared_gate", f"{stored}gate_proj.weight", inner, quantized=True),
            Weight("shared_up", f"{stored}up_proj.weight", inner, quantized=True),
            Weight("shared_down", f"{stored}down_proj.weight", outer, quantized=True),
        ),
        (
            Held(f"{mine}linear_fc1.weight", "rows", ("shared_gate", "shared_up"), axis),
            Held(f"{mine}linear_fc2.weight", "columns", ("shared_down",), axis),
        ),
        (
            Held(f"{served}gate_up_proj.weight", "rows", ("shared_gate", "shared_up"), axis),
            Held(f"{served}down_proj.weight", "columns", ("shared_down",), axis),
        ),
    )
