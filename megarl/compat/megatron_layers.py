"""A decoder block of Megatron's parts, for machines without Transformer Engine and with it.

Owns which part stands where. Without Transformer Engine, names and shapes of parameters are still
those of its block, so layouts and checkpoints are the same on CPUs and GPUs. Knows nothing of
megarl's learner. Import it after `megatron_cpu.install()`.

For: megatron-core 0.19.2. Ends when Megatron's local layers do what `megatron_parts.py` does.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.backends import LocalSpecProvider
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_decoder_block_spec,
    get_mlp_module_spec_for_backend,
)
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.moe.experts import GroupedMLPSubmodules, TEGroupedMLP
from megatron.core.transformer.multi_latent_attention import (
    MLASelfAttention,
    MLASelfAttentionSubmodules,
)
from megatron.core.transformer.multi_token_prediction import (
    MultiTokenPredictionBlockSubmodules,
    get_mtp_layer_spec_for_backend,
)
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules

from megarl.compat.megatron_experts import ColumnGroupedLinear, RowGroupedLinear
from megarl.compat.megatron_latent import LatentAttention
from megarl.compat.megatron_parts import (
    CoreAttention,
    NormedColumnParallelLinear,
    RMSNorm,
    WholeLinear,
)


class _Backend(LocalSpecProvider):  # type: ignore[misc]
    """The local parts a block is built of; `fused`: a dense MLP's norm is in its first linear."""

    def __init__(self, fused: bool) -> None:
        self.fused = fused

    def fuse_layernorm_and_linear(self) -> bool:
        return self.fused

    def column_parallel_layer_norm_linear(self) -> type:
        return NormedColumnParallelLinear

    def layer_norm(self, *args: object, **kwargs: object) -> type:
        return RMSNorm

    def grouped_mlp_modules(self, moe_use_grouped_gemm: bool) -> Any:
        if not moe_use_grouped_gemm:
            return super().grouped_mlp_modules(False)
        linears = GroupedMLPSubmodules(linear_fc1=ColumnGroupedLinear, linear_fc2=RowGroupedLinear)
        return partial(TEGroupedMLP, submodules=linears)


def block_spec(
    config: TransformerConfig, num_layers: int, first_layer: int = 0, fused: bool = True
) -> TransformerBlockSubmodules:
    """The spec, without Transformer Engine, of `num_layers` decoder layers from `first_layer` on.

    `fused`: norms are inside the linears that follow them, as in Transformer Engine's spec; else
    beside them, as in Megatron's local one, which also cuts latent attention's projections down.
    Experts are one module with a weight for each (`config.moe_grouped_gemm`), else SequentialMLP.
    """
    attention = (_latent_attention if config.multi_latent_attention else _attention)(config, fused)
    layers = [
        _layer(config, attention, has_experts, fused)
        for has_experts in _expert_layers(config)[first_layer : first_layer + num_layers]
    ]
    return TransformerBlockSubmodules(layer_specs=layers, layer_norm=RMSNorm)


def engine_block_spec(
    config: TransformerConfig, vp_stage: int | None = None
) -> TransformerBlockSubmodules:
    """Megatron's own spec for Transformer Engine, of the layers of this stage, or its chunk."""
    block = get_gpt_decoder_block_spec(config, use_transformer_engine=True, vp_stage=vp_stage)
    for layer in block.layer_specs:
        attention = layer.submodules.self_attention
        if attention.module is MLASelfAttention:
            attention.module = LatentAttention
    return block


def mtp_spec(config: TransformerConfig, fused: bool = True) -> MultiTokenPredictionBlockSubmodules:
    """The spec of the MTP layers, each around a layer like the decoder's last."""
    last = block_spec(config, 1, config.num_layers - 1, fused).layer_specs[0]
    layer = get_mtp_layer_spec_for_backend(last, _Backend(fused))
    return MultiTokenPredictionBlockSubmodules(layer_specs=[layer] * config.mtp_num_layers)


def _expert_layers(config: TransformerConfig) -> list[bool]:
    """For each decoder layer, whether it has routed experts."""
    if config.num_moe_experts is None:
        return [False] * config.num_layers
    every = config.moe_layer_freq
    if isinstance(every, int):
        return [layer % every == 0 for layer in range(config.num_layers)]
    return [bool(has_experts) for has_experts in every]


def _layer(
    config: TransformerConfig, attention: ModuleSpec, has_experts: bool, fused: bool
) -> ModuleSpec:
    mlp = get_mlp_module_spec_for_backend(
        _Backend(fused),
        num_experts=config.num_moe_experts if has_experts else None,
        moe_grouped_gemm=config.moe_grouped_gemm,
    )
    # Projections down from one normed input, or router and experts: no linear can hold their norm.
    beside = RMSNorm if config.multi_latent_attention or not fused else IdentityOp
    layer = TransformerLayerSubmodules(
        input_layernorm=beside,
        self_attention=attention,
        self_attn_bda=get_bias_dropout_add,
        pre_mlp_layernorm=RMSNorm if has_experts or not fused else IdentityOp,
        mlp=mlp,
        mlp_bda=get_bias_dropout_add,
    )
    return ModuleSpec(module=TransformerLayer, submodules=layer)


def _attention(config: TransformerConfig, fused: bool) -> ModuleSpec:
    qk_norm = RMSNorm if config.qk_layernorm else IdentityOp
    return ModuleSpec(
        module=SelfAttention,
        params={"attn_mask_type": AttnMaskType.causal},
        submodules=SelfAttentionSubmodules(
            linear_qkv=NormedColumnParallelLinear if fused else ColumnParallelLinear,
            core_attention=CoreAttention,
            linear_proj=RowParallelLinear,
            q_layernorm=qk_norm,
            k_layernorm=qk_norm,
        ),
    )


def _latent_attention(config: TransformerConfig, fused: bool) -> ModuleSpec:
    down = WholeLinear if fused else ColumnParallelLinear
    up = NormedColumnParallelLinear if fused else ColumnParallelLinear
    norm = IdentityOp if fused else RMSNorm
    return ModuleSpec(
        module=LatentAttention,
        params={"attn_mask_type": AttnMaskType.causal},
        submodules=MLASelfAttentionSubmodules(
            linear_q_proj=ColumnParallelLinear,
            linear_q_down_proj=down,
            linear_q_up_proj=up,
            linear_kv_down_proj=down,
            linear_kv_up_proj=up,
            core_attention=CoreAttention,
            linear_proj=RowParallelLinear,
            q_layernorm=norm,
            kv_layernorm=norm,
        ),
    )
