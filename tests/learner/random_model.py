"""A Hugging Face checkpoint with random weights, written without torch or transformers."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from megarl.actor.parameters import parameter_table
from megarl.actor.shape import read_shape

# With 300 tokens, Megatron pads to 384 rows at tp 1 and to 512 at tp 2.
CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 300,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "max_position_embeddings": 256,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
    "eos_token_id": 2,
}


def write(folder: Path, seed: int = 5, deviation: float = 0.1, **changes: object) -> Path:
    """Weights of that standard deviation; `changes` are fields of config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**CONFIG, **changes}))
    draw = np.random.default_rng(seed)
    tensors = {}
    for parameter in parameter_table(read_shape(folder)):
        center = 1.0 if "norm" in parameter.name else 0.0
        values = draw.normal(center, deviation, parameter.shape)
        tensors[parameter.name] = values.astype(np.float32)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder
