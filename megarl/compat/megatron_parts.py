"""What Megatron-Core has only through Transformer Engine, for machines without it.

Owns RMSNorm under sequence parallelism, linears with their norm inside or whole on every tensor
rank, and attention over packed sequences, context-parallel too. Parameter names are those of
Transformer Engine's modules. Experts are in `megatron_experts.py`; how all make a block, in
`megatron_layers.py`. Import it after `megatron_cpu.install()`.

For: megatron-core 0.19.2. Ends when Megatron's local layers do these.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    gather_from_sequence_parallel_region,
)
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from megarl.compat.megatron_context import context_places


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


# T packed tokens of this context-parallel rank, S tokens of one sequence, B batch, N heads, D width
class CoreAttention(torch.nn.Module):
    """Causal attention on torch's SDPA, over whole sequences or packed ones (thd).

    Packed sequences may be cut over context-parallel ranks: every rank gathers all keys and values.
    """

    def __init__(
        self, *, softmax_scale: float | None = None, pg_collection: Any, **kwargs: object
    ) -> None:
        super().__init__()
        self.scale, self._context = softmax_scale, pg_collection.cp

    def _attend(
        self,
        query_BSND: Tensor,
        key_BSND: Tensor,
        value_BSND: Tensor,
        positions_S: Tensor | None = None,
    ) -> Tensor:
        """[B, S, N, D] to [B, S, N * D]; key and value may have fewer heads.

        Queries are all of the sequence, or those at `positions_S` of it.
        """
        query, key, value = (t.transpose(1, 2) for t in (query_BSND, key_BSND, value_BSND))
        mask = None
        if positions_S is not None:
            mask = torch.arange(key.shape[2]) <= positions_S[:, None]
        out = F.scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=mask,
            scale=self.scale,
            is_causal=mask is None,
            enable_gqa=True,
        )
        return out.transpose(1, 2).flatten(2)

    def _attend_packed(
        self, query_TND: Tensor, key_TND: Tensor, value_TND: Tensor, cu_seqlens: Tensor
    ) -> Tensor:
        """[T, N, D] to [T, N * D]; sequences of one length are one batch."""
        ranks, rank = self._context.size(), self._context.rank()
        positions_T = None
        if ranks > 1:
            held = [context_places(cu_seqlens, ranks, each) for each in range(ranks)]
            back = torch.cat(held).argsort()
            key_TND, value_TND = (
                gather_from_sequence_parallel_region(part, group=self._context)[back]
                for part in (key_TND, value_TND)
            )
            positions_T = held[rank]
        starts: dict[int, list[int]] = {}
        for start, length in zip(cu_seqlens.tolist(), cu_seqlens.diff().tolist(), strict=False):
            starts.setdefault(length, []).append(start)
        places, outputs = [], []
        for length, begin in starts.items():
            of_keys_BS = torch.tensor(begin)[:, None] + torch.arange(length)
            of_queries_BS = torch.tensor(begin)[:, None] // ranks + torch.arange(length // ranks)
            positions_S = None if positions_T is None else positions_T[of_queries_BS[0]] - begin[0]
            out = self._attend(
                query_TND[of_queries_BS], key_TND[of_keys_BS], value_TND[of_keys_BS], positions_S
            )
            outputs.append(out.flatten(0, 1))
            places.append(of_queries_BS.flatten())
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

        Packed sequences must cover all tokens.
        """
        if packed_seq_params is not None:
            return self._attend_packed(query, key, value, packed_seq_params.cu_seqlens_q)
        assert self._context.size() == 1, "only packed sequences are cut over context ranks"
        batch = (t.transpose(0, 1) for t in (query, key, value))
        return self._attend(*batch).transpose(0, 1)
