"""Hypothesis strategies: pairs of layouts of tiny policies, of every family on all kinds of mesh.

A `Side` is a layout together with what its ranks are known to hold, by plain slices.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from hypothesis import strategies as st

from megarl.actor.parameters import block_table
from megarl.actor.shape import LatentAttention, MixtureOfExperts, ModelShape
from megarl.reshard.explicit import full_layout
from megarl.reshard.layout import Layout
from megarl.reshard.megatron import megatron_layout
from megarl.reshard.mesh import LearnerMesh, ServerMesh
from megarl.reshard.pipeline import Pipeline
from megarl.reshard.placement import Placement
from megarl.reshard.sglang import sglang_layout
from tests.reshard.learner_slices import Arrays, Split, megatron_slices
from tests.reshard.models import tiny_shape
from tests.reshard.server_slices import server_slices

DENSE = ("LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
MOE = ("Qwen3MoeForCausalLM", "DeepseekV3ForCausalLM", "Glm4MoeForCausalLM")
ATTENTION_DP = ("Qwen3ForCausalLM", *MOE)
SHARED = ("DeepseekV3ForCausalLM", "Glm4MoeForCausalLM")
FP8_BLOCKS = ((2, 2), (4, 4), (4, 2))
MAX_RANKS = 8


@dataclass(frozen=True, eq=False, repr=False)
class Side:
    """A layout, shown by its mesh, and what each of its ranks holds of numbered tensors."""

    mesh: object
    layout: Layout
    slices: Callable[[int, Arrays], Arrays]

    def __repr__(self) -> str:
        return repr(self.mesh)

    def reference(self, tensors: Arrays) -> dict[int, Arrays]:
        return {rank: self.slices(rank, tensors) for rank in self.layout.rank_ids}


@dataclass(frozen=True, eq=False, repr=False)
class Pair:
    """Two layouts of one policy, and where their ranks stand."""

    shape: ModelShape
    source: Side
    destination: Side
    placement: Placement
    where: str

    def __repr__(self) -> str:
        return f"{self.shape}: {self.source} -> {self.destination}, {self.where}"


@dataclass(frozen=True)
class Learner:
    """Megatron: a mesh, how many layers each chunk holds in forward order (None: even), forms."""

    mesh: LearnerMesh
    pipeline: str
    layers: tuple[int, ...]
    divisor: int
    forms: tuple[str, str]

    def side(self, shape: ModelShape) -> Side:
        mesh, layers = self.mesh, self.layers
        mtp = shape.num_mtp_layers
        if self.pipeline == "written":
            chunks = ["t" * count for count in layers]
            written = "E" + "|".join(chunks) + "m" * mtp + "L"
            pipeline = Pipeline.from_layout(written, mesh.pp)
        elif self.pipeline == "uneven":
            first, last = (sum(layers[p :: mesh.pp]) for p in (0, mesh.pp - 1))
            pipeline = Pipeline.uneven(
                sum(layers), mesh.pp, first, None if mesh.vpp > 1 else last, mesh.vpp, num_mtp=mtp
            )
        else:
            pipeline = Pipeline.even(sum(layers), mesh.pp, mesh.vpp, num_mtp=mtp)
        ends = np.cumsum(layers)
        spans = [list(range(e - n, e)) for e, n in zip(ends.tolist(), layers, strict=True)]
        split: Split = [spans[p :: mesh.pp] for p in range(mesh.pp)]
        layout = megatron_layout(shape, mesh, self.divisor, pipeline, self.forms)
        return Side(
            self,
            layout,
            lambda rank, t: megatron_slices(shape, mesh, rank, t, self.divisor, split, self.forms),
        )


@dataclass(frozen=True)
class Servers:
    """SGLang, with FP8 blocks or without."""

    mesh: ServerMesh
    block: tuple[int, int] | None = None

    def side(self, shape: ModelShape) -> Side:
        mesh, block = self.mesh, self.block
        layout = sglang_layout(shape, mesh, block)
        return Side(self, layout, lambda rank, t: server_slices(shape, mesh, rank, t, block))


@dataclass(frozen=True)
class Files:
    """One rank with every tensor whole."""

    block: tuple[int, int] | None = None

    def side(self, shape: ModelShape) -> Side:
        table = block_table(shape, self.block)
        names = [parameter.name for parameter in table.parameters]
        return Side(self, full_layout(table), lambda _, t: {name: t[name] for name in names})


Mesh = Learner | Servers | Files


@st.composite
def learners(draw: st.DrawFn, moe: bool) -> Learner:
    """A mesh of up to MAX_RANKS, and a pipeline of it."""
    tp = draw(st.sampled_from([1, 2, 2, 3, 4]))
    pp = draw(st.sampled_from([1, 2, 3]))
    cp, dp = draw(st.sampled_from([(1, 1), (1, 2), (2, 1), (2, 2), (1, 3)]))
    while tp * pp * cp * dp > MAX_RANKS:
        cp, dp, pp = 1, max(1, dp - 1), max(1, pp - 1)
    stage = tp * cp * dp
    ep, etp = 1, 1
    if moe:
        ep = draw(st.sampled_from(_divisors(stage)))
        etp = draw(st.sampled_from(_divisors(stage // ep)))
    vpp = draw(st.sampled_from([1, 1, 2])) if pp > 1 else 1
    kind = draw(st.sampled_from(["even", "uneven", "written"])) if pp > 1 else "even"
    few = st.integers(1, 2) if pp * vpp < 3 else st.just(1)
    layers = [draw(few)] * (pp * vpp)
    if kind == "uneven":
        layers[::pp] = [draw(st.integers(1, 2))] * vpp
        if vpp == 1:
            layers[-1] = draw(st.integers(1, 2))
    elif kind == "written":
        layers = [draw(st.integers(0, 1)) for _ in layers]
        layers[draw(st.integers(0, len(layers) - 1))] += 1
    forms = draw(
        st.sampled_from([("te", "per_expert"), ("local", "sequential"), ("te", "grouped")])
    )
    mesh = LearnerMesh(tp, pp, dp, cp, ep, etp, vpp)
    return Learner(mesh, kind, tuple(layers), draw(st.sampled_from([1, 8, 16])), forms)


@st.composite
def servers(
    draw: st.DrawFn, architecture: str, num_layers: int | None, fp8: bool, tied: bool
) -> Servers:
    """Servers with any setting that this architecture has, up to MAX_RANKS ranks."""
    moe = architecture in MOE
    attention_tp = draw(st.sampled_from([1, 2, 2, 3, 4, 8]))
    attention_dp = draw(st.sampled_from([1, 2])) if architecture in ATTENTION_DP else 1
    tp = attention_tp * attention_dp
    one_stage = num_layers is not None and num_layers < 2
    copied = architecture in ("Qwen2ForCausalLM", "Qwen3ForCausalLM")  # a tied head, that is
    pp = 1 if one_stage or (tied and not copied) else draw(st.integers(1, 2))
    ep = draw(st.sampled_from(_divisors(tp))) if moe else 1
    settings = {}
    if attention_dp > 1:
        settings["dp_head"] = draw(st.booleans())
    if moe:
        settings["up_first"] = not fp8 and draw(st.booleans())
    if architecture in SHARED:
        way = draw(st.sampled_from(["cut", "whole", "fused"]))
        settings |= {"shared_whole": way == "whole", "fused_shared_experts": way == "fused"}
        settings |= {"dense_whole": draw(st.booleans()), "draft": draw(st.booleans())}
    number = draw(st.integers(1, max(1, MAX_RANKS // (tp * pp))))
    plain = attention_dp == 1 and architecture not in SHARED and not fp8
    cpu = plain and draw(st.integers(0, 7)) == 0
    sizes = {"ep": ep, "attention_dp": attention_dp, "pp": pp, "servers": min(number, 3)}
    mesh = ServerMesh(tp, cpu=cpu, **sizes, **settings)
    return Servers(mesh, draw(st.sampled_from(FP8_BLOCKS)) if fp8 else None)


def _divisors(number: int) -> list[int]:
    return [d for d in range(1, number + 1) if number % d == 0]


@st.composite
def shapes(
    draw: st.DrawFn, architecture: str, meshes: Sequence[Mesh], tied: bool, mtp: bool
) -> ModelShape:
    """A policy of the architecture that all the meshes can hold, in as few elements as that."""
    learner = [m for m in meshes if isinstance(m, Learner)]
    server = [m for m in meshes if isinstance(m, Servers)]
    tps = [m.mesh.tp for m in learner] + [m.mesh.tp for m in server]
    attention = [m.mesh.tp for m in learner] + [m.mesh.attention_tp for m in server]
    layers = sum(learner[0].layers) if learner else draw(st.integers(2, 3))
    blocks = [m.block for m in meshes if isinstance(m, Servers | Files) and m.block is not None]
    unit = math.lcm(*(size for block in blocks for size in block)) if blocks else 1
    few = st.integers(1, 2)
    split = math.lcm(*tps, 1)
    hidden = draw(st.integers(1, 5)) * (split if mtp else 1)
    inner = split * unit * draw(few)
    changes: dict[str, object] = {
        "num_layers": layers,
        "num_mtp_layers": 1 if mtp else 0,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "vocab_size": draw(st.integers(1, 150)),
        "tie_embeddings": tied,
    }
    if architecture in MOE:
        changes["moe"] = draw(_experts(architecture, learner, server, layers, split, unit))
    if architecture == "DeepseekV3ForCausalLM":
        heads = math.lcm(*attention, 1) * draw(few)
        local = math.lcm(*(m.mesh.tp for m in learner), 1)
        changes |= {
            "num_heads": heads,
            "num_kv_heads": heads,
            "mla": draw(_latent(local, unit)),
        }
    else:
        changes |= draw(_heads(attention, unit))
        if architecture.startswith("Qwen3For") and not blocks and not server:
            changes["attention_output_gate"] = draw(st.booleans())
        if architecture == "Glm4MoeForCausalLM":
            changes |= {"qkv_bias": draw(st.booleans()), "qk_norm": draw(st.booleans())}
    return tiny_shape(architecture, **changes)


@st.composite
def _heads(draw: st.DrawFn, attention: Sequence[int], unit: int) -> dict[str, object]:
    """Head counts that every tensor parallel size divides, or is a multiple of."""
    fitting = [
        kv
        for kv in (1, 2, 3, 4, 6, 8, 12, 24)
        if all(kv % t == 0 or t % kv == 0 for t in attention)
    ]
    kv = draw(st.sampled_from(fitting[:3]))
    heads = math.lcm(kv, *attention) * draw(st.integers(1, 2))
    dims = [d for d in (2, 4, 6, 12) if d % unit == 0]
    even = [d for d in dims if all((heads + 2 * kv) * d % t == 0 for t in attention)]
    dim = draw(st.sampled_from(even[:2] or [math.lcm(12, unit)]))
    return {"num_heads": heads, "num_kv_heads": kv, "head_dim": dim}


@st.composite
def _latent(draw: st.DrawFn, local: int, unit: int) -> LatentAttention:
    """Low ranks that Megatron's local spec can cut by rows over `local` ranks."""
    step = math.lcm(local, unit)
    return LatentAttention(
        q_lora_rank=draw(st.sampled_from([None, step, 2 * step])),
        kv_lora_rank=step * draw(st.integers(1, 2)),
        qk_nope_head_dim=2 * step,
        qk_rope_head_dim=2 * step,
        v_head_dim=unit * draw(st.integers(1, 3)),
    )


