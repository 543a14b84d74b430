"""The model of the timed steps: a small Qwen3 with random weights, as a checkpoint."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from megarl.actor.parameters import parameter_table
from megarl.actor.shape import read_shape

VOCAB_SIZE = 8192
CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 256,
    "intermediate_size": 640,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "max_position_embeddings": 2048,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
    "eos_token_id": 2,
}


def write(folder: Path, **changes: int) -> Path:
    """Write it into `folder`, which is made; returns it. `changes` are fields of config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**CONFIG, **changes}))
    draw = np.random.default_rng(0)
    tensors = {
        parameter.name: draw.normal(float("norm" in parameter.name), 0.02, parameter.shape).astype(
            np.float32
        )
        for parameter in parameter_table(read_shape(folder))
    }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder
