"""The parts that dense decoders are made of: embeddings, grouped-query attention, gated MLP, norms.

Data only. Megatron's names are those of its two layer specs, megatron-core 0.19,
gpt_layer_specs.py: Transformer Engine's has a norm inside the linear that follows it, the local
one beside it. SGLang's are those of its llama, qwen2, qwen3 and glm4_moe models, sglang 0.5.
"""

from __future__ import annotations

from megarl.actor.families.family import Held, Part, Weight

HF = "model.layers.{layer}."
MEGATRON = "decoder.layers.{layer}."
TE, LOCAL = ("te",), ("local",)

EMBEDDING = Part(
    (Weight("embedding", "model.embed_tokens.weight", ("vocab", "hidden")),),
    (Held("embedding.word_embeddings.weight", "vocabulary", ("embedding",), "vocabulary"),),
    (Held("model.embed_tokens.weight", "vocabulary", ("embedding",), "vocabulary"),),
)

FINAL_NORM = Part(
    (Weight("final_norm", "model.norm.weight", ("hidden",)),),
    (Held("decoder.final_layernorm.weight", "whole", ("final_norm",)),),
    (Held("model.norm.weight", "whole", ("final_norm",)),),
)

HEAD = Part(
    (Weight("head", "lm_head.weight", ("vocab", "hidden")),),
    (Held("output_layer.weight", "vocabulary", ("head",), "vocabulary"),),
    (Held("lm_head.weight", "vocabulary", ("head",), "vocabulary"),),
)

_QKV = ("query", "key", "value")
QKV_BIAS = ("query_bias", "key_bias", "value_bias")
HEAD_NORMS = ("query_norm", "key_norm")


def grouped_query_attention(hf: str = HF, megatron: str = MEGATRON, sglang: str = HF) -> Part:
    """Queries in groups that share a key and a value; biases and per-head norms where they are.

    Take `.without(*QKV_BIAS)` or `.without(*HEAD_NORMS)` for a family that never has them.
    """
    attention, mine, served = f"{hf}self_attn.", f"{megatron}self_attention.", f"{sglang}self_attn."
    return Part(
        (
            Weight("attention_norm", f"{hf}input_layernorm.weight", ("hidden",)),
            Weight("query", f"{attention}q_proj.weight", ("query", "hidden"), quantized=True),
            Weight("key", f"{attention}k_proj.weight", ("kv", "hidden"), quantized=True),
            Weight("value", f"{attention}v_proj.weight", ("kv", "hidden"), quantized=True),
            Weight("query_bias", f"{attention}q_proj.bias", ("query",)),
            Weight("key_bias", f"{attention}k_proj.bias", ("kv",)),
            Weight("value_bias", f"{attention}v_proj.bias", ("kv",)),
            Weight("query_norm", f"{attention}q_norm.weight", ("head",)),
            Weight("key_norm", f"{attention}k_norm.weight", ("head",)),
            Weight(
                "attention_output",
                f"{attention}o_proj.weight",
                ("hidden", "attention"),
                quantized=True,
            ),
        ),
        (
            Held(f"{mine}linear_qkv.layer_norm_weight", "whole", ("attention_norm",), forms=TE),
            Held(f"{megatron}input_layernorm.weight", "whole", ("attention_norm",), forms=LOCAL),
            Held(f"{mine}linear_qkv.weight", "grouped_qkv", _QKV),
            Held(f"{mine}linear_qkv.bias", "grouped_qkv", QKV_BIAS),
            Held(f"{mine}q_layernorm.weight", "whole", ("query_norm",)),
            Held(f"{mine}k_layernorm.weight", "whole", ("key_norm",)),
            Held(f"{mine}linear_proj.weight", "columns", ("attention_output",)),
        ),
        (
            Held(f"{sglang}input_layernorm.weight", "whole", ("attention_norm",)),
            Held(f"{served}qkv_proj.weight", "heads_qkv", _QKV),
            Held(f"{served}qkv_proj.bias", "heads_qkv", QKV_BIAS),
            Held(f"{served}q_norm.weight", "whole", ("query_norm",)),
            Held(f"{served}k_norm.weight", "whole", ("key_norm",)),
            Held(f"{served}o_proj.weight", "columns", ("attention_output",)),
        ),
    )


def gated_mlp(hf: str = HF, megatron: str = MEGATRON, sglang: str = HF) -> Part:
    """A norm, a gate and an up projection side by side, and a down projection."""
    fc1 = f"{megatron}mlp.linear_fc1"
    return Part(
        (
            Weight("mlp_norm", f"{hf}post_attention_layernorm.weight", ("hidden",)),
            Weight("gate", f"{hf}mlp.gate_proj.weight", ("inner", "hidden"), quantized=True),
            Weight("up", f"{hf}mlp.up_proj.weight", ("inner", "hidden"), quantized=True),
            Weight("down", f"{hf}mlp.down_proj.weight", ("hidden", "inner"), quantized=True),
        ),
        (
            Held(f"{fc1}.layer_norm_weight", "whole", ("mlp_norm",), "mlp", TE),
            Held(f"{megatron}pre_mlp_layernorm.weight", "whole", ("mlp_norm",), "mlp", LOCAL),
            Held(f"{fc1}.weight", "rows", ("gate", "up"), "mlp"),
            Held(f"{megatron}mlp.linear_fc2.weight", "columns", ("down",), "mlp"),
        ),
        (
            Held(f"{sglang}post_attention_layernorm.weight", "whole", ("mlp_norm",), "mlp"),
            Held(f"{sglang}mlp.gate_up_proj.weight", "rows", ("gate", "up"), "mlp"),
            Held(f"{sglang}mlp.down_proj.weight", "columns", ("down",), "mlp"),
        ),
    )


ENDS = {"embedding": EMBEDDING, "final_norm": FINAL_NORM, "head": HEAD}
