"""Tiny checkpoints of every family as SGLang reads them, and what a layout says of them.

Every element has a number of its own where the precision can hold it; float8 and bfloat16 tensors
are random.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

from megarl.actor.families import FAMILIES
from megarl.actor.parameters import BlockTable, block_table
from megarl.actor.shape import LatentAttention, MixtureOfExperts, ModelShape
from megarl.reshard.blocks import ScaleBlock
from megarl.reshard.execute import slices
from megarl.reshard.layout import Layout, local_box

Arrays = dict[str, np.ndarray]

YARN = {  # get_rope_cpu of SGLang builds no other for DeepSeek
    "rope_type": "deepseek_yarn",
    "type": "yarn",
    "factor": 40.0,
    "original_max_position_embeddings": 64,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "beta_fast": 32,
    "beta_slow": 1,
}
LARGEST_E4M3_CODE = 0x7E  # 448; 0x7F is NaN


def moe_shape(architecture: str, **changes: Any) -> ModelShape:
    """A tiny policy of a family with routed experts: one dense layer, then layers with experts."""
    experts: dict[str, Any] = {
        "num_experts": 8,
        "experts_per_token": 2,
        "expert_intermediate_size": 32,
        "shared_intermediate_size": 32,
        "router_bias": True,
        "scoring": "sigmoid",
        "normalize": True,
        "scaling": 2.5,
        "num_groups": 2 if architecture.startswith("Deepseek") else 1,
        "groups_per_token": 1,
        "dense_layers": (0,),
        **changes.pop("experts", {}),
    }
    shape: dict[str, Any] = {
        "architecture": architecture,
        "num_layers": 3,
        "hidden_size": 32,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 8,
        "intermediate_size": 64,
        "vocab_size": 100,
        "tie_embeddings": False,
        "qkv_bias": architecture == "Glm4MoeForCausalLM",
        "qk_norm": True,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "rope_scaling": None,
        "max_positions": 2560,
    }
    if architecture == "Qwen3MoeForCausalLM":
        experts |= {"shared_intermediate_size": 0, "router_bias": False, "scoring": "softmax"}
    if architecture == "DeepseekV3ForCausalLM":
        shape |= {"num_kv_heads": 4, "qk_norm": False, "mla": LatentAttention(24, 16, 8, 4, 12)}
    return ModelShape(**{**shape, **changes}, moe=MixtureOfExperts(**experts))


def save_checkpoint(
    folder: Path, shape: ModelShape, fp8_block: ScaleBlock | None = None
) -> dict[str, torch.Tensor]:
    """Write config.json and the weights; returns them by parameter name, stacks as stacks."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(hf_config(shape, fp8_block)))
    tensors = weights(block_table(shape, fp8_block), fp8_block is not None)
    stored = {}
    for parameter in block_table(shape, fp8_block).parameters:
        names = parameter.stored_names()
        whole = tensors[parameter.name]
        parts = whole if parameter.stacked else (whole,)
        stored |= {name: part.clone() for name, part in zip(names, parts, strict=True)}
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    return tensors


def hf_config(shape: ModelShape, fp8_block: ScaleBlock | None = None) -> dict[str, object]:
    """config.json as SGLang needs it."""
    config: dict[str, object] = {
        "architectures": [shape.architecture],
        "model_type": FAMILIES[shape.architecture].model_types[0],
        "hidden_act": "silu",
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "vocab_size": shape.vocab_size,
        "max_position_embeddings": shape.max_positions,
        "rms_norm_eps": shape.rms_norm_eps,
        "rope_theta": shape.rope_theta,
        "tie_word_embeddings": shape.tie_embeddings,
        "torch_dtype": "float32" if fp8_block is None else "bfloat16",
    }
    if shape.mla is not None:
        mla = shape.mla
        del config["head_dim"]
        config |= {
            "q_lora_rank": mla.q_lora_rank,
            "kv_lora_rank": mla.kv_lora_rank,
            "qk_nope_head_dim": mla.qk_nope_head_dim,
            "qk_rope_head_dim": mla.qk_rope_head_dim,
            "v_head_dim": mla.v_head_dim,
            "rope_scaling": YARN,
        }
    if shape.moe is not None:
        config |= _experts(shape)
    if fp8_block is not None:
        config["quantization_config"] = {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": list(fp8_block),
        }
    return config


def _experts(shape: ModelShape) -> dict[str, object]:
    moe = shape.moe
    assert moe is not None
    common = {
        "moe_intermediate_size": moe.expert_intermediate_size,
        "num_experts_per_tok": moe.experts_per_token,
        "norm_topk_prob": moe.normalize,
    }
    if shape.architecture == "Qwen3MoeForCausalLM":
        return {
            **common,
            "num_experts": moe.num_experts,
            "decoder_sparse_step": 1,
            "mlp_only_layers": list(moe.dense_layers),
        }
    own: dict[str, object] = {"moe_layer_freq": 1, "ep_size": 1}
    if shape.mla is None:  # GLM-4.5
        own = {"use_qk_norm": shape.qk_norm, "partial_rotary_factor": shape.rotary_fraction}
    return {
        **common,
        "n_routed_experts": moe.num_experts,
        "n_shared_experts": moe.shared_intermediate_size // moe.expert_intermediate_size,
        "first_k_dense_replace": len(moe.dense_layers),
        "n_group": moe.num_groups,
        "topk_group": moe.groups_per_token,
        "routed_scaling_factor": moe.scaling,
        "scoring_func": moe.scoring,
        "topk_method": "noaux_tc",
        "attention_bias": shape.qkv_bias,
        "num_nextn_predict_layers": shape.num_mtp_layers,
        **own,
    }


def weights(table: BlockTable, low_precision: bool = False) -> dict[str, torch.Tensor]:
    """Every parameter by name: float32 with a number for each element, or what FP8 models hold."""
    tensors, first = {}, 1
    random = np.random.default_rng(11)
    for parameter in table.parameters:
        last = first + parameter.num_elements
        if parameter.precision == "float8":
            codes = random.integers(0, LARGEST_E4M3_CODE, parameter.shape, dtype=np.uint8)
            tensor = torch.from_numpy(codes).view(torch.float8_e4m3fn)
        elif low_precision and parameter.precision == "policy":
            tensor = torch.from_numpy(random.normal(size=parameter.shape)).to(torch.bfloat16)
        else:
            tensor = torch.arange(first, last, dtype=torch.float32).reshape(parameter.shape)
        tensors[parameter.name] = tensor
        first = last
    assert first < 1 << 24, "float32 cannot number so many elements"
    return tensors


def held_by(layout: Layout, rank: int, tensors: dict[str, torch.Tensor]) -> Arrays:
    """What the layout says that a rank holds of `tensors`, as float32; NaN where nothing."""
    arrays = {name: tensor.to(torch.float32).numpy() for name, tensor in tensors.items()}
    written = layout.rank(rank)
    made = {t.name: np.full(t.shape, np.nan, np.float32) for t in written.tensors}
    for piece in written.pieces:
        target = made[piece.local][slices(local_box(piece.box, piece.at))]
        source = arrays[piece.tensor][slices(piece.box)]
        target[...] = source.reshape(target.shape)
    for padding in written.paddings:
        made[padding.local][slices(padding.box)] = 0
    return made
