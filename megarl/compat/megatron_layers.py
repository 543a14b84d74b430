"""A decoder block of Megatron's local layers, for machines without Transformer Engine.

Owns the three parts that Megatron has only through Transformer Engine: the linear with its norm
inside, RMSNorm under sequence parallelism, and attention over packed sequences. Parameter names are
those of the Transformer Engine block, so layouts and checkpoints are the same on CPU and GPU; but
for routed experts and latent attention, which have their local names here. Knows nothing of
megarl's learner. Import it after `megatron_cpu.install()`.

For: megatron-core 0.19.2. Ends when Megatron's local layers do these three.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.backends import LocalSpecProvider
from megatron.core.models.gpt.gpt_layer_specs import get_mlp_module_spec_for_backend
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
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
from torch import Tensor


def _mark(weight: Any, config: TransformerConfig) -> None:
    """Have Megatron sum the weight's gradient over tensor ranks under sequence parallelism."""
    weight.sequence_parallel = config.sequence_parallel


class RMSNorm(torch.nn.RMSNorm):
    """torch's RMSNorm, with its weight marked."""

    def __init__(
        self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **kwargs: object
    ) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        _mark(self.weight, config)


class NormedColumnParallelLinear(ColumnParallelLinear):  # type: ignore[misc]
    """RMSNorm and column-parallel linear in one, as Transformer Engine's, with its names."""

    def __init__(
        self, input_size: int, output_size: int, *, config: TransformerConfig, **kwargs: Any
    ) -> None:
        super().__init__(input_size, output_size, config=config, **kwargs)
        weight = torch.ones(input_size, dtype=config.params_dtype)
        self.layer_norm_weight = torch.nn.Parameter(weight)
        _mark(self.layer_norm_weight, config)

    def forward(self, input_: Tensor, *args: Any, **kwargs: Any) -> Any:
        """The linear of the normed input, as (output, bias)."""
        eps = self.config.layernorm_epsilon
        normed = F.rms_norm(input_, input_.shape[-1:], self.layer_norm_weight, eps)
        return super().forward(normed, *args, **kwargs)


# T packed tokens, S tokens of one sequence, B batch, N heads, D head width
class CoreAttention(torch.nn.Module):
    """Causal attention on torch's SDPA, over whole sequences or packed ones (thd)."""

    def __init__(
        self, *, softmax_scale: float | None = None, pg_collection: Any, **kwargs: object
    ) -> None:
        super().__init__()
        assert pg_collection.cp.size() == 1, "this attention does not do context parallelism"
        self.scale = softmax_scale

    def _attend(self, query_BSND: Tensor, key_BSND: Tensor, value_BSND: Tensor) -> Tensor:
        """[B, S, N, D] to [B, S, N * D]; key and value may have fewer heads."""
        query, key, value = (t.transpose(1, 2) for t in (query_BSND, key_BSND, value_BSND))
        out = F.scaled_dot_product_attention(
            query, key, value, scale=self.scale, is_causal=True, enable_gqa=True
        )
        return out.transpose(1, 2).flatten(2)

    def _attend_packed(self, parts_TND: tuple[Tensor, ...], cu_seqlens: Tensor) -> Tensor:
        """[T, N, D] to [T, N * D]; sequences of one length are one batch."""
        starts: dict[int, list[int]] = {}
        for start, length in zip(cu_seqlens.tolist(), cu_seqlens.diff().tolist(), strict=False):
            starts.setdefault(length, []).append(start)
        places, outputs = [], []
        for length, begin in starts.items():
            at_BS = torch.tensor(begin)[:, None] + torch.arange(length)
            batch = (part_TND[at_BS] for part_TND in parts_TND)
            outputs.append(self._attend(*batch).flatten(0, 1))
            places.append(at_BS.flatten())
        return torch.cat(outputs)[torch.cat(places).argsort()]

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        packed_seq_params: Any = None,
        **kwargs: object,
    ) -> Tensor:
        """[S, B, N, D] to [S, B, N * D]; packed: [T, N, D] to [T, N * D].

        Packed sequences must cover all T tokens.
        """
        if packed_seq_params is None:
            batch = (t.transpose(0, 1) for t in (query, key, value))
            return self._attend(*batch).transpose(0, 1)
        return self._attend_packed((query, key, value), packed_seq_params.cu_seqlens_q)


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


def block_spec(
    config: TransformerConfig, num_layers: int, first_layer: int = 0, fused: bool = True
) -> TransformerBlockSubmodules:
    """The spec of `num_layers` decoder layers from `first_layer` on, dense or with experts.

    `fused`: norms are inside the linears that follow them, as in Transformer Engine's spec; else
    beside them, as in Megatron's local one. Latent attention has only the latter: Megatron knows
    the classes of its linears by name. Experts are Megatron's SequentialMLP.
    """
    assert not (fused and config.multi_latent_attention), "latent attention: give fused=False"
    if config.multi_latent_attention:
        attention = _latent_attention(full_rank=config.q_lora_rank is None)
    else:
        attention = _attention(config, fused)
    layers = [
        _layer(config, attention, has_experts, fused)
        for has_experts in _expert_layers(config)[first_layer : first_layer + num_layers]
    ]
    return TransformerBlockSubmodules(layer_specs=layers, layer_norm=RMSNorm)


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
    experts = config.num_moe_experts if has_experts else None
    layer = TransformerLayerSubmodules(
        input_layernorm=IdentityOp if fused else RMSNorm,
        self_attention=attention,
        self_attn_bda=get_bias_dropout_add,
        # Router and experts read one normed input, so no linear can hold their norm.
        pre_mlp_layernorm=RMSNorm if has_experts or not fused else IdentityOp,
        mlp=get_mlp_module_spec_for_backend(_Backend(fused), num_experts=experts),
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


class FullRankQueries(MLASelfAttention):  # type: ignore[misc]
    """Latent attention without a low rank for queries: they are projected as they come.

    Megatron's own choice of classes puts a norm, with a weight that no policy has, in front of
    `linear_q_proj` wherever keys and values are normed.
    """

    def _resolve_qk_norm_config(self, submodules: MLASelfAttentionSubmodules) -> dict[str, Any]:
        return {
            "linear_q_proj": submodules.linear_q_proj,
            "linear_q_up_proj": IdentityOp,
            "linear_kv_up_proj": submodules.linear_kv_up_proj,
            "q_layernorm": IdentityOp,
            "kv_layernorm": submodules.kv_layernorm,
        }


def _latent_attention(full_rank: bool) -> ModuleSpec:
    return ModuleSpec(
        module=FullRankQueries if full_rank else MLASelfAttention,
        params={"attn_mask_type": AttnMaskType.causal},
        submodules=MLASelfAttentionSubmodules(
            linear_q_proj=ColumnParallelLinear,
            linear_q_down_proj=ColumnParallelLinear,
            linear_q_up_proj=ColumnParallelLinear,
            linear_kv_down_proj=ColumnParallelLinear,
            linear_kv_up_proj=ColumnParallelLinear,
            core_attention=CoreAttention,
            linear_proj=RowParallelLinear,
            q_layernorm=RMSNorm,
            kv_layernorm=RMSNorm,
        ),
    )
