"""What Megatron-Core has only through Transformer Engine, for machines without it.

Owns RMSNorm under sequence parallelism, linears with their norm inside or whole on every tensor
rank, and attention over packed sequences. Parameter names are those of Transformer Engine's
modules. Experts are in `megatron_experts.py`; how all make a block, in `megatron_layers.py`. Import
it after `megatron_cpu.install()`.

For: megatron-core 0.19.2. Ends when Megatron's local layers do these.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel import ColumnParallelLinear
from megatron.core.transformer.transformer_config import TransformerConfig
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


class WholeLinear(torch.nn.Module):
    """A linear that is whole on every tensor rank, as Transformer Engine's "duplicated"."""

    def __init__(
        self, input_size: int, output_size: int, *, config: TransformerConfig, **kwargs: object
    ) -> None:
        super().__init__()
        weight = torch.empty(output_size, input_size, dtype=config.params_dtype)
        self.weight = torch.nn.Parameter(weight)
        _mark(self.weight, config)

    def forward(self, input_: Tensor) -> tuple[Tensor, None]:
        """The linear of the input, as (output, bias)."""
        return F.linear(input_, self.weight), None


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
