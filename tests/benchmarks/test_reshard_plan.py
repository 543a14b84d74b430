"""The benchmark's own counting, against sets of elements; and the shape of what it prints."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.reshard import models
from benchmarks.reshard.closed_form import formula_minimum
from benchmarks.reshard.measure import time_own_plan
from benchmarks.reshard.minimum import (
    NotHeldError,
    count_need,
    least_busiest,
    least_busiest_ingress,
)
from benchmarks.reshard.report import PLAN_HEADS, summary, table
from benchmarks.reshard.rows import ROWS, Row
from benchmarks.reshard.shards import tensors_by_name
from benchmarks.reshard_plan import main, measure_row
from megarl.actor.parameters import element_bytes
from megarl.reshard.explain import _copies as copy_counts
from megarl.reshard.layout import Box, Layout
from megarl.reshard.megatron import megatron_layout
from megarl.reshard.mesh import LearnerMesh, ServerMesh
from megarl.reshard.minimum import Nodes
from megarl.reshard.plan import make_plan
from megarl.reshard.sglang import sglang_layout

DENSE = replace(
    models.LLAMA_70B,
    num_layers=2,
    hidden_size=8,
    num_heads=4,
    num_kv_heads=2,
    head_dim=2,
    intermediate_size=8,
    vocab_size=10,
)
MOE = replace(
    models.QWEN3_30B,
    num_layers=2,
    hidden_size=8,
    num_heads=4,
    num_kv_heads=2,
    head_dim=2,
    intermediate_size=8,
    vocab_size=10,
    moe=replace(models.QWEN3_30B.moe, num_experts=4, expert_intermediate_size=4),
)
PAIRS = {
    "dense, more ranks than kv heads": Row(
        "a", DENSE, LearnerMesh(tp=2, pp=2, dp=2), ServerMesh(tp=4, servers=2)
    ),
    "dense, small servers": Row("b", DENSE, LearnerMesh(tp=4), ServerMesh(tp=1, servers=4)),
    "experts": Row("c", MOE, LearnerMesh(tp=2, dp=2, ep=4), ServerMesh(tp=4, ep=4, servers=2)),
    "experts, copies of the attention": Row(
        "d", MOE, LearnerMesh(pp=2, dp=2, ep=2), ServerMesh(tp=4, ep=2, attention_dp=2)
    ),
    "the same GPUs": Row(
        "e", MOE, LearnerMesh(tp=2, dp=2, ep=2), ServerMesh(tp=2, servers=2), together=True
    ),
}
GPUS = 2  # of a node


def elements(box: Box) -> set[tuple[int, ...]]:
    return set(itertools.product(*(range(start, end) for start, end in box)))


def held(layout: Layout) -> dict[int, set[tuple[str, tuple[int, ...]]]]:
    return {
        rank.rank: {(piece.tensor, e) for piece in rank.pieces for e in elements(piece.box)}
        for rank in layout.ranks
    }


def both(row: Row) -> tuple[Layout, Layout, Nodes, Nodes]:
    """Layouts of the row on nodes of two GPUs, those of the servers behind the learner's."""
    source = megatron_layout(row.shape, row.learner)
    destination = sglang_layout(row.shape, row.server)
    first = 0 if row.together else len(source.rank_ids) // GPUS
    source_nodes = {rank: rank // GPUS for rank in source.rank_ids}
    return source, destination, source_nodes, {r: first + r // GPUS for r in destination.rank_ids}


@pytest.fixture(params=PAIRS.values(), ids=PAIRS.keys())
def pair(request: pytest.FixtureRequest) -> tuple[Layout, Layout, Nodes, Nodes]:
    return both(request.param)


def test_counted_need_is_that_of_element_sets(pair: tuple[Layout, Layout, Nodes, Nodes]) -> None:
    source, destination, source_nodes, nodes = pair
    have, want = held(source), held(destination)
    cost = {p.name: element_bytes(p, 2) for p in destination.parameters}
    owners: dict[tuple[str, tuple[int, ...]], set[int]] = {}
    for rank, theirs in have.items():
        for element in theirs:
            owners.setdefault(element, set()).add(rank)
    into_node = {}
    by_holders: dict[frozenset[int], int] = {}
    for node in set(nodes.values()):
        here = set().union(*(want[rank] for rank in nodes if nodes[rank] == node))
        near = set().union(*(have[rank] for rank in source_nodes if source_nodes[rank] == node))
        into_node[node] = sum(cost[tensor] for tensor, _ in here - near)
        for element in here - near:
            ranks = frozenset(owners[element])
            by_holders[ranks] = by_holders.get(ranks, 0) + cost[element[0]]

    need = count_need(source, destination, source_nodes, nodes)

    assert need.into_node == into_node
    assert need.by_holders == by_holders
    assert need.held_bytes == {r: sum(cost[t] for t, _ in mine) for r, mine in want.items()}


def test_least_busiest_sender_is_the_worst_of_all_sets_of_ranks(
    pair: tuple[Layout, Layout, Nodes, Nodes],
) -> None:
    source, destination, source_nodes, nodes = pair
    need = count_need(source, destination, source_nodes, nodes)
    worst = max(
        sum(size for holders, size in need.by_holders.items() if holders <= set(ranks)) / count
        for count in range(1, len(source.rank_ids) + 1)
        for ranks in itertools.combinations(source.rank_ids, count)
    )
    assert least_busiest(need.by_holders) == pytest.approx(worst)


def test_formula_is_the_counted_minimum() -> None:
    for name in ("dense, more ranks than kv heads", "dense, small servers", "experts"):
        row = PAIRS[name]
        assert formula_minimum(row.shape, row.server, GPUS) == count_need(*both(row)).minimum_bytes


def test_counting_refuses_a_source_that_lacks_something() -> None:
    source, destination, source_nodes, nodes = both(PAIRS["dense, small servers"])
    with pytest.raises(NotHeldError, match="no source rank holds"):
        count_need(source.only(0), destination, source_nodes, nodes)


def test_copies_given_to_other_planners_are_whole_and_leave_nothing_out(
    pair: tuple[Layout, Layout, Nodes, Nodes],
) -> None:
    source, destination, _, _ = pair
    shapes = {
        name: parameter.shape[1:] if parameter.stacked else parameter.shape
        for parameter in destination.parameters
        for name in parameter.stored_names()
    }
    for name, _, replicas in tensors_by_name(source, source.rank_ids, every=False):
        for replica in replicas:
            shards = [elements(box) for _, box in replica]
            assert set().union(*shards) == elements(tuple((0, n) for n in shapes[name]))
            assert sum(map(len, shards)) == len(set().union(*shards))
    given = dict.fromkeys(destination.rank_ids, 0)
    for _, _, replicas in tensors_by_name(destination, destination.rank_ids, every=True):
        for rank, box in itertools.chain.from_iterable(replicas):
            given[rank] += len(elements(box))
    assert given == {rank: len(theirs) for rank, theirs in held(destination).items()}


def test_tiny_row_has_every_figure_and_reaches_the_minimum() -> None:
    row = replace(PAIRS["experts"], server=ServerMesh(tp=4, ep=2, attention_dp=2, servers=4))
    figures = measure_row(row, num_runs=1, folder=None, limit_s=0)
    result = json.loads(json.dumps(summary([figures])))
    source, destination, placement = row.layouts()
    nodes = {rank: device.node for rank, device in placement.destination.items()}
    need = count_need(source, destination, dict.fromkeys(source.rank_ids, -1), nodes)

    assert {
        "max_bytes_ratio",
        "max_sender_imbalance",
        "max_sender_over_mean",
        "max_plan_s",
        "min_speedup_vs_awex",
        "rows",
    } <= result.keys()
    assert result["max_bytes_ratio"] == 1.0
    assert result["max_gpu_bytes_ratio"] == 1.0
    assert result["rows"][0]["wire_bytes"] == need.minimum_bytes
    assert result["max_sender_imbalance"] >= 1.0
    assert result["max_ingress_imbalance"] >= 1.0
    assert result["rows"][0]["least_floor_s"] >= least_busiest_ingress(need, nodes) / 50e9
    assert row.name in table([figures])
    assert result["max_plan_s"] == figures["plan_and_operations_s"]
    assert "plan_s" not in figures  # it would not be what max_plan_s is the largest of
    exact = figures["methods"]["shard_p2p"]
    assert figures["ingress_floor_s"] <= exact["ingress_floor_s"]
    assert figures["ingress_floor_s"] <= figures["floor_s"]


def test_num_operations_are_the_copies_that_explain_counts_of_the_busiest_by_bytes() -> None:
    row = PAIRS["experts"]
    plan = make_plan(*row.layouts())
    own = time_own_plan(row)
    received, sent = copy_counts(plan)
    assert own.num_operations == (received[own.busiest[0]], sent[own.busiest[1]])


def test_every_name_and_column_that_is_printed_is_in_the_readme() -> None:
    text = (Path(__file__).parents[2] / "benchmarks" / "README.md").read_text("utf-8")
    for head in (*PLAN_HEADS[1:], "GPU TB: exact", "megarl, senders too"):
        assert f"`{head}`" in text, head
    for key in summary([measure_row(PAIRS["dense, small servers"], 1, None, 0)]):
        assert f"`{key}`" in text, key


def test_help_names_no_row_and_the_list_names_all(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--list"]) == 0
    assert capsys.readouterr().out.split() == [row.name for row in ROWS]
    for arguments, status in ((["--help"], 0), (["--rows", "llama-7b"], 2)):
        with pytest.raises(SystemExit) as ended:
            main(arguments)
        assert ended.value.code == status
        shown = capsys.readouterr()
        assert ROWS[0].name not in shown.out + shown.err
    assert "there is no row 'llama-7b'; --list prints the names" in shown.err
