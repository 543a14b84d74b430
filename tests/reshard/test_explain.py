"""The figures of a plan equal those counted element by element; a tensor's way is that by hand."""

from __future__ import annotations

import functools
import itertools
import json
import re
import time
from dataclasses import fields
from pathlib import Path

import pytest

from megarl.actor.parameters import BlockTable
from megarl.config.explain import explain_run
from megarl.config.layouts import run_layouts
from megarl.config.load import load_layout
from megarl.errors import LayoutError
from megarl.reshard.explain import Explanation, explain
from megarl.reshard.explicit import full_layout, one_block
from megarl.reshard.fabric import FABRICS
from megarl.reshard.layout import Layout, num_elements
from megarl.reshard.megatron import megatron_layout
from megarl.reshard.mesh import LearnerMesh, ServerMesh
from megarl.reshard.page import page, way_page
from megarl.reshard.placement import Device, Placement
from megarl.reshard.plan import Plan, make_plan
from megarl.reshard.precision import with_fp8
from megarl.reshard.routes import Traffic
from megarl.reshard.sglang import sglang_layout
from megarl.reshard.trace import trace
from tests.reshard.models import tiny_shape

EXAMPLES = Path(__file__).parents[2] / "examples" / "reshard"

DENSE = tiny_shape()
EXPERTS = tiny_shape("DeepseekV3ForCausalLM")
MOE_LEARNER = LearnerMesh(tp=2, pp=2, dp=2, ep=4)
MOE_SERVER = ServerMesh(tp=4, ep=2, attention_dp=2, servers=2)
DENSE_PAIR = (DENSE, LearnerMesh(tp=2, pp=2, dp=2), ServerMesh(4, servers=2))

# Two key and value heads: on a learner of 4 ranks each is on every second rank, behind the end of
# its group's queries; on a server of 8 each has four copies.
TWO_GROUPS = tiny_shape(num_heads=8, num_kv_heads=2, head_dim=4)
QKV = "decoder.layers.0.self_attention.linear_qkv.weight"
FUSED = "model.layers.0.self_attn.qkv_proj.weight"


@functools.cache
def planned(shape, learner: LearnerMesh, server: ServerMesh, together: bool, per_node: int) -> Plan:
    source, destination = megatron_layout(shape, learner), sglang_layout(shape, server)
    place = Placement.together if together else Placement.apart
    return make_plan(source, destination, place(source, destination, per_node), chunk_bytes=128)


def explained(plan: Plan) -> Explanation:
    return explain(plan, 0.1, "Tiny", {}, FABRICS["h100"])


CASES = [
    pytest.param(
        *shape, together, per_node, id=f"{name}-{'together' if together else 'apart'}-{per_node}"
    )
    for name, shape in (("dense", DENSE_PAIR), ("experts", (EXPERTS, MOE_LEARNER, MOE_SERVER)))
    for together, per_node in ((False, 4), (False, 2), (True, 4), (True, 2))
]


def by_node(layout: Layout, devices: dict[int, Device]) -> dict[int, set[tuple]]:
    """For each node the numbers of all elements that its ranks hold: (tensor, index)."""
    found: dict[int, set[tuple]] = {}
    for rank in layout.ranks:
        held = found.setdefault(devices[rank.rank].node, set())
        for piece in rank.pieces:
            spans = (range(start, end) for start, end in piece.box)
            held.update((piece.tensor, *index) for index in itertools.product(*spans))
    return found


@pytest.mark.parametrize(("shape", "learner", "server", "together", "per_node"), CASES)
def test_minimum_is_that_of_sets_of_elements(shape, learner, server, together, per_node) -> None:
    plan = planned(shape, learner, server, together, per_node)
    have = by_node(plan.source, dict(plan.placement.source))
    want = by_node(plan.destination, dict(plan.placement.destination))
    width = {p.name: 4 if p.precision == "float32" else 2 for p in plan.destination.parameters}
    least = sum(
        sum(width[element[0]] for element in elements - have.get(node, set()))
        for node, elements in want.items()
    )
    figures = explained(plan)
    assert figures.minimum_bytes == least == figures.moved_bytes
    assert figures.ratio == 1.0


