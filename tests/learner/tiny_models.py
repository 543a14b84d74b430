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


def make(family: str, folder: Path, tied: bool = False) -> Any:
    """Build a model of `family` in fp32, save it into `folder`, and return it."""
    config_class, model_class, extra = {
        "llama": (
            transformers.LlamaConfig,
            transformers.LlamaForCausalLM,
            {"rope_parameters": LLAMA3_ROPE},
        ),
        "qwen2": (transformers.Qwen2Config, transformers.Qwen2ForCausalLM, {}),
        "qwen3": (transformers.Qwen3Config, transformers.Qwen3ForCausalLM, {"head_dim": 32}),
    }[family]
    config = config_class(**COMMON, **extra, tie_word_embeddings=tied)
    config._attn_implementation = "eager"
    torch.manual_seed(7)
    model = model_class(config).float().eval()
    generator = torch.Generator().manual_seed(11)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            center = 1.0 if "norm" in name else 0.0
            parameter.normal_(center, 0.15, generator=generator)
    model.save_pretrained(folder)
    return model
