"""The fields of published config.json files that decide sizes and mathematics, by model.

Facts of the models' public pages, written out field by field.
"""

from __future__ import annotations

Config = dict[str, object]

COMMON: Config = {"hidden_act": "silu", "tie_word_embeddings": False}
FP8: Config = {
    "quantization_config": {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "quant_method": "fp8",
        "weight_block_size": [128, 128],
    }
}


def sizes(layers: int, hidden: int, heads: int, kv_heads: int, inner: int) -> Config:
    return {
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "intermediate_size": inner,
    }


def yarn(factor: float, beta_fast: float) -> Config:
    return {
        "rope_scaling": {
            "beta_fast": beta_fast,
            "beta_slow": 1.0,
            "factor": factor,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "original_max_position_embeddings": 4096,
            "type": "yarn",
        }
    }


LLAMA: Config = {
    **COMMON,
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 128256,
    "rope_theta": 500000.0,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 131072,
    "attention_bias": False,
    "mlp_bias": False,
    "rope_scaling": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
}
QWEN: Config = {
    **COMMON,
    "vocab_size": 151936,
    "rope_theta": 1000000,
    "rms_norm_eps": 1e-6,
    "use_sliding_window": False,
    "sliding_window": None,
    "max_window_layers": 28,
    "max_position_embeddings": 32768,
}
QWEN2: Config = {**QWEN, "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}
QWEN3: Config = {
    **QWEN,
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "head_dim": 128,
    "attention_bias": False,
}
QWEN3_MOE: Config = {
    **QWEN3,
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "max_position_embeddings": 40960,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "norm_topk_prob": True,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "output_router_logits": False,
    "rope_scaling": None,
    "router_aux_loss_coef": 0.001,
}
LATENT: Config = {
    **COMMON,
    "architectures": ["DeepseekV3ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV3Config"},
    "ep_size": 1,
    "kv_lora_rank": 512,
    "moe_layer_freq": 1,
    "n_group": 1,
    "norm_topk_prob": True,
    "num_nextn_predict_layers": 0,
    "pretraining_tp": 1,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "scoring_func": "sigmoid",
    "topk_group": 1,
    "topk_method": "noaux_tc",
    "v_head_dim": 128,
}
GLM: Config = {
    **COMMON,
    "architectures": ["Glm4MoeForCausalLM"],
    "model_type": "glm4_moe",
    "attention_bias": True,
    "attention_dropout": 0.0,
    "head_dim": 128,
    "max_position_embeddings": 131072,
    "n_group": 1,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_experts_per_tok": 8,
    "num_nextn_predict_layers": 1,
    "partial_rotary_factor": 0.5,
    "rms_norm_eps": 1e-5,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "topk_group": 1,
    "vocab_size": 151552,
}

PUBLISHED: dict[str, Config] = {
    "Llama-3.1-8B": {**LLAMA, **sizes(32, 4096, 32, 8, 14336)},
    "Llama-3.3-70B": {**LLAMA, **sizes(80, 8192, 64, 8, 28672)},
    "Llama-3.1-405B": {**LLAMA, **sizes(126, 16384, 128, 8, 53248)},
    "Qwen2.5-7B": {**QWEN2, **sizes(28, 3584, 28, 4, 18944), "vocab_size": 152064},
    "Qwen2.5-0.5B": {**QWEN2, **sizes(24, 896, 14, 2, 4864), "tie_word_embeddings": True},
    "Qwen3-8B": {**QWEN3, **sizes(36, 4096, 32, 8, 12288)},
    "Qwen3-32B": {**QWEN3, **sizes(64, 5120, 64, 8, 25600)},
    "Qwen3-30B-A3B": {
        **QWEN3_MOE,
        **sizes(48, 2048, 32, 4, 6144),
        "moe_intermediate_size": 768,
    },
    "Qwen3-235B-A22B": {
        **QWEN3_MOE,
        **sizes(94, 4096, 64, 4, 12288),
        "moe_intermediate_size": 1536,
    },
    "Moonlight-16B-A3B": {
        **LATENT,
        **sizes(27, 2048, 16, 16, 11264),
        "model_type": "deepseek_v3",
        "aux_loss_alpha": 0.001,
        "first_k_dense_replace": 1,
        "max_position_embeddings": 8192,
        "moe_intermediate_size": 1408,
        "n_routed_experts": 64,
        "n_shared_experts": 2,
        "num_experts_per_tok": 6,
        "q_lora_rank": None,
        "rms_norm_eps": 1e-5,
        "rope_scaling": None,
        "rope_theta": 50000.0,
        "routed_scaling_factor": 2.446,
        "seq_aux": True,
        "vocab_size": 163840,
    },
    "DeepSeek-V3": {
        **LATENT,
        **FP8,
        **sizes(61, 7168, 128, 128, 18432),
        **yarn(40, 32),
        "model_type": "deepseek_v3",
        "first_k_dense_replace": 3,
        "max_position_embeddings": 163840,
        "moe_intermediate_size": 2048,
        "n_group": 8,
        "n_routed_experts": 256,
        "n_shared_experts": 1,
        "num_experts_per_tok": 8,
        "num_nextn_predict_layers": 1,
        "q_lora_rank": 1536,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000,
        "routed_scaling_factor": 2.5,
        "topk_group": 4,
        "vocab_size": 129280,
    },
    "Kimi-K2": {
        **LATENT,
        **FP8,
        **sizes(61, 7168, 64, 64, 18432),
        **yarn(32.0, 1.0),
        "model_type": "kimi_k2",
        "aux_loss_alpha": 0.001,
        "first_k_dense_replace": 1,
        "max_position_embeddings": 131072,
        "moe_intermediate_size": 2048,
        "n_routed_experts": 384,
        "n_shared_experts": 1,
        "num_experts_per_tok": 8,
        "q_lora_rank": 1536,
        "rms_norm_eps": 1e-6,
        "rope_theta": 50000.0,
        "routed_scaling_factor": 2.827,
        "seq_aux": True,
        "vocab_size": 163840,
    },
    "GLM-4.5": {
        **GLM,
        **sizes(92, 5120, 96, 8, 12288),
        "first_k_dense_replace": 3,
        "moe_intermediate_size": 1536,
        "n_routed_experts": 160,
        "routed_scaling_factor": 2.5,
        "use_qk_norm": True,
    },
    "GLM-4.5-Air": {
        **GLM,
        **sizes(46, 4096, 96, 8, 10944),
        "first_k_dense_replace": 1,
        "moe_intermediate_size": 1408,
        "n_routed_experts": 128,
        "routed_scaling_factor": 1.0,
        "use_qk_norm": False,
    },
}