@pytest.mark.parametrize(("shape", "learner", "server", "together", "per_node"), CASES)
def test_bytes_and_copies_are_those_of_the_moves(
    shape, learner, server, together, per_node
) -> None:
    plan = planned(shape, learner, server, together, per_node)
    figures = explained(plan)
    width = {p.name: 4 if p.precision == "float32" else 2 for p in plan.destination.parameters}
    counted: dict[str, dict[int, int]] = {field.name: {} for field in fields(Traffic)}
    received: dict[int, int] = {}
    sent: dict[int, int] = {}
    for move in plan.moves:
        size = num_elements(move.box) * width[move.tensor]
        ways = (
            (("local", move.dst),)
            if move.link == "local"
            else (
                (f"{move.link}_out", move.src),
                (f"{move.link}_in", move.dst),
            )
        )
        for name, rank in ways:
            counted[name][rank] = counted[name].get(rank, 0) + size
        received[move.dst] = received.get(move.dst, 0) + 1
        if move.link != "fanout":
            sent[move.src] = sent.get(move.src, 0) + 1
    for name, ranks in counted.items():
        spread = figures.traffic[name]
        side = plan.source if name in ("network_out", "node_out") else plan.destination
        assert spread.total == sum(ranks.values()), name
        assert spread.busiest == max(ranks.values(), default=0), name
        assert ranks.get(spread.busiest_rank, 0) == spread.busiest, name
        assert spread.mean == spread.total / len(side.rank_ids), name
    for spread, ranks in ((figures.received, received), (figures.sent, sent)):
        assert (spread.total, spread.busiest) == (sum(ranks.values()), max(ranks.values()))
        assert ranks[spread.busiest_rank] == spread.busiest


def test_queries_of_two_groups_travel_from_tp4_to_tp8_by_heads() -> None:
    plan = planned(TWO_GROUPS, LearnerMesh(tp=4), ServerMesh(tp=8), False, 8)
    way = trace(plan, "model.layers.0.self_attn.q_proj.weight")
    whole = (0, 8)
    # 12 rows of the fused tensor on each learner rank: three heads, or one head with key and value
    assert [(p.box[0], p.local, p.at, p.ranks) for p in way.held] == [
        ((0, 12), QKV, (0, 0), (0,)),
        ((12, 16), QKV, (0, 0), (1,)),
        ((16, 28), QKV, (0, 0), (2,)),
        ((28, 32), QKV, (0, 0), (3,)),
    ]
    assert [(p.box, p.at, p.ranks) for p in way.wanted] == [
        (((4 * r, 4 * r + 4), whole), (0, 0), (r,)) for r in range(8)
    ]
    assert [(c.box[0], c.src, c.src_at, c.ranks, c.dst_at, c.link) for c in way.copies] == [
        ((0, 4), 0, (0, 0), (0,), (0, 0), "network"),
        ((4, 8), 0, (4, 0), (1,), (0, 0), "network"),
        ((8, 12), 0, (8, 0), (2,), (0, 0), "network"),
        ((12, 16), 1, (0, 0), (3,), (0, 0), "network"),
        ((16, 20), 2, (0, 0), (4,), (0, 0), "network"),
        ((20, 24), 2, (4, 0), (5,), (0, 0), "network"),
        ((24, 28), 2, (8, 0), (6,), (0, 0), "network"),
        ((28, 32), 3, (0, 0), (7,), (0, 0), "network"),
    ]
    assert {c.dst_local for c in way.copies} == {FUSED}


def test_keys_of_two_groups_enter_the_node_once_and_fan_out() -> None:
    plan = planned(TWO_GROUPS, LearnerMesh(tp=4), ServerMesh(tp=8), False, 8)
    way = trace(plan, "model.layers.0.self_attn.k_proj.weight")
    assert [(p.box[0], p.local, p.at, p.ranks) for p in way.held] == [
        ((0, 4), QKV, (4, 0), (1,)),
        ((4, 8), QKV, (4, 0), (3,)),
    ]
    assert [(p.box[0], p.local, p.at, p.ranks) for p in way.wanted] == [
        ((0, 4), FUSED, (4, 0), (0, 1, 2, 3)),
        ((4, 8), FUSED, (4, 0), (4, 5, 6, 7)),
    ]
    for rows, learner, servers in (((0, 4), 1, {0, 1, 2, 3}), ((4, 8), 3, {4, 5, 6, 7})):
        first, second = [c for c in way.copies if c.box[0] == rows]
        assert (first.link, first.src, first.src_local) == ("network", learner, QKV)
        assert (first.src_at, first.dst_at) == ((4, 0), (4, 0))
        (ingress,) = first.ranks
        assert (second.link, second.src, second.src_local) == ("fanout", ingress, FUSED)
        assert {ingress, *second.ranks} == servers


