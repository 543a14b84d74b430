"""A tiny policy with seeded weights, and what each side is known to hold of it."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import numpy as np
import torch

from megarl.actor.parameters import parameter_table
from megarl.actor.shape import ModelShape
from megarl.reshard.execute import run
from megarl.reshard.explicit import full_layout
from megarl.reshard.layout import Layout
from megarl.reshard.megatron import megatron_layout
from megarl.reshard.plan import make_plan
from megarl.weight_sync.control import SourceSpec
from tests.reshard.models import sglang_slices, tiny_shape

Tensors = dict[str, torch.Tensor]

# Divides over TP 2 on a CPU server; the vocabulary divides by nothing, so that both sides pad it.
SHAPE = tiny_shape(
    hidden_size=64, head_dim=16, intermediate_size=64, vocab_size=300, rope_theta=10000.0
)


def weights(shape: ModelShape, seed: int) -> Tensors:
    """Every parameter by its Hugging Face name, large enough that a wrong one shows."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for parameter in parameter_table(shape):
        values = torch.randn(parameter.shape, generator=generator) * 0.15
        tensors[parameter.name] = values + 1 if len(parameter.shape) == 1 else values
    return tensors


def on_learner(source: SourceSpec, tensors: Mapping[str, torch.Tensor]) -> list[Tensors]:
    """The parameters of every learner rank, placed by the planner; padding rows hold garbage."""
    layout = megatron_layout(source.shape, source.mesh, source.vocab_divisor)
    plan = make_plan(full_layout(layout.table), layout)
    ranks = []
    for rank in layout.ranks:
        mine = {tensor.name: torch.full(tensor.shape, 7.0) for tensor in rank.tensors}
        run(plan.between(0, rank.rank), tensors, mine)
        ranks.append(mine)
    return ranks


def on_server(shape: ModelShape, tp: int, tensors: Mapping[str, torch.Tensor]) -> list[Tensors]:
    """What SGLang's ranks must hold, by plain slices that know nothing of the planner."""
    arrays = {name: tensor.numpy() for name, tensor in tensors.items()}
    return [
        {
            name: torch.from_numpy(np.ascontiguousarray(array))
            for name, array in sglang_slices(shape, tp, rank, arrays).items()
        }
        for rank in range(tp)
    ]


def sha256(tensor: torch.Tensor) -> str:
    """SGLang's own checksum of a parameter on a CPU."""
    raw = tensor.detach().contiguous().view(torch.uint8).numpy().tobytes()
    return hashlib.sha256(raw).hexdigest()[:16]


class FakeModel(torch.nn.Module):
    """Holds a server rank's parameters under their flat names, full of NaN."""

    def __init__(self, layout: Layout, rank: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.tensors = {
            tensor.name: torch.nn.Parameter(torch.full(tensor.shape, torch.nan, dtype=dtype))
            for tensor in layout.ranks[rank].tensors
        }

    def named_parameters(self, *_: object, **__: object):  # type: ignore[no-untyped-def]
        return iter(self.tensors.items())
