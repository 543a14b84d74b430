"""Tiny shapes of every family, a few thousand parameters each."""

from __future__ import annotations

from dataclasses import replace

from megarl.actor.shape import LatentAttention, MixtureOfExperts, ModelShape

ROUTED = MixtureOfExperts(
    num_experts=8,
    experts_per_token=2,
    expert_intermediate_size=6,
    shared_intermediate_size=0,
    router_bias=False,
    scoring="softmax",
    normalize=True,
    scaling=1.0,
    num_groups=1,
    groups_per_token=1,
    dense_layers=(),
)
WITH_SHARED = replace(
    ROUTED,
    shared_intermediate_size=12,
    router_bias=True,
    scoring="sigmoid",
    scaling=2.5,
    num_groups=2,
    dense_layers=(0,),
)
LATENT = LatentAttention(
    q_lora_rank=10, kv_lora_rank=6, qk_nope_head_dim=4, qk_rope_head_dim=2, v_head_dim=5
)

OF_FAMILY: dict[str, dict[str, object]] = {
    "LlamaForCausalLM": {},
    "Qwen2ForCausalLM": {"qkv_bias": True},
    "Qwen3ForCausalLM": {"qk_norm": True},
    "Qwen3MoeForCausalLM": {"qk_norm": True, "moe": ROUTED},
    "DeepseekV3ForCausalLM": {
        "num_kv_heads": 4,
        "head_dim": 6,
        "mla": LATENT,
        "moe": WITH_SHARED,
    },
    "Glm4MoeForCausalLM": {
        "qkv_bias": True,
        "qk_norm": True,
        "moe": WITH_SHARED,
        "rotary_fraction": 0.5,
    },
}


def tiny_shape(architecture: str, **changes: object) -> ModelShape:
    """A shape of three layers; `changes` are fields of ModelShape."""
    values: dict[str, object] = {
        "architecture": architecture,
        "num_layers": 3,
        "hidden_size": 16,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 4,
        "intermediate_size": 24,
        "vocab_size": 100,
        "tie_embeddings": False,
        "qkv_bias": False,
        "qk_norm": False,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "rope_scaling": None,
        "max_positions": 128,
        **OF_FAMILY[architecture],
    }
    return ModelShape(**{**values, **changes})  # type: ignore[arg-type]