def test_way_of_one_expert_is_its_part_of_the_stack() -> None:
    plan = planned(EXPERTS, MOE_LEARNER, MOE_SERVER, False, 4)
    name = "model.layers.1.mlp.experts.3.up_proj.weight"
    one = trace(plan, name)
    every = trace(plan, name.replace("experts.3", "experts.*"))
    assert {part.box[0] for part in one.held + one.wanted} == {(3, 4)}
    assert {c.box[0] for c in one.copies} == {(3, 4)}
    assert {part.box[0] for part in every.held} == {(0, 1), (1, 2), (2, 3), (3, 4)}
    # experts 2 and 3 are the second half of the stack: expert 3 is the second slot there
    assert {part.at[0] for part in one.wanted} == {1}
    assert sorted(rank for part in one.wanted for rank in part.ranks) == [2, 3, 6, 7]
    title, stack = (" ".join(way_page(explained(plan), {}, way).split()) for way in (one, every))
    assert f"tensor {name} [8, 8], expert 3 of {every.name} [4, 8, 8] " in title
    assert f"tensor {every.name} [4, 8, 8] " in stack


@pytest.mark.parametrize(
    ("name", "text"),
    [
        (
            "model.layers.1.mlp.experts.4.up_proj.weight",
            "the policy has experts 0 to 3; ask for one of them, or for all with "
            r"model\.layers\.1\.mlp\.experts\.\*\.up_proj\.weight",
        ),
        (
            "model.layers.1.self_attn.o_porj.weight",
            r"the nearest is model\.layers\.1\.self_attn\.o_proj\.weight",
        ),
    ],
)
def test_unknown_tensor_is_named_with_the_nearest(name: str, text: str) -> None:
    plan = planned(EXPERTS, MOE_LEARNER, MOE_SERVER, False, 4)
    with pytest.raises(LayoutError, match=text):
        trace(plan, name)


def test_tensor_of_a_policy_without_any_is_refused() -> None:
    nothing = full_layout(one_block(()))
    with pytest.raises(LayoutError, match="x: the policy has no such tensor; its table is empty"):
        trace(make_plan(nothing, nothing), "x")


def test_head_that_is_tied_is_said_to_be_the_embedding() -> None:
    plan = planned(tiny_shape(tie_embeddings=True), LearnerMesh(), ServerMesh(), False, 8)
    with pytest.raises(LayoutError, match=r"tied to its embedding; ask for model\.embed_tokens"):
        trace(plan, "lm_head.weight")


def test_tensor_that_no_server_holds_is_not_sent() -> None:
    shape = tiny_shape("DeepseekV3ForCausalLM", num_layers=2, num_mtp_layers=1)
    plan = planned(shape, LearnerMesh(), ServerMesh(), False, 8)
    way = trace(plan, "model.layers.2.eh_proj.weight")
    assert (len(way.held), way.wanted, way.copies) == (1, (), ())
    assert way_page(explained(plan), {}, way).endswith("no server holds it: it is not sent")


def test_layer_that_a_plan_of_a_part_leaves_out_is_not_sent() -> None:
    source = megatron_layout(DENSE, LearnerMesh())
    first = next(block for block in source.table.blocks if block.kind == "dense")
    part = full_layout(BlockTable((first,), {"dense": source.table.kinds["dense"]}))
    plan = make_plan(source, part, partial=True)
    sent, kept = (trace(plan, f"model.layers.{i}.mlp.down_proj.weight") for i in (0, 1))
    assert sent.wanted and sent.copies
    assert (len(kept.held), kept.wanted, kept.copies) == (1, (), ())


def keys(found: object) -> set[str]:
    """All keys of nested objects."""
    if isinstance(found, list):
        return set().union(*(keys(item) for item in found))
    if not isinstance(found, dict):
        return set()
    return set(found).union(*(keys(value) for value in found.values()))


