"""Faults made for real in tables, rules and the planner, and which check catches each.

A plan between two layouts is right when it takes the one to the other: it cannot see that a layout
is not what its engine holds. Those faults leave the proof and the simulation content; only the
plain slices, which know the engines, catch them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest

import megarl.reshard.cells as cells
import megarl.reshard.megatron as megatron
import megarl.reshard.moves as moves
import megarl.reshard.pipeline as pipeline
import megarl.reshard.plan as planner
import megarl.reshard.routes as routes
import megarl.reshard.rules as rules
import megarl.reshard.sglang as sglang
from megarl.actor.shape import ModelShape
from megarl.errors import LayoutError
from megarl.reshard.explicit import full_layout
from megarl.reshard.layout import Layout, Piece, Shard, ShardedTensor
from megarl.reshard.mesh import LearnerMesh, ServerMesh
from megarl.reshard.placement import Placement
from megarl.reshard.plan import make_plan, prove_moves
from megarl.reshard.simulate import check
from tests.reshard.models import tiny_shape
from tests.reshard.strategies import Files, Learner, Servers, Side
from tests.reshard.test_properties import assert_equal, expected, numbered

Patch = pytest.MonkeyPatch

DENSE, DEEPSEEK = tiny_shape("Qwen3ForCausalLM", num_layers=4), tiny_shape("DeepseekV3ForCausalLM")
TIED = replace(DENSE, tie_embeddings=True)
MOE = tiny_shape("Qwen3MoeForCausalLM")


def learner(mesh: LearnerMesh, *layers: int) -> Learner:
    chunks = layers or (4 // (mesh.pp * mesh.vpp),) * (mesh.pp * mesh.vpp)
    kind = "uneven" if len(set(chunks)) > 1 else "even"
    return Learner(mesh, kind, chunks, 8, ("te", "per_expert"))


TP2 = learner(LearnerMesh(tp=2, dp=2))
TP2_MOE = Learner(LearnerMesh(tp=2, dp=2, ep=2, etp=2), "even", (2,), 8, ("te", "per_expert"))
FOUR = Servers(ServerMesh(4))
FP8 = (Files((4, 4)), Servers(ServerMesh(2), (4, 4)))


@dataclass(frozen=True)
class Fault:
    """A mutation, the case it is shown on, and the checks that catch it, all of them."""

    name: str
    apply: Callable[[Patch], None]
    caught_by: str
    shape: ModelShape = DENSE
    source: Learner | Files = TP2
    destination: Servers = FOUR


def table(
    side: str, local: str, module: Any = sglang, **changes: object
) -> Callable[[Patch], None]:
    """Change the entries of the family tables whose local name ends so; None takes them out."""

    def apply(patch: Patch) -> None:
        families = {}
        for architecture, family in module.FAMILIES.items():
            blocks = {}
            for kind, part in family.blocks.items():
                held = [
                    replace(entry, **changes) if entry.name.endswith(local) else entry
                    for entry in getattr(part, side)
                    if changes or not entry.name.endswith(local)
                ]
                blocks[kind] = replace(part, **{side: tuple(held)})
            families[architecture] = replace(family, blocks=blocks)
        patch.setattr(module, "FAMILIES", families)

    return apply


def wrapped(owner: Any, name: str, change: Callable[..., Any]) -> Callable[[Patch], None]:
    """Replace a function by `change(original, *arguments)`."""

    def apply(patch: Patch) -> None:
        original = getattr(owner, name)
        patch.setattr(owner, name, lambda *a, **k: change(original, *a, **k))

    return apply


def keys_first(original: Any, heads: Any) -> list[tuple[int, int, int, int]]:
    """Group by group [key, queries, value]."""
    found = []
    for part, start, end, fused in original(heads):
        queries = heads.num // heads.kv * heads.dim
        shift = heads.dim if part == 0 else -queries if part == 1 else 0
        found.append((part, start, end, fused + shift))
    return found


def neighbours_kv(original: Any, name: str, parameters: Any, index: int, count: int, *rest: Any):  # type: ignore[no-untyped-def]
    """The queries of this rank beside the keys and values of the next."""
    shape, mine, paddings = original(name, parameters, index, count, *rest)
    _, theirs, _ = original(name, parameters, (index + 1) % count, count, *rest)
    return shape, (mine[0], *theirs[1:]), paddings


def padding_as_rows(original: Any, name: str, parameter: Any, index: int, num_rows: int):  # type: ignore[no-untyped-def]
    """Rows beyond the vocabulary claimed to be the parameter's."""
    grown = replace(parameter, shape=(num_rows * 64, *parameter.shape[1:]))
    return original(name, grown, index, num_rows)


def next_experts(original: Any, mesh: LearnerMesh) -> tuple[object, ...]:
    holders = original(mesh)
    return (*holders[1:], holders[0])


