"""The pairs of layouts that are measured: which model, from which learner to which servers.

The first eleven are disaggregated, whole nodes of 8 GPUs on either side, and their experts are
spread over all ranks of a server (ep = tp). With attention data-parallelism every rank holds the
whole attention, the shared experts, the dense layers and both vocabularies, which is what SGLang
does under --enable-dp-lm-head, --moe-dense-tp-size 1 and an all-to-all backend for experts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from benchmarks.reshard import models
from megarl.actor.shape import ModelShape
from megarl.reshard.layout import Layout
from megarl.reshard.megatron import megatron_layout
from megarl.reshard.mesh import LearnerMesh, ServerMesh
from megarl.reshard.pipeline import Pipeline
from megarl.reshard.placement import Placement
from megarl.reshard.precision import with_fp8
from megarl.reshard.sglang import sglang_layout

GPUS_PER_NODE = 8


@dataclass(frozen=True)
class Row:
    """One pair of layouts. `first` and `last` are layers of the end stages, None where even."""

    name: str
    shape: ModelShape
    learner: LearnerMesh
    server: ServerMesh
    first: int | None = None
    last: int | None = None
    fp8_block: tuple[int, int] | None = None
    together: bool = False

    def layouts(self) -> tuple[Layout, Layout, Placement]:
        """Source, destination, and where their ranks run."""
        source = megatron_layout(self.shape, self.learner, pipeline=self._pipeline())
        destination = sglang_layout(self.shape, self.server, self.fp8_block)
        if self.fp8_block is not None:
            precisions = with_fp8(source, destination, self.fp8_block)
            source, destination = precisions.source, precisions.destination
        place: Callable[..., Placement] = Placement.together if self.together else Placement.apart
        return source, destination, place(source, destination, GPUS_PER_NODE)

    def _pipeline(self) -> Pipeline | None:
        if self.first is None and self.last is None:
            return None
        layers, pp = self.shape.num_layers, self.learner.pp
        return Pipeline.uneven(layers, pp, first=self.first, last=self.last)


def _attention_dp(
    tp: int, servers: int, groups: int | None = None, dense_whole: bool = True
) -> ServerMesh:
    """Servers with `groups` copies of the attention, by default one on every rank.

    `dense_whole` is for families with dense layers and a shared expert.
    """
    return ServerMesh(
        tp=tp,
        ep=tp,
        attention_dp=groups or tp,
        servers=servers,
        dp_head=True,
        dense_whole=dense_whole,
        shared_whole=dense_whole,
    )


_QWEN_LEARNER = LearnerMesh(tp=4, dp=4, ep=8)
_LLAMA_LEARNER = LearnerMesh(tp=8, pp=4, dp=4)
_DEEPSEEK_LEARNER = LearnerMesh(pp=16, dp=16, ep=16)
_KIMI_LEARNER = LearnerMesh(tp=8, pp=8, dp=4, ep=32)

# 61 layers: 3, fourteen times 4, 2 on 16 stages (Model Optimizer's Kimi-K2 run with Megatron-LM);
# seven times 8, 5 on 8 stages (what is left when every stage but the last has the same).
# 126 layers: 7, fourteen times 8, 7. 94 layers: 23, 24, 24, 23. The end stages hold a vocabulary.
ROWS = (
    Row("qwen3-30b-8xtp2", models.QWEN3_30B, _QWEN_LEARNER, ServerMesh(tp=2, ep=2, servers=8)),
    Row("qwen3-30b-2xtp8", models.QWEN3_30B, _QWEN_LEARNER, ServerMesh(tp=8, ep=8, servers=2)),
    Row("llama-70b-16xtp8", models.LLAMA_70B, _LLAMA_LEARNER, ServerMesh(tp=8, servers=16)),
    Row("llama-70b-64xtp2", models.LLAMA_70B, _LLAMA_LEARNER, ServerMesh(tp=2, servers=64)),
    Row(
        "llama-405b-16xtp16",
        models.LLAMA_405B,
        LearnerMesh(tp=8, pp=16, dp=4),
        ServerMesh(tp=16, servers=16),
        first=7,
        last=7,
    ),
    Row(
        "qwen3-235b-8xtp8",
        models.QWEN3_235B,
        LearnerMesh(tp=4, pp=4, dp=4, ep=16),
        ServerMesh(tp=8, ep=8, servers=8),
        first=23,
        last=23,
    ),
    Row(
        "dsv3-bf16-8xtp32",
        models.DEEPSEEK_V3,
        _DEEPSEEK_LEARNER,
        ServerMesh(tp=32, ep=32, servers=8),
        first=3,
        last=2,
    ),
    Row(
        "dsv3-bf16-dp-attention-8xtp32",
        models.DEEPSEEK_V3,
        _DEEPSEEK_LEARNER,
        _attention_dp(32, servers=8),
        first=3,
        last=2,
    ),
    Row(
        "dsv3-fp8-dp-attention-4xtp64",
        models.DEEPSEEK_V3,
        _DEEPSEEK_LEARNER,
        _attention_dp(64, servers=4),
        first=3,
        last=2,
        fp8_block=(128, 128),
    ),
    Row(
        "kimi-k2-fp8-8xtp32",
        models.KIMI_K2,
        _KIMI_LEARNER,
        ServerMesh(tp=32, ep=32, servers=8),
        last=5,
        fp8_block=(64, 64),
    ),
    Row(
        "kimi-k2-fp8-dp-attention-8xtp32",
        models.KIMI_K2,
        _KIMI_LEARNER,
        _attention_dp(32, servers=8),
        last=5,
        fp8_block=(128, 128),
    ),
    # More of the kinds that differ: small servers, copies of the attention, experts cut over tp,
    # and learner and servers on the same GPUs.
    Row("qwen3-30b-32xtp2", models.QWEN3_30B, _QWEN_LEARNER, ServerMesh(tp=2, servers=32)),
    Row(
        "qwen3-30b-dp-attention-2xtp8",
        models.QWEN3_30B,
        _QWEN_LEARNER,
        _attention_dp(8, 2, dense_whole=False),
    ),
    Row(
        "qwen3-235b-dp-attention-8xtp8",
        models.QWEN3_235B,
        LearnerMesh(tp=4, pp=4, dp=4, ep=16),
        _attention_dp(8, servers=8, groups=2, dense_whole=False),
        first=23,
        last=23,
    ),
    Row(
        "dsv3-bf16-dp-attention-16xtp16",
        models.DEEPSEEK_V3,
        _DEEPSEEK_LEARNER,
        _attention_dp(16, servers=16, groups=4),
        first=3,
        last=2,
    ),
    Row(
        "dsv3-bf16-experts-cut-8xtp32",
        models.DEEPSEEK_V3,
        _DEEPSEEK_LEARNER,
        ServerMesh(tp=32, servers=8),
        first=3,
        last=2,
    ),
    Row(
        "qwen3-30b-together-2xtp8",
        models.QWEN3_30B,
        _QWEN_LEARNER,
        ServerMesh(tp=8, ep=8, servers=2),
        together=True,
    ),
    Row(
        "llama-70b-together-64xtp2",
        models.LLAMA_70B,
        _LLAMA_LEARNER,
        ServerMesh(tp=2, servers=64),
        together=True,
    ),
)
