"""Tiny Hugging Face models of each family, with random weights, saved as checkpoints.

Made in a process of their own kind: transformers and torch, without Megatron.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers

VOCAB_SIZE = 150  # divisible by nothing that pads it
COMMON: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 16384,
    "rms_norm_eps": 1e-6,
    "pad_token_id": None,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
DEEPSEEK_YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 4096,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 0.5,
}
QWEN3_EXPERTS = {
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}
DEEPSEEK_EXPERTS = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
}
LATENT_HEADS = {
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 20,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
}


FAMILIES: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "llama": (
        transformers.LlamaConfig,
        transformers.LlamaForCausalLM,
        {"rope_parameters": LLAMA3_ROPE},
    ),
    "qwen2": (transformers.Qwen2Config, transformers.Qwen2ForCausalLM, {}),
    "qwen3": (transformers.Qwen3Config, transformers.Qwen3ForCausalLM, {"head_dim": 32}),
    "qwen3-moe": (
        transformers.Qwen3MoeConfig,
        transformers.Qwen3MoeForCausalLM,
        {"head_dim": 32, **QWEN3_EXPERTS},
    ),
    "deepseek-v3": (
        transformers.DeepseekV3Config,
        transformers.DeepseekV3ForCausalLM,
        {
            **DEEPSEEK_EXPERTS,
            **LATENT_HEADS,
            "n_group": 2,
            "topk_group": 1,
            "rope_parameters": DEEPSEEK_YARN,
        },
    ),
    "moonlight": (
        transformers.DeepseekV3Config,
        transformers.DeepseekV3ForCausalLM,
        {
            **DEEPSEEK_EXPERTS,
            **LATENT_HEADS,
            "q_lora_rank": None,
            "n_group": 1,
            "topk_group": 1,
            "rope_parameters": {"rope_type": "default", "rope_theta": 50000.0},
        },
    ),
    "glm4-moe": (
        transformers.Glm4MoeConfig,
        transformers.Glm4MoeForCausalLM,
        {
            **DEEPSEEK_EXPERTS,
            "head_dim": 32,
            "n_group": 1,
            "topk_group": 1,
            "attention_bias": True,
            "use_qk_norm": True,
        },
    ),
}


def make(family: str, folder: Path, tied: bool = False) -> Any:
    """Build a model of `family` in fp32, save it into `folder`, and return it."""
    config_class, model_class, extra = FAMILIES[family]
    config = config_class(**{**COMMON, **extra}, tie_word_embeddings=tied)
    config._attn_implementation = "eager"
    torch.manual_seed(7)
    model = model_class(config).float().eval()
    generator = torch.Generator().manual_seed(11)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            center = 1.0 if "norm" in name else 0.0
            parameter.normal_(center, 0.15, generator=generator)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.normal_(0.0, 0.15, generator=generator)
    model.save_pretrained(folder)
    return model