def test_json_keys_are_those_of_the_page_in_the_docs() -> None:
    config = load_layout(EXAMPLES / "llama-3.1-405b.toml")
    found = json.loads(explain_run(config, "lm_head.weight", FABRICS["h100"], as_json=True))
    text = (EXAMPLES.parents[1] / "docs" / "explain.md").read_text()
    table = text[text.index("| key | holds |") : text.index("A `box` is")]
    assert keys(found) == set(re.findall(r"`([a-z_]+)`", table))


def test_float8_weights_are_named_by_where_they_are_quantized() -> None:
    source = megatron_layout(DENSE, LearnerMesh(tp=2))
    precisions = with_fp8(source, sglang_layout(DENSE, ServerMesh(2), (4, 4)), (4, 4))
    plan = make_plan(precisions.source, precisions.destination)
    figures = explain(plan, 0.1, "Tiny", precisions.decisions, FABRICS["h100"])
    before = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    assert figures.quantized == {"before": before, "after": []}
    assert "before the wire, by the learner: q_proj, k_proj" in page(figures, {})


def test_kimi_k2_is_explained_within_five_seconds() -> None:
    start = time.process_time()
    config = load_layout(EXAMPLES / "kimi-k2.toml")
    name = "model.layers.60.mlp.experts.{}.down_proj.weight"
    text = explain_run(config, name.format(383), FABRICS["h200"])
    assert time.process_time() - start < 5
    assert f"expert 383 of {name.format('*')}" in " ".join(text.split())


def test_page_names_the_slowest_resource_and_its_ranks() -> None:
    plan = planned(*DENSE_PAIR, False, 4)
    text = page(explained(plan), {"learner": "8 ranks"})
    slowest = explained(plan).prediction.slowest
    assert slowest.resource in ("nic_in", "nic_out")
    words = {"nic_in": "network, receiving, at server", "nic_out": "network, sending, at learner"}
    assert words[slowest.resource] in text
    assert "moved / minimum 1.0000" in " ".join(text.split())


def test_balance_is_told_where_something_crosses_the_network_alone() -> None:
    apart = planned(*DENSE_PAIR, False, 4)
    together = planned(DENSE, LearnerMesh(), ServerMesh(), True, 4)
    assert "busiest / mean: senders" in page(explained(apart), {})
    alone = page(explained(together), {})
    assert "busiest / mean" not in alone and "nothing has to cross the network" in alone


def test_page_shows_every_tensor_of_both_layouts_once() -> None:
    plan = planned(DENSE, LearnerMesh(tp=2), ServerMesh(), True, 4)
    lines = page(explained(plan), {}).splitlines()
    names = [line.split()[0] for line in lines if re.search(r" \d shards?\b", line)]
    assert len(names) == len(set(names)) == 22
    assert {"output_layer.weight", "lm_head.weight", "model.norm.weight"} <= set(names)
    parts = [line.strip() for line in lines]
    assert "q_proj->0 k_proj->16 v_proj->24" in parts and "down_proj->0" in parts


def test_columns_of_bytes_end_where_their_titles_do() -> None:
    lines = page(explained(planned(*DENSE_PAIR, False, 4)), {}).splitlines()
    (title,) = (i for i, line in enumerate(lines) if line.startswith("bytes"))
    ends = [match.end() for match in re.finditer(r"all|busiest rank|mean", lines[title])]
    rows = [line for line in lines[title + 1 : title + 8] if "(" in line]
    assert len(rows) == 4  # network and fan-out, given and taken
    for row in rows:
        found = re.finditer(r"[\d.]+ [kMGT]?B(?: \(\w+ \d+\))?", row)
        assert [match.end() for match in found] == ends, row


@pytest.mark.parametrize("number", ["007", "9" * 5000, "\u0663", "1\u0663"])
def test_only_plain_digits_are_the_number_of_an_expert(number: str) -> None:
    plan = planned(EXPERTS, MOE_LEARNER, MOE_SERVER, False, 4)
    with pytest.raises(
        LayoutError, match="no such tensor; the nearest is model.layers.1"
    ) as caught:
        trace(plan, f"model.layers.1.mlp.experts.{number}.up_proj.weight")
    assert len(str(caught.value)) < 400


def test_fp8_servers_of_a_family_that_drops_the_scales_are_refused() -> None:
    flags = ["--rollout.precision.weights", "fp8"]
    config = load_layout(EXAMPLES / "llama-3.1-405b.toml", flags)
    with pytest.raises(LayoutError, match=r"rollout.precision.weights=fp8.*LlamaForCausalLM"):
        run_layouts(config)