@st.composite
def _experts(
    draw: st.DrawFn,
    architecture: str,
    learner: Sequence[Learner],
    server: Sequence[Servers],
    layers: int,
    split: int,
    unit: int,
) -> MixtureOfExperts:
    few = st.integers(1, 2)
    experts = math.lcm(*(m.mesh.ep for m in [*learner, *server]), 1) * draw(few)
    while any(experts < m.mesh.tp for m in server):  # SGLang refuses fewer experts than ranks
        experts *= 2
    cuts = [m.mesh.etp for m in learner] + [m.mesh.expert_tp for m in server]
    inner = math.lcm(*cuts, 1) * unit * draw(few)
    shared = 0 if architecture == "Qwen3MoeForCausalLM" else split * unit * draw(few)
    if any(m.mesh.fused_shared_experts for m in server):
        inner = shared = math.lcm(inner, shared)
    dense = draw(st.sets(st.integers(0, layers - 1), max_size=layers - 1))
    if server and architecture == "Qwen3MoeForCausalLM":
        dense = set()  # SGLang's model has experts in every layer
    return replace(
        tiny_shape("Glm4MoeForCausalLM").moe,  # type: ignore[type-var]
        num_experts=experts,
        expert_intermediate_size=inner,
        shared_intermediate_size=shared,
        router_bias=architecture != "Qwen3MoeForCausalLM" and draw(st.booleans()),
        dense_layers=tuple(sorted(dense)),
    )


