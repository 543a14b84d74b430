"""What holds for every pair of layouts, shown on hundreds of random ones, or on thousands (slow).

The layouts are compared with plain slices, the plans with a simulation of every element; neither
shares code with the planner or the proof. A failure prints the pair, and the seed of the run.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st

from megarl.reshard.layout import Layout, num_elements
from megarl.reshard.minimum import minimum_network_bytes
from megarl.reshard.placement import Placement
from megarl.reshard.plan import Plan, make_plan
from megarl.reshard.simulate import Arrays, check, expected, number, numbering_of, simulate
from megarl.reshard.store import from_json, to_json
from tests.reshard.strategies import Pair, Side, pairs

SEED = int(os.environ.get("MEGARL_PROPERTY_SEED", random.randrange(2**32)))

LEARNER_TO_SERVERS = ["learner servers"]
FROM_FILES = ["files learner", "files servers", "files servers fp8"]
AMONG_ENGINES = ["learner learner", "servers servers", "servers servers fp8"]
TO_FILES = ["learner files", "servers files", "servers files fp8"]
EVERYTHING = LEARNER_TO_SERVERS * 3 + FROM_FILES + AMONG_ENGINES + TO_FILES

Test = Callable[..., None]
MANY: dict[str, Test] = {}
"""Each property with all of its examples, of which it gets a part in the default tests."""
PART, LEAST = 4, 25


def examples(count: int, *drawn: st.SearchStrategy[object]) -> Callable[[Test], Test]:
    """So many examples, other ones in every run; the seed is in the failure's message."""

    def decorate(test: Test) -> Test:
        def tried(times: int) -> Test:
            configured = settings(
                max_examples=times,
                database=None,
                print_blob=True,
                suppress_health_check=list(HealthCheck),
            )
            return seed(SEED)(configured(given(*drawn)(test)))

        MANY[test.__name__] = tried(count)
        return tried(max(count // PART, LEAST))

    return decorate


def plan_of(pair: Pair) -> Plan:
    return make_plan(pair.source.layout, pair.destination.layout, pair.placement)


def assert_equal(found: Arrays, wanted: Arrays) -> None:
    assert found.keys() == wanted.keys()
    for rank, tensors in wanted.items():
        assert found[rank].keys() == tensors.keys(), rank
        for name, array in tensors.items():
            mine = found[rank][name]
            same = mine is array or (mine.shape == array.shape and bool((mine == array).all()))
            assert same, f"rank {rank} {name}: {mine} is not {array}"


def numbered(side: Side) -> dict[str, np.ndarray]:
    """The side's parameters, every element with a number of its own."""
    arrays, first = {}, 1
    for p in side.layout.parameters:
        arrays[p.name] = np.arange(first, first + p.num_elements).reshape(p.shape)
        first += p.num_elements
    return arrays


@examples(1000, pairs(EVERYTHING))
def test_any_layout_holds_what_plain_slices_of_the_policy_are(pair: Pair) -> None:
    print(f"seed {SEED}: set MEGARL_PROPERTY_SEED to run the same examples")
    for side in (pair.source, pair.destination):
        assert_equal(expected(side.layout), side.reference(numbered(side)))


@examples(460, pairs(EVERYTHING))
def test_any_plan_writes_every_element_once_and_where_it_belongs(pair: Pair) -> None:
    plan = plan_of(pair)
    report = check(plan)
    held = [shard for rank in pair.destination.layout.ranks for shard in rank.pieces]
    assert report.num_elements == sum(num_elements(piece.box) for piece in held)
    assert report.num_elements == plan.num_elements()


@examples(60, pairs([*LEARNER_TO_SERVERS * 2, *AMONG_ENGINES, "files learner"], mtp=False))
def test_any_round_trip_brings_every_element_back(pair: Pair) -> None:
    source, there = pair.source.layout, pair.destination.layout
    check(plan_of(pair))
    back = Placement(pair.placement.destination, pair.placement.source)
    check(make_plan(there, source, back))


@examples(100, pairs(LEARNER_TO_SERVERS), st.booleans())
def test_a_layout_to_itself_on_the_same_gpus_moves_nothing_between_gpus(
    pair: Pair, second: bool
) -> None:
    layout = (pair.destination if second else pair.source).layout
    plan = make_plan(layout, layout, Placement.together(layout, layout))
    assert {move.link for move in plan.moves} == {"local"}
    assert all(move.src == move.dst for move in plan.moves)
    traffic = plan.traffic
    remote = (traffic.network_out, traffic.network_in, traffic.node_out, traffic.node_in)
    assert not any(sum(rank.values()) for rank in (*remote, traffic.fanout_in, traffic.fanout_out))
    assert sum(traffic.local.values()) == written_bytes(plan, layout)
    check(plan)


def written_bytes(plan: Plan, layout: Layout) -> int:
    """Bytes of all that a layout's ranks hold, element by element."""
    width = {p.name: element_bytes(plan, p.precision) for p in layout.parameters}
    pieces = [piece for rank in layout.ranks for piece in rank.pieces]
    return sum(num_elements(piece.box) * width[piece.tensor] for piece in pieces)


def element_bytes(plan: Plan, precision: str) -> int:
    return {"policy": plan.policy_bytes, "float32": 4, "float8": 1}[precision]


@examples(60, pairs(LEARNER_TO_SERVERS), st.randoms(use_true_random=False))
def test_ranks_in_another_order_send_the_same_to_the_same(pair: Pair, order: random.Random) -> None:
    source = pair.source.layout
    names = list(source.rank_ids)
    order.shuffle(names)
    stages = tuple(tuple(names[rank] for rank in stage) for stage in source.stages)
    moved = replace(source, stages=stages)
    devices = {names[rank]: device for rank, device in pair.placement.source.items()}
    plan = plan_of(pair)
    other = make_plan(
        moved, pair.destination.layout, Placement(devices, pair.placement.destination)
    )
    assert_equal(simulate(other), simulate(plan))
    for kind in ("network_in", "node_in", "local", "fanout_in"):
        totals = [sum(getattr(p.traffic, kind).values()) for p in (plan, other)]
        assert totals[0] == totals[1], kind


@examples(60, pairs(["learner servers", "learner learner"]), st.randoms(use_true_random=False))
def test_replicas_that_change_places_change_only_who_sends(
    pair: Pair, order: random.Random
) -> None:
    source = pair.source.layout
    replicas: dict[tuple[object, ...], list[int]] = {}
    for rank in source.ranks:
        replicas.setdefault((rank.pieces, rank.paddings), []).append(rank.rank)
    names: dict[int, int] = {}
    for ranks in replicas.values():
        names |= dict(zip(ranks, order.sample(ranks, len(ranks)), strict=True))
    stages = tuple(tuple(names[rank] for rank in stage) for stage in source.stages)
    moved = replace(source, stages=stages)
    assert [rank.pieces for rank in moved.ranks] == [rank.pieces for rank in source.ranks]
    apart = Placement.apart(source, pair.destination.layout, 2)
    plans = [make_plan(layout, pair.destination.layout, apart) for layout in (source, moved)]
    assert_equal(simulate(plans[1]), simulate(plans[0]))
    sent = [sorted(plan.traffic.network_out.values()) for plan in plans]
    assert sent[0] == sent[1]


@examples(80, pairs(LEARNER_TO_SERVERS))
def test_one_ranks_part_is_its_part_of_the_whole(pair: Pair) -> None:
    plan = plan_of(pair)
    last = pair.destination.layout.rank_ids[-1]
    mine = [move for move in plan.moves if move.dst == last]
    operations = plan.operations_to(last)
    assert list(operations.moves(plan)) == mine
    assert int(operations.num_elements.sum()) == sum(num_elements(move.box) for move in mine)
    alone = simulate(make_plan(pair.source.layout, pair.destination.layout.only(last)))
    held = expected(pair.destination.layout, numbering_of(plan.source.table))
    assert_equal({last: alone[last]}, {last: held[last]})
    direct = {move for move in plan.moves if move.link != "fanout"}
    sent = [move for rank in plan.source.rank_ids for move in plan.sends(rank)]
    assert set(sent) == direct
    assert len(sent) == len(direct)
    src = sent[-1].src
    assert plan.between(src, last) == tuple(m for m in mine if m.src == src and m in direct)


@examples(150, pairs(EVERYTHING))
def test_network_bytes_are_the_elements_that_no_rank_of_the_node_holds(pair: Pair) -> None:
    plan = plan_of(pair)
    numbering = numbering_of(plan.source.table)
    given_at = elements_by_node(number(plan.source, numbering), pair.placement.source)
    wanted_at = elements_by_node(expected(plan.destination, numbering), pair.placement.destination)
    width = np.zeros(numbering.last + 1, np.int64)
    for p in plan.source.parameters:
        first = numbering.first(p.name)
        width[first : first + p.num_elements] = element_bytes(plan, p.precision)
    nothing = np.zeros(0, np.int64)
    least = {
        node: int(width[np.setdiff1d(wanted, given_at.get(node, nothing))].sum())
        for node, wanted in wanted_at.items()
    }
    arrived = dict.fromkeys(least, 0)
    for rank, count in plan.traffic.network_in.items():
        arrived[pair.placement.destination[rank].node] += count
    assert arrived == least
    assert minimum_network_bytes(plan.source, plan.destination, pair.placement) == least
    assert sum(plan.traffic.network_out.values()) == sum(least.values())
    assert_traffic_is_that_of_the_moves(plan)


def elements_by_node(arrays: Arrays, devices: dict[int, object]) -> dict[int, np.ndarray]:
    """The distinct elements that the ranks of each node hold together."""
    found: dict[int, list[np.ndarray]] = {}
    for rank, tensors in arrays.items():
        node = devices[rank].node  # type: ignore[attr-defined]
        found.setdefault(node, []).extend(array.ravel() for array in tensors.values())
    return {
        node: (lambda ids: ids[ids > 0])(np.unique(np.concatenate(parts)))
        for node, parts in found.items()
        if parts
    }


def assert_traffic_is_that_of_the_moves(plan: Plan) -> None:
    width = {p.name: element_bytes(plan, p.precision) for p in plan.source.parameters}
    counted: dict[tuple[str, int], int] = {}
    for move in plan.moves:
        size = num_elements(move.box) * width[move.tensor]
        sides = [("local", move.dst)]
        if move.link != "local":
            sides = [(f"{move.link}_out", move.src), (f"{move.link}_in", move.dst)]
        for side in sides:
            counted[side] = counted.get(side, 0) + size
    names = "network_out network_in node_out node_in local fanout_out fanout_in".split()
    told = {
        (name, rank): count
        for name in names
        for rank, count in getattr(plan.traffic, name).items()
        if count
    }
    assert told == counted


@examples(60, pairs(EVERYTHING))
def test_a_plan_made_again_or_read_again_is_the_same(pair: Pair) -> None:
    plan = plan_of(pair)
    for other in (plan_of(pair), from_json(to_json(plan))):
        assert other.digest == plan.digest
        assert other.moves == plan.moves
        assert other.traffic == plan.traffic


@pytest.mark.slow
@pytest.mark.parametrize("name", MANY)
def test_property_holds_for_many_more(name: str) -> None:
    MANY[name]()
