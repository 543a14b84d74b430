"""Routed experts in one module with a weight for each, for machines without Transformer Engine.

Owns what stands in Megatron's TEGroupedMLP in place of Transformer Engine's grouped linears: names
(`weight0`, `weight1`, ...), cuts and checkpoints are theirs, so that both machines have the same.
Import it after `megatron_cpu.install()`.

For: megatron-core 0.19.2. Ends when Megatron has a grouped linear of its own.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import Tensor


class _GroupedLinear(torch.nn.Module):
    """One linear [rows, columns] for each local expert; dim `cut` is this tensor rank's part."""

    cut: int

    def __init__(
        self,
        num: int,
        input_size: int,
        output_size: int,
        *,
        config: TransformerConfig,
        pg_collection: Any,
        **kwargs: object,
    ) -> None:
        super().__init__()
        self.num, self._groups = num, pg_collection
        shape = [output_size, input_size]
        shape[self.cut] //= pg_collection.expt_tp.size()
        for i in range(num):
            weight: Any = torch.nn.Parameter(torch.empty(shape, dtype=config.params_dtype))
            weight.allreduce = False  # its gradient is summed over the experts' own ranks
            weight.tensor_model_parallel = True
            weight.partition_dim, weight.partition_stride = self.cut, 1
            self.register_parameter(f"weight{i}", weight)

    def forward(self, input_: Tensor, tokens_per_expert: list[int]) -> tuple[Tensor, None]:
        """The rows of `input_`, which are sorted by expert, each through its expert's linear."""
        parts = zip(input_.split(tokens_per_expert), self.parameters(), strict=True)
        return torch.cat([F.linear(part, weight) for part, weight in parts]), None

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: Any = None
    ) -> dict[str, Any]:
        """All experts as one global tensor whose first dim is the expert, as TEGroupedLinear's."""
        ep, expert_dp = self._groups.ep, self._groups.expt_dp
        state = {}
        for i, weight in enumerate(self.parameters()):
            expert = (len(sharded_offsets), ep.rank() * self.num + i, ep.size() * self.num)
            sharded = make_sharded_tensors_for_checkpoint(
                {"weight": weight},
                prefix,
                {"weight": self.cut},
                (*sharded_offsets, expert),
                tp_group=self._groups.expt_tp,
                dp_cp_group=metadata["dp_cp_group"],
            )[f"{prefix}weight"]
            sharded.replica_id = (*sharded.replica_id[:2], expert_dp.rank())
            state[f"{prefix}weight{i}"] = sharded
        return state

    def backward_dw(self) -> None:
        """Nothing is left to do after the backward pass."""


class ColumnGroupedLinear(_GroupedLinear):
    """Experts' gates and ups, cut by rows over the experts' tensor ranks."""

    cut = 0


class RowGroupedLinear(_GroupedLinear):
    """Experts' downs, cut by columns over the experts' tensor ranks."""

    cut = 1