@st.composite
def pairs(draw: st.DrawFn, kinds: Sequence[str], mtp: bool = True) -> Pair:
    """Two layouts of one policy; `kinds` are like "learner servers", "files servers fp8"."""
    kind = draw(st.sampled_from(list(kinds)))
    architecture = draw(st.sampled_from([*DENSE, *MOE]))
    sides, fp8 = kind.split()[:2], kind.endswith("fp8")
    tied = draw(st.booleans()) and (
        "servers" not in sides or architecture not in ("Qwen3MoeForCausalLM", "Glm4MoeForCausalLM")
    )
    meshes: list[Mesh] = []
    block = draw(st.sampled_from(FP8_BLOCKS)) if fp8 else None
    for side in sides:
        if side == "learner":
            drawn: Mesh = draw(learners(architecture in MOE))
            if meshes and isinstance(meshes[0], Learner) and isinstance(drawn, Learner):
                drawn = replace(drawn, **_same_layers(drawn, sum(meshes[0].layers)))
            meshes.append(drawn)
        elif side == "servers":
            layers = next((sum(m.layers) for m in meshes if isinstance(m, Learner)), None)
            meshes.append(replace(draw(servers(architecture, layers, fp8, tied)), block=block))
        else:
            meshes.append(Files(block))
    extra = mtp and draw(st.booleans()) and architecture in SHARED and sides[-1] == "servers"
    extra = extra and sides[0] == "learner"
    shape = draw(shapes(architecture, meshes, tied, extra))
    source, destination = (mesh.side(shape) for mesh in meshes)
    placed, where = draw(placements(source.layout, destination.layout))
    return Pair(shape, source, destination, placed, where)


def _same_layers(learner: Learner, num_layers: int) -> dict[str, object]:
    """The same mesh with a written pipeline of so many layers."""
    chunks = learner.mesh.pp * learner.mesh.vpp
    layers = tuple(num_layers // chunks + (i < num_layers % chunks) for i in range(chunks))
    return {"layers": layers, "pipeline": "written"}


@st.composite
def placements(draw: st.DrawFn, source: Layout, destination: Layout) -> tuple[Placement, str]:
    """One node, nodes of their own, or the same GPUs, with few on a node."""
    gpus = draw(st.sampled_from([1, 2, 3, 4, 8]))
    way = draw(st.sampled_from(["one_node", "apart", "together"]))
    if way == "one_node":
        return Placement.one_node(source, destination), way
    made = Placement.apart if way == "apart" else Placement.together
    return made(source, destination, gpus), f"{way}, {gpus} GPUs per node"
