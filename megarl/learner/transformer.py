"""Megatron's configuration of the policy: one TransformerConfig of a shape and the settings.

Owns the translation for every family: attention, grouped or latent, its rope, dense and expert
layers, the router, and the sizes of the mesh. Knows nothing of weights, ranks or losses. Import it
after `megatron_cpu.install()`.
"""

from __future__ import annotations

import importlib.util
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.distributed import finalize_model_grads
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig
from torch import Tensor

from megarl.actor.shape import LatentAttention, MixtureOfExperts, ModelShape, Yarn
from megarl.config.fp8 import transformer_fields
from megarl.config.recompute import recompute_fields
from megarl.config.schema import LearnerConfig
from megarl.config.transformer_fields import field_violations
from megarl.errors import ConfigError
from megarl.reshard.megatron import check_supported

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def has_transformer_engine() -> bool:
    """Whether this process can build Transformer Engine's layers: it has CUDA and the package."""
    found = importlib.util.find_spec("transformer_engine") is not None
    return found and torch.cuda.is_available()


def sum_gradients(model: list[Any], num_tokens: Tensor | None = None, **groups: Any) -> None:
    """Megatron's finalize_model_grads without its division: the loss is divided already."""
    finalize_model_grads(model, None, **groups)


def transformer_config(
    shape: ModelShape, learner: LearnerConfig, on_cpu: bool
) -> TransformerConfig:
    """Megatron's TransformerConfig of this policy, mesh and precision.

    Raises ConfigError where `learner.transformer_config` names a field that Megatron does not have
    or one that megarl sets itself, or where Megatron refuses the whole; LayoutError where a field
    makes another layout.
    """
    ours = fixed_fields(shape, learner, on_cpu)
    extra = dict(learner.transformer_config)
    kind = TransformerConfig if shape.mla is None else MLATransformerConfig
    violations = field_violations(extra)
    if "fp4" in extra and not has_transformer_engine():
        violations.append(
            "learner.transformer_config.fp4: without Transformer Engine, Megatron would silently "
            "run without it"
        )
    if violations:
        raise ConfigError(violations)
    check_supported(extra)
    try:
        return kind(**{**_defaults(shape, learner), **extra, **ours})
    except (TypeError, ValueError, AssertionError) as error:
        raise ConfigError(
            f"Megatron-Core refuses the learner's configuration with learner.transformer_config = "
            f"{extra}: {error}"
        ) from error


def fixed_fields(shape: ModelShape, learner: LearnerConfig, on_cpu: bool) -> dict[str, Any]:
    """The fields that megarl sets; `learner.transformer_config` must not name them."""
    return {
        **_settings(shape, learner, on_cpu),
        **(_experts(shape, shape.moe) if shape.moe is not None else {}),
        **(_latent(shape, shape.mla) if shape.mla is not None else _grouped(shape)),
    }


def _settings(shape: ModelShape, learner: LearnerConfig, on_cpu: bool) -> dict[str, Any]:
    """What every family has, and the sizes of the mesh."""
    dtype, parallel = DTYPES[learner.precision.params], learner.parallel
    return {
        "num_layers": shape.num_layers,
        "hidden_size": shape.hidden_size,
        "num_attention_heads": shape.num_heads,
        "ffn_hidden_size": shape.intermediate_size,
        "normalization": "RMSNorm",
        "layernorm_epsilon": shape.rms_norm_eps,
        "gated_linear_unit": True,
        "activation_func": F.silu,
        "add_bias_linear": False,
        "add_qkv_bias": shape.qkv_bias,
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
        "mtp_num_layers": shape.num_mtp_layers or None,
        "tensor_model_parallel_size": parallel.tp,
        "pipeline_model_parallel_size": parallel.pp,
        "virtual_pipeline_model_parallel_size": parallel.vpp if parallel.vpp > 1 else None,
        "num_layers_in_first_pipeline_stage": parallel.first_stage_layers or None,
        "num_layers_in_last_pipeline_stage": parallel.last_stage_layers or None,
        "pipeline_model_parallel_layout": parallel.pipeline_layout or None,
        # Two chunks of a stage may have to do with one neighbour, whose batched messages mix.
        "overlap_p2p_comm": parallel.vpp > 1,
        "batch_p2p_comm": parallel.vpp == 1,
        "microbatch_group_size_per_vp_stage": parallel.pp,
        "context_parallel_size": parallel.cp,
        "sequence_parallel": parallel.sequence_parallel and parallel.tp > 1,
        "expert_model_parallel_size": parallel.ep,
        "expert_tensor_parallel_size": parallel.etp,
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "bf16": dtype is torch.bfloat16,
        "use_cpu_initialization": on_cpu,
        "perform_initialization": False,  # every element comes from the checkpoint
        "calculate_per_token_loss": True,  # gradients are summed over ranks, never averaged
        "finalize_model_grads_func": sum_gradients,
        **recompute_fields(learner.recompute),
        **transformer_fields(learner.precision),
    }


