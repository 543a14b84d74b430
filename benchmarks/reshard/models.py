"""Shapes of published models, from their config.json. Data only.

Their MTP layers are left out, as they are where they are not trained.
"""

from __future__ import annotations

from megarl.actor.shape import LatentAttention, MixtureOfExperts, ModelShape


def _llama(layers: int, hidden: int, heads: int, inner: int) -> ModelShape:
    return ModelShape(
        architecture="LlamaForCausalLM",
        num_layers=layers,
        hidden_size=hidden,
        num_heads=heads,
        num_kv_heads=8,
        head_dim=128,
        intermediate_size=inner,
        vocab_size=128256,
        tie_embeddings=False,
        qkv_bias=False,
        qk_norm=False,
        rms_norm_eps=1e-5,
        rope_theta=500000.0,
        rope_scaling=None,  # it has no bearing on layouts
        max_positions=131072,
    )


def _qwen3_moe(layers: int, hidden: int, heads: int, inner: int, expert: int) -> ModelShape:
    return ModelShape(
        architecture="Qwen3MoeForCausalLM",
        num_layers=layers,
        hidden_size=hidden,
        num_heads=heads,
        num_kv_heads=4,
        head_dim=128,
        intermediate_size=inner,
        vocab_size=151936,
        tie_embeddings=False,
        qkv_bias=False,
        qk_norm=True,
        rms_norm_eps=1e-6,
        rope_theta=1000000.0,
        rope_scaling=None,
        max_positions=40960,
        moe=MixtureOfExperts(
            num_experts=128,
            experts_per_token=8,
            expert_intermediate_size=expert,
            shared_intermediate_size=0,
            router_bias=False,
            scoring="softmax",
            normalize=True,
            scaling=1.0,
            num_groups=1,
            groups_per_token=1,
            dense_layers=(),
        ),
    )


def _deepseek(heads: int, vocab: int, experts: int, dense: int, scaling: float) -> ModelShape:
    return ModelShape(
        architecture="DeepseekV3ForCausalLM",
        num_layers=61,
        hidden_size=7168,
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=192,
        intermediate_size=18432,
        vocab_size=vocab,
        tie_embeddings=False,
        qkv_bias=False,
        qk_norm=False,
        rms_norm_eps=1e-6,
        rope_theta=10000.0,
        rope_scaling=None,
        max_positions=131072,
        mla=LatentAttention(
            q_lora_rank=1536,
            kv_lora_rank=512,
            qk_nope_head_dim=128,
            qk_rope_head_dim=64,
            v_head_dim=128,
        ),
        moe=MixtureOfExperts(
            num_experts=experts,
            experts_per_token=8,
            expert_intermediate_size=2048,
            shared_intermediate_size=2048,
            router_bias=True,
            scoring="sigmoid",
            normalize=True,
            scaling=scaling,
            num_groups=1,
            groups_per_token=1,
            dense_layers=tuple(range(dense)),
        ),
    )


LLAMA_70B = _llama(80, 8192, 64, 28672)
LLAMA_405B = _llama(126, 16384, 128, 53248)
QWEN3_30B = _qwen3_moe(48, 2048, 32, 6144, 768)
QWEN3_235B = _qwen3_moe(94, 4096, 64, 12288, 1536)
DEEPSEEK_V3 = _deepseek(128, 129280, 256, 3, 2.5)
KIMI_K2 = _deepseek(64, 163840, 384, 1, 2.827)
