"""Stand-ins for Transformer Engine's classes, so that Megatron's own TE layer spec builds on a CPU.

Which class is where, its sizes and its module's name are then Megatron's; what stands in a class
is from reading megatron-core 0.19.2, extensions/transformer_engine.py: TELinear without a parallel
mode is whole on every rank; a grouped linear has `weight<i>` for each of its experts, or with
moe_single_grouped_weight one `weight`, cut over the expert tensor ranks.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.extensions import transformer_engine_spec_provider as provider
from megatron.core.models.gpt import gpt_layer_specs
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from torch import Tensor

from megarl.compat.megatron_parts import (
    CoreAttention,
    NormedColumnParallelLinear,
    RMSNorm,
    WholeLinear,
)


class _Grouped(torch.nn.Module):
    """One linear for each local expert."""

    def __init__(self, num: int, size: int, out: int, config: Any) -> None:
        super().__init__()
        self.num, self.together = num, config.moe_single_grouped_weight
        if self.together:
            self.weight = torch.nn.Parameter(torch.empty(num, out, size))
        for i in range(0 if self.together else num):
            self.register_parameter(f"weight{i}", torch.nn.Parameter(torch.empty(out, size)))

    def forward(self, x: Tensor, tokens_per_expert: Any) -> tuple[Tensor, None]:
        each = list(self.weight) if self.together else list(self.parameters())
        parts = x.split([int(count) for count in tokens_per_expert])
        return torch.cat([p @ w.T for p, w in zip(parts, each, strict=True)]), None


class ColumnGrouped(_Grouped):
    def __init__(
        self, num: int, size: int, out: int, *, config: Any, pg_collection: Any, **kwargs: object
    ) -> None:
        super().__init__(num, size, out // pg_collection.expt_tp.size(), config)


class RowGrouped(_Grouped):
    def __init__(
        self, num: int, size: int, out: int, *, config: Any, pg_collection: Any, **kwargs: object
    ) -> None:
        super().__init__(num, size // pg_collection.expt_tp.size(), out, config)


def install() -> None:
    """Put the stand-ins where Megatron looks for Transformer Engine's classes."""
    provider.TELinear = WholeLinear
    provider.TEColumnParallelLinear = ColumnParallelLinear
    provider.TERowParallelLinear = RowParallelLinear
    provider.TELayerNormColumnParallelLinear = NormedColumnParallelLinear
    provider.TENorm = gpt_layer_specs.TENorm = RMSNorm
    provider.TEDotProductAttention = CoreAttention
    provider.TEColumnParallelGroupedLinear = ColumnGrouped
    provider.TERowParallelGroupedLinear = RowGrouped
    provider.TEActivationOp = None
    provider.is_te_min_version = lambda *args, **kwargs: True
    gpt_layer_specs.TESpecProvider = provider.TESpecProvider