def _defaults(shape: ModelShape, learner: LearnerConfig) -> dict[str, Any]:
    """What `learner.transformer_config` may have otherwise."""
    found: dict[str, Any] = {
        # Unfused it loops over the sequences. Megatron's fused one for latent attention is apart.
        "apply_rope_fusion": has_transformer_engine() and shape.mla is None,
    }
    if shape.moe is not None:
        found |= {
            "moe_grouped_gemm": True,
            "moe_token_dispatcher_type": "alltoall",
            "moe_router_dtype": "fp32",
            "moe_router_bias_update_rate": 0.0,  # the router's bias stays the checkpoint's
        }
    return found


def _grouped(shape: ModelShape) -> dict[str, Any]:
    return {
        "num_query_groups": shape.num_kv_heads,
        "kv_channels": shape.head_dim,
        "qk_layernorm": shape.qk_norm,
    }


def _latent(shape: ModelShape, mla: LatentAttention) -> dict[str, Any]:
    """Latent attention, which normalizes its low ranks and has its own rope."""
    rope = shape.rope_scaling
    settings = {
        "qk_layernorm": True,
        "q_lora_rank": mla.q_lora_rank,
        "kv_lora_rank": mla.kv_lora_rank,
        "qk_head_dim": mla.qk_nope_head_dim,
        "qk_pos_emb_head_dim": mla.qk_rope_head_dim,
        "v_head_dim": mla.v_head_dim,
        "rotary_base": shape.rope_theta,
        "rope_type": "rope",
        "rotary_scaling_factor": 1.0,
        "mscale_all_dim": 0.0,
    }
    if isinstance(rope, Yarn):
        settings |= {
            "rope_type": "yarn",
            "rotary_scaling_factor": rope.factor,
            "original_max_position_embeddings": rope.original_max_positions,
            "beta_fast": rope.beta_fast,
            "beta_slow": rope.beta_slow,
            "mscale": rope.mscale,
            "mscale_all_dim": rope.mscale_all_dim,
        }
    return settings


def _experts(shape: ModelShape, moe: MixtureOfExperts) -> dict[str, Any]:
    """Routed and shared experts, and how the router chooses; `check_model.py` says where not so."""
    grouped = moe.num_groups > 1
    return {
        "num_moe_experts": moe.num_experts,
        "moe_layer_freq": [int(kind == "moe") for kind in shape.layer_kinds],
        "moe_ffn_hidden_size": moe.expert_intermediate_size,
        "moe_shared_expert_intermediate_size": moe.shared_intermediate_size or None,
        "moe_router_topk": moe.experts_per_token,
        "moe_router_score_function": moe.scoring,
        # Softmax over all experts leaves the chosen scores as they are; over the chosen, sums to 1.
        "moe_router_pre_softmax": moe.scoring == "softmax" and not moe.normalize,
        "moe_router_enable_expert_bias": moe.router_bias,
        "moe_router_num_groups": moe.num_groups if grouped else None,
        "moe_router_group_topk": moe.groups_per_token if grouped else None,
        "moe_router_topk_scaling_factor": moe.scaling if moe.scoring == "sigmoid" else None,
        "moe_router_load_balancing_type": "none",
        "moe_aux_loss_coeff": 0.0,
        "moe_z_loss_coeff": None,
    }
