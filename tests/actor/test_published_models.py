"""Published configs of large models: accepted at their published size, or refused by name."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megarl.actor.parameters import parameter_table
from megarl.actor.shape import Llama3Rope, ModelShape, read_shape
from megarl.errors import ModelError

# The fields of the published config.json files that decide sizes and mathematics.
COMMON = {"hidden_act": "silu", "tie_word_embeddings": False}
LLAMA = {
    **COMMON,
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 128256,
    "rope_theta": 500000.0,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 131072,
    "attention_bias": False,
    "mlp_bias": False,
    "num_key_value_heads": 8,
    "rope_scaling": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
}
QWEN = {
    **COMMON,
    "rope_theta": 1000000,
    "rms_norm_eps": 1e-6,
    "use_sliding_window": False,
    "sliding_window": None,
    "max_window_layers": 28,
}


def sizes(layers: int, hidden: int, heads: int, kv_heads: int, inner: int) -> dict[str, int]:
    return {
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "intermediate_size": inner,
    }


QWEN2 = {**QWEN, "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}
QWEN3 = {
    **QWEN,
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "head_dim": 128,
    "attention_bias": False,
}
LONG = {"max_position_embeddings": 32768}

# Parameters as the hubs' safetensors metadata counts them (tied embeddings once).
PUBLISHED: dict[str, tuple[dict[str, object], int]] = {
    "Llama-3.1-8B": ({**LLAMA, **sizes(32, 4096, 32, 8, 14336)}, 8_030_261_248),
    "Llama-3.3-70B": ({**LLAMA, **sizes(80, 8192, 64, 8, 28672)}, 70_553_706_496),
    "Llama-3.1-405B": ({**LLAMA, **sizes(126, 16384, 128, 8, 53248)}, 405_853_388_800),
    "Qwen2.5-7B": (
        {**QWEN2, **LONG, **sizes(28, 3584, 28, 4, 18944), "vocab_size": 152064},
        7_615_616_512,
    ),
    "Qwen2.5-0.5B": (
        {
            **QWEN2,
            **LONG,
            **sizes(24, 896, 14, 2, 4864),
            "vocab_size": 151936,
            "tie_word_embeddings": True,
        },
        494_032_768,
    ),
    "Qwen3-8B": (
        {**QWEN3, **LONG, **sizes(36, 4096, 32, 8, 12288), "vocab_size": 151936},
        8_190_735_360,
    ),
    "Qwen3-32B": (
        {**QWEN3, **LONG, **sizes(64, 5120, 64, 8, 25600), "vocab_size": 151936},
        32_762_123_264,
    ),
}


def num_parameters(shape: ModelShape) -> int:
    return sum(parameter.num_elements for parameter in parameter_table(shape))


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_model_has_its_published_number_of_parameters(name: str, tmp_path: Path) -> None:
    config, published = PUBLISHED[name]
    (tmp_path / "config.json").write_text(json.dumps(config))
    shape = read_shape(tmp_path)
    assert num_parameters(shape) == published
    assert shape.rope_scaling == (Llama3Rope(8.0) if name.startswith("Llama") else None)


@pytest.mark.parametrize(
    ("architecture", "extra"),
    [
        ("Qwen3MoeForCausalLM", {"model_type": "qwen3_moe", "num_experts": 128}),
        ("DeepseekV3ForCausalLM", {"model_type": "deepseek_v3", "kv_lora_rank": 512}),
        ("Glm4MoeForCausalLM", {"model_type": "glm4_moe", "n_routed_experts": 160}),
    ],
)
def test_mixture_of_experts_and_latent_attention_are_refused_by_name(
    architecture: str, extra: dict[str, object], tmp_path: Path
) -> None:
    config = {**PUBLISHED["Qwen3-8B"][0], "architectures": [architecture], **extra}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match=architecture):
        read_shape(tmp_path)
