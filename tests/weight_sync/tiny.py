"""A tiny policy with seeded weights, and what each side is known to hold of it."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import cache

import numpy as np
import torch

from megarl.actor.parameters import parameter_table
from megarl.actor.shape import ModelShape
from megarl.reshard.execute import run
from megarl.reshard.explicit import full_layout
from megarl.reshard.layout import Layout
from megarl.reshard.mesh import ServerMesh
from megarl.reshard.plan import make_plan
from megarl.reshard.sglang import sglang_layout
from megarl.weight_sync import coverage
from megarl.weight_sync.checksum import add, box_checksum
from megarl.weight_sync.control import SourceSpec
from megarl.weight_sync.probe import Probe
from tests.reshard.models import tiny_shape
from tests.reshard.server_slices import server_slices

PROBE_TOKENS = (5, 3, 8, 1, 298)

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
    layout = replace(source, float8=None).layout()
    plan = make_plan(full_layout(layout.table), layout)
    ranks = []
    for rank in layout.ranks:
        mine = {tensor.name: torch.full(tensor.shape, 7.0) for tensor in rank.tensors}
        run(plan.between(0, rank.rank), tensors, mine)
        ranks.append(mine)
    return ranks


def on_server(shape: ModelShape, tp: int, tensors: Mapping[str, torch.Tensor]) -> list[Tensors]:
    """What SGLang's ranks must hold, by plain slices that know nothing of the planner."""
    return on_mesh(shape, ServerMesh(tp), tensors)


def on_mesh(
    shape: ModelShape, mesh: ServerMesh, tensors: Mapping[str, torch.Tensor]
) -> list[Tensors]:
    """The same for servers that are more than tensor parallel."""
    arrays = {name: tensor.numpy() for name, tensor in tensors.items()}
    return [
        {
            name: torch.from_numpy(np.ascontiguousarray(array))
            for name, array in server_slices(shape, mesh, rank, arrays).items()
        }
        for rank in range(mesh.tp)
    ]


@cache
def fingerprint(seed: int) -> int:
    """64 bits that depend on every element of the weights of `seed`."""
    sums = {}
    for name, tensor in weights(SHAPE, seed).items():
        box = tuple((0, size) for size in tensor.shape)
        sums[name] = box_checksum(tensor, name, tuple(tensor.shape), box)
    return _digest(sums)


def fingerprint_of_server(tp: int, sums: Sequence[Sequence[int]]) -> int:
    """The same of what a server holds, by the checksums of each rank's pieces."""
    boxes: dict[str, dict[object, int]] = {}
    for rank, pieces in coverage.held(sglang_layout(SHAPE, ServerMesh(tp, cpu=True))).items():
        for piece, total in zip(pieces, sums[rank], strict=True):
            if boxes.setdefault(piece.tensor, {}).setdefault(piece.box, total) != total:
                return 0  # copies that differ are nobody's weights
    return _digest({tensor: add(list(found.values())) for tensor, found in boxes.items()})


def _digest(sums: Mapping[str, int]) -> int:
    text = repr(sorted(sums.items()))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little")


def version_of(label: str) -> str:
    """A label of a server's weights without what tells one publish from all others.

    >>> version_of("3.0123456789abcdef"), version_of("3.0123456789abcdef-refused")
    ('3', '3-refused')
    """
    return re.sub(r"\.[0-9a-f]{16}", "", label)


def logprobs(of: int, token_ids: Sequence[int]) -> list[float]:
    """Stand-ins for log-probs: of weights with this fingerprint, for every token but the first."""
    return [-((of * (2 * i + 1) + token) % 2**64) / 2**61 for i, token in enumerate(token_ids)]


def as_sent(weights: Mapping[str, torch.Tensor], policy: torch.dtype) -> Tensors:
    """The weights as float32 after a policy of type `policy` has held them: all but the biases."""
    return {
        name: tensor if "e_score_correction_bias" in name else tensor.to(policy).float()
        for name, tensor in weights.items()
    }


def probe(seed: int) -> Probe:
    """What a server of the weights of `seed` must score."""
    return Probe(PROBE_TOKENS, tuple(logprobs(fingerprint(seed), PROBE_TOKENS)[1:]), bound=1e-4)


def sha256(tensor: torch.Tensor) -> str:
    """SGLang's own checksum of a parameter on a CPU."""
    raw = tensor.detach().contiguous().view(torch.uint8).numpy().tobytes()
    return hashlib.sha256(raw).hexdigest()[:16]


class FakeModel(torch.nn.Module):
    """Holds a server rank's parameters under their flat names, full of NaN.

    Those in `float32` keep that precision. `derived` counts how often SGLang's last step
    ran with every tensor written.
    """

    def __init__(
        self, layout: Layout, rank: int, dtype: torch.dtype, float32: Collection[str] = ()
    ) -> None:
        super().__init__()
        self.derived = 0
        self.tensors = {
            tensor.name: torch.nn.Parameter(
                torch.full(
                    tensor.shape,
                    torch.nan,
                    dtype=torch.float32 if tensor.name in float32 else dtype,
                )
            )
            for tensor in layout.rank(rank).tensors
        }

    def post_load_weights(self) -> None:
        self.derived += not any(torch.isnan(tensor).any() for tensor in self.tensors.values())

    def named_parameters(self, *_: object, **__: object):  # type: ignore[no-untyped-def]
        return iter(self.tensors.items())