def stage_by_stage(original: Any, sizes: Any, pp: int, vpp: int, num_mtp: int) -> object:
    """All chunks of the first stage before any of the second."""
    right = original(sizes, pp, vpp, num_mtp)
    spans = [chunk for _, _, chunk in right]
    moved = [
        [replace(right.chunks[p][v], first=s.first, end=s.end)
         for v, s in enumerate(spans[p * vpp : (p + 1) * vpp])]
        for p in range(pp)
    ]  # fmt: skip
    return pipeline.Pipeline(tuple(tuple(stage) for stage in moved))


def without_last_layer(original: Any, blocks: Any, kinds: Any, whole: Any, chunk: Any) -> object:
    found = original(blocks, kinds, whole, chunk)
    return [f for f in found if blocks[f[0]].layer != whole.num_layers - 1]


def one_layer_earlier(original: Any, mesh: ServerMesh, num_layers: int, p: int) -> tuple[int, int]:
    first, end = original(mesh, num_layers, p)
    return first - (p > 0), end - (p < mesh.pp - 1)


def next_scales(original: Any, tensor: Any, parameters: Any, block: Any) -> ShardedTensor:
    """Each shard the scales of the blocks one further down; the last begins again."""
    right = original(tensor, parameters, block)
    shards = []
    for shard in right.shards:
        moved = []
        for piece in shard.pieces:
            top = max(
                p.box[-2][1] for s in right.shards for p in s.pieces if p.tensor == piece.tensor
            )
            start, end = piece.box[-2]
            step = 1 if end < top else -start if start else 0
            box = (*piece.box[:-2], (start + step, end + step), piece.box[-1])
            moved.append(Piece(piece.tensor, box, piece.local, piece.at))
        shards.append(Shard(shard.holders, tuple(moved), shard.paddings))
    return replace(right, shards=tuple(shards))


def first_cell_twice(original: Any, *arguments: Any) -> tuple[Any, ...]:
    return tuple(np.concatenate([part[:1], part]) for part in original(*arguments))


def one_row_further(original: Any, *arguments: Any) -> Any:
    """Every place in a local tensor one index too far along its last dim."""
    found = original(*arguments)
    at = found.at.copy()
    at[:, -1] += 1
    return replace(found, at=at)


def last_member_forgotten(original: Any, *arguments: Any) -> tuple[Any, ...]:
    """Of each node that several ranks get a flow on, the last one gets nothing."""
    found = []
    for delivery in original(*arguments):
        kept = delivery.members[:-1] or delivery.members
        ingress = tuple(min(i, kept[-1]) for i in delivery.ingress)
        found.append(
            delivery if delivery.near else replace(delivery, members=kept, ingress=ingress)
        )
    return tuple(found)


def written_out_wrongly(original: Any, layout: Layout, *arguments: Any) -> tuple[str, Any]:
    """The first rows of fc1 read from where its second half begins."""
    name, at = original(layout, *arguments)
    return (name, (8, *at[1:])) if name.endswith("linear_fc1.weight") and at[0] == 0 else (name, at)


QKV = ("query", "value", "key")
TWO_STAGES = learner(LearnerMesh(tp=2, pp=2))
CHUNKS = learner(LearnerMesh(tp=1, pp=2, vpp=2))
LATE = learner(LearnerMesh(pp=2), 3, 1)
SPREAD = Servers(ServerMesh(2, servers=2))
STAGED = Servers(ServerMesh(2, pp=2))
EXPERTS = Servers(ServerMesh(4, ep=2))

FAULTS = [
    Fault(
        "up before gate on the servers",
        table("sglang", "gate_up_proj.weight", kinds=("up", "gate")),
        "server slices",
    ),
    Fault(
        "up before gate on the learner",
        table("megatron", "mlp.linear_fc1.weight", megatron, kinds=("up", "gate")),
        "learner slices",
    ),
    Fault(
        "values before keys on the servers",
        table("sglang", "qkv_proj.weight", kinds=QKV),
        "server slices",
    ),
    Fault(
        "keys before queries in the fused group",
        wrapped(rules, "fused_groups", keys_first),
        "learner slices",
    ),
    Fault(
        "the next rank's copy of the KV heads",
        wrapped(rules, "heads_qkv", neighbours_kv),
        "server slices",
    ),
    Fault(
        "padding sent as rows of the vocabulary",
        wrapped(rules, "vocabulary", padding_as_rows),
        "learner slices, server slices, proof, proof of moves, simulation",
    ),
    Fault(
        "experts off by one part",
        wrapped(LearnerMesh, "expert_holders", next_experts),
        "learner slices",
        MOE, TP2_MOE, EXPERTS,
    ),
    Fault(
        "experts' down projection cut by rows",
        table("megatron", "experts.linear_fc2.weight{expert}", megatron, cut="rows"),
        "learner slices",
        MOE, TP2_MOE, EXPERTS,
    ),
    Fault(
        "chunks numbered stage by stage",
        wrapped(pipeline, "_in_order", stage_by_stage),
        "learner slices",
        DENSE, CHUNKS,
    ),
    Fault(
        "the last stage one layer short",
        wrapped(megatron, "_held", without_last_layer),
        "learner slices, proof, proof of moves, simulation",
        DENSE, LATE,
    ),
    Fault(
        "a server's first stage one layer short",
        wrapped(ServerMesh, "layers", one_layer_earlier),
        "server slices",
        DENSE, TP2, STAGED,
    ),
    Fault(
        "no router bias on the learner",
        table("megatron", "router.expert_bias", megatron),
        "learner slices, proof, proof of moves, simulation",
        DEEPSEEK, TP2_MOE, EXPERTS,
    ),
    Fault(
        "no router bias on the servers",
        table("sglang", "e_score_correction_bias"),
        "server slices",
        DEEPSEEK, TP2_MOE, EXPERTS,
    ),
    Fault(
        "keys down before queries down",
        table("sglang", "fused_qkv_a_proj_with_mqa.weight", kinds=("kv_down", "query_down")),
        "server slices",
        DEEPSEEK, TP2_MOE, EXPERTS,
    ),
    Fault(
        "scales off by one block",
        wrapped(sglang, "engine_scales", next_scales),
        "server slices",
        DENSE, *FP8,
    ),
    Fault(
        "a cell of a tied embedding planned twice",
        wrapped(cells, "_intersections", first_cell_twice),
        "proof, proof of moves, simulation",
        TIED, TWO_STAGES, STAGED,
    ),
    Fault(
        "places one index too far",
        wrapped(cells, "_pieces", one_row_further),
        "proof, proof of moves, simulation",
    ),
    Fault(
        "a replica forgotten in the fan-out",
        wrapped(routes._Router, "_deliveries", last_member_forgotten),
        "proof, proof of moves, simulation",
        DENSE, TP2, SPREAD,
    ),
    Fault(
        "moves written out with a wrong offset",
        wrapped(moves, "_local", written_out_wrongly),
        "proof of moves, simulation",
    ),
]  # fmt: skip


def slices_hold(side: Side) -> bool:
    try:
        assert_equal(expected(side.layout), side.reference(numbered(side)))
    except AssertionError:
        return False
    return True


def catches(fault: Fault, patch: Patch) -> str:
    """Which of the checks refuse the case as things are."""
    found = []
    source, destination = fault.source.side(fault.shape), fault.destination.side(fault.shape)
    if not slices_hold(source):
        found.append("learner slices")
    if not slices_hold(destination):
        found.append("server slices")
    placement = Placement.apart(source.layout, destination.layout)
    try:
        make_plan(source.layout, destination.layout, placement)
    except LayoutError:
        found.append("proof")
    patch.setattr(planner, "prove_plan", lambda plan: None)
    plan = make_plan(source.layout, destination.layout, placement)
    for name, look in (
        ("proof of moves", lambda: prove_moves(plan.moves, plan.source, plan.destination)),
        ("simulation", lambda: check(plan)),
    ):
        try:
            look()
        except LayoutError:
            found.append(name)
    return ", ".join(found)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_fault_is_caught_by_the_checks_that_can_see_it(fault: Fault, monkeypatch: Patch) -> None:
    with monkeypatch.context() as patch:
        assert catches(fault, patch) == ""  # the case itself is right
    fault.apply(monkeypatch)
    assert catches(fault, monkeypatch) == fault.caught_by


def test_error_of_a_simulation_names_tensor_interval_and_ranks(monkeypatch: Patch) -> None:
    wrapped(moves, "_local", written_out_wrongly)(monkeypatch)
    source, destination = TP2.side(DENSE).layout, Servers(ServerMesh(2)).side(DENSE).layout
    words = (
        r"plan: rank 0: model.layers.0.mlp.gate_up_proj.weight \[0:8, 0:8\] is wrong in 64 "
        r"elements. The first, \[0, 0\], holds model.layers.0.mlp.up_proj.weight\[0, 0\] and must "
        r"hold model.layers.0.mlp.gate_proj.weight\[0, 0\]; it was written 1 times, by "
        r"model.layers.0.mlp.gate_proj.weight \[0:8, 0:8\] from rank \d to rank 0 \(node\)"
    )
    with pytest.raises(LayoutError, match=words):
        check(make_plan(source, destination))


@pytest.mark.parametrize(
    "name", ["model.layers.0.self_attn.o_proj.weight", "decoder.layers.0.mlp.linear_fc2.weight"]
)
def test_copy_from_or_to_beyond_a_tensor_is_named_by_the_simulation(
    name: str, monkeypatch: Patch
) -> None:
    def one_row_lower(original: Any, *arguments: Any) -> tuple[str, Any]:
        local, at = original(*arguments)
        return local, (at[0] + (local == name), *at[1:])

    wrapped(moves, "_local", one_row_lower)(monkeypatch)
    source, destination = TP2.side(DENSE).layout, FOUR.side(DENSE).layout
    with pytest.raises(LayoutError, match=r"model.layers.0.*reaches beyond a local tensor"):
        check(make_plan(source, destination))


def test_simulation_that_would_not_fit_says_how_much_it_needs() -> None:
    layout = full_layout(TP2.side(DENSE).layout.table)
    plan = make_plan(layout, layout)
    with pytest.raises(LayoutError, match=r"needs [\d,]+ bytes .* limit of 1,000; simulate fewer"):
        check(plan, limit_bytes=1000)
