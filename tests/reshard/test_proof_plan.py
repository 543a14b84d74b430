"""A plan spoilt in its own compact form is refused, and the error names tensor, interval, ranks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from megarl.actor.parameters import Block, BlockTable, Parameter
from megarl.errors import LayoutError
from megarl.reshard.cells import Pairing
from megarl.reshard.explicit import full_layout
from megarl.reshard.layout import BlockLayout, Layout, Piece, Shard, ShardedTensor, Site
from megarl.reshard.megatron import megatron_layout
from megarl.reshard.mesh import LearnerMesh, ServerMesh
from megarl.reshard.placement import Placement
from megarl.reshard.plan import Plan, make_plan
from megarl.reshard.proof import prove_plan
from megarl.reshard.routes import Delivery, Route
from megarl.reshard.sglang import sglang_layout
from tests.reshard.models import tiny_shape

SHAPE = tiny_shape(num_layers=4)
SOURCE = megatron_layout(SHAPE, LearnerMesh(tp=2, pp=2, dp=2))
DESTINATION = sglang_layout(SHAPE, ServerMesh(4, servers=2))  # keys and values in two copies
APART = make_plan(SOURCE, DESTINATION, Placement.apart(SOURCE, DESTINATION, 4))


def number_of(kind: str) -> int:
    """The pairing of a kind of block."""
    for segment in APART.segments:
        if APART.destination.table.blocks[segment.blocks[0].block].kind == kind:
            return segment.pairing
    raise AssertionError(kind)


def with_pairing(kind: str, **changes: Any) -> Plan:
    number = number_of(kind)
    spoilt = replace(APART.pairings[number], **changes)
    pairings = (*APART.pairings[:number], spoilt, *APART.pairings[number + 1 :])
    return replace(APART, pairings=pairings)


def cell_of(pairing: Pairing, kind: str) -> int:
    return next(
        i for i, p in enumerate(pairing.parameter.tolist()) if pairing.parameters[p].kind == kind
    )


def refused(plan: Plan, *words: str) -> None:
    with pytest.raises(LayoutError) as caught:
        prove_plan(plan)
    for word in words:
        assert word in str(caught.value)


def test_untouched_plan_is_proved() -> None:
    prove_plan(APART)


def test_cell_cut_short_leaves_an_interval_that_is_named_with_its_ranks() -> None:
    pairing = APART.pairings[number_of("dense")]
    cell = cell_of(pairing, "key")
    high = pairing.high.copy()
    high[cell, 0] -= 1
    refused(
        with_pairing("dense", high=high),
        "model.layers.0.self_attn.k_proj.weight",
        "destination ranks [0, 4]",
        "written by nothing",
    )


def test_cell_that_reaches_into_its_neighbour_is_refused() -> None:
    pairing = APART.pairings[number_of("dense")]
    cell = cell_of(pairing, "gate")
    low = pairing.low.copy()
    high = pairing.high.copy()
    low[cell, 0] += 1
    high[cell, 0] += 1
    refused(with_pairing("dense", low=low, high=high), "gate_proj")


def test_two_cells_of_the_same_elements_are_named_twice() -> None:
    pairing = APART.pairings[number_of("dense")]
    cell = cell_of(pairing, "down")
    twice = np.arange(len(pairing.parameter))
    twice = np.insert(twice, cell, cell)
    start = pairing.start.copy()
    start[start > cell] += 1
    columns = {
        name: getattr(pairing, name)[twice]
        for name in ("parameter", "low", "high", "source_box", "destination_box")
    }
    refused(with_pairing("dense", start=start, **columns), "down_proj", "written 2 times")


def test_cell_given_to_the_box_of_another_rank_is_refused() -> None:
    pairing = APART.pairings[number_of("dense")]
    cell = cell_of(pairing, "query")
    boxes = pairing.destination_box.copy()
    other = next(
        i
        for i, p in enumerate(pairing.parameter.tolist())
        if p == pairing.parameter[cell] and boxes[i] != boxes[cell]
    )
    boxes[cell] = boxes[other]
    refused(with_pairing("dense", destination_box=boxes), "q_proj", "is not within")


def test_piece_read_from_another_place_of_its_tensor_is_refused() -> None:
    pairing = APART.pairings[number_of("dense")]
    at = pairing.source.at.copy()
    row = int(np.flatnonzero(pairing.source.parameter == 1)[0])
    at[row, 0] += 1
    source = replace(pairing.source, at=at)
    refused(with_pairing("dense", source=source), "is not where megatron")


def test_padding_written_by_a_cell_is_refused() -> None:
    pairing = APART.pairings[number_of("head")]
    side = pairing.destination
    high, row_high = pairing.high.copy(), side.high.copy()
    last = int(high[:, 0].argmax())
    high[last, 0] += 1
    row_high[side.box == pairing.destination_box[last], 0] += 1
    spoilt = replace(side, high=row_high)
    refused(with_pairing("head", high=high, destination=spoilt), "lm_head.weight")


def with_route(change: Any) -> Plan:
    """The plan with one route of dense blocks changed."""
    number = next(i for i, s in enumerate(APART.segments) if s.pairing == number_of("dense"))
    routes = list(APART.routes[number])
    routes[0] = change(routes[0])
    spoilt = (*APART.routes[:number], tuple(routes), *APART.routes[number + 1 :])
    return replace(APART, routes=spoilt)


def without_last_delivery(route: Route) -> Route:
    return replace(route, deliveries=route.deliveries[:-1])


def with_first_delivery_twice(route: Route) -> Route:
    return replace(route, deliveries=(*route.deliveries, route.deliveries[0]))


def with_sender_that_does_not_exist(route: Route) -> Route:
    return replace(route, senders=(99, *route.senders[1:]))


def with_one_sending_missing(route: Route) -> Route:
    return replace(route, senders=route.senders[1:])


def with_ingress_elsewhere(route: Route) -> Route:
    first = route.deliveries[0]
    other = route.deliveries[1].members[0]
    ingress = (other, *first.ingress[1:])
    return replace(route, deliveries=(replace(first, ingress=ingress), *route.deliveries[1:]))


def pulled_from_a_node_that_has_nothing(route: Route) -> Route:
    first = route.deliveries[0]
    blocks = len(route.senders) // route.num_network
    near = Delivery(first.node, first.members, (), (0,) * blocks, (-1,) * len(first.members))
    senders = route.senders[: blocks * (route.num_network - 1)]
    return Route(senders, (near, *route.deliveries[1:]), route.num_network - 1)


def on_another_node(route: Route) -> Route:
    first = route.deliveries[0]
    return replace(route, deliveries=(replace(first, node=77), *route.deliveries[1:]))


def with_a_node_served_in_two_deliveries(route: Route) -> Route:
    first, *others = route.deliveries
    blocks = len(route.senders) // route.num_network
    parts = [
        Delivery(first.node, members, (members[0],) * blocks)
        for members in (first.members[:1], first.members[1:])
    ]
    return Route(
        (0,) * (blocks * (route.num_network + 1)), (*parts, *others), route.num_network + 1
    )


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (with_a_node_served_in_two_deliveries, "a node is served twice"),
        (without_last_delivery, "not each of"),
        (with_first_delivery_twice, "not each of"),
        (with_sender_that_does_not_exist, "not among the holders"),
        (with_one_sending_missing, "not one for each"),
        (with_ingress_elsewhere, "has an ingress on node"),
        (pulled_from_a_node_that_has_nothing, "said to be on node"),
        (on_another_node, "is not on node 77"),
    ],
)
def test_spoilt_route_is_refused(change: Any, words: str) -> None:
    refused(with_route(change), words)


def test_route_over_the_network_to_a_node_that_holds_the_flow_is_refused() -> None:
    near = make_plan(SOURCE, DESTINATION)  # all on one node
    number = next(i for i, s in enumerate(near.segments) if s.pairing == number_of("dense"))
    routes = list(near.routes[number])
    first = routes[0].deliveries[0]
    ingress = (first.members[0],) * len(first.near)
    delivery = Delivery(first.node, first.members, ingress)
    routes[0] = Route((0,) * len(first.near), (delivery,), 1)
    spoilt = (*near.routes[:number], tuple(routes), *near.routes[number + 1 :])
    refused(replace(near, routes=spoilt), "gets it by network")


def test_block_left_out_and_block_taken_twice_are_named() -> None:
    number = next(i for i, s in enumerate(APART.segments) if len(s.blocks) > 1)
    segment = APART.segments[number]
    for blocks, words in (
        (segment.blocks[:-1], "written by nothing on ranks [0, 1"),
        ((*segment.blocks, segment.blocks[0]), "written twice to ranks [0, 1"),
    ):
        spoilt = replace(segment, blocks=blocks)
        segments = (*APART.segments[:number], spoilt, *APART.segments[number + 1 :])
        refused(replace(APART, segments=segments), "block dense", words)


def test_block_taken_from_another_layer_is_refused() -> None:
    number = next(i for i, s in enumerate(APART.segments) if len(s.blocks) > 1)
    segment = APART.segments[number]
    first, second = segment.blocks[:2]
    swapped = (
        replace(first, source=second.source),
        replace(second, source=first.source),
        *segment.blocks[2:],
    )
    segments = (
        *APART.segments[:number],
        replace(segment, blocks=swapped),
        *APART.segments[number + 1 :],
    )
    refused(replace(APART, segments=segments), "block dense")


def test_bytes_that_are_counted_wrong_are_refused() -> None:
    traffic = replace(APART.traffic, network_in={**APART.traffic.network_in, 0: 1})
    refused(replace(APART, traffic=traffic), "network_in of ranks [0]", "their routes say")


def test_bytes_moved_from_one_sender_to_another_are_refused() -> None:
    total = sum(APART.traffic.network_out.values())
    refused(replace(APART, traffic=replace(APART.traffic, network_out={0: total})), "network_out")


def test_flow_bytes_that_are_not_those_of_the_cells_are_refused() -> None:
    pairing = APART.pairings[number_of("dense")]
    refused(with_pairing("dense", flow_bytes=pairing.flow_bytes * 2), "counted wrong")


def test_flows_that_begin_a_cell_later_are_refused() -> None:
    pairing = APART.pairings[number_of("dense")]
    refused(with_pairing("dense", start=pairing.start + 1), "in no flow or in several")


def test_boxes_that_are_numbered_otherwise_are_refused() -> None:
    pairing = APART.pairings[number_of("dense")]
    last = pairing.source.box.max()
    rows, cells = pairing.source.box.copy(), pairing.source_box.copy()
    rows[rows == last] = -1
    cells[cells == last] = -1
    refused(
        with_pairing("dense", source=replace(pairing.source, box=rows), source_box=cells),
        "not numbered from 0",
    )


def test_copy_from_a_gpu_whose_holder_does_not_exist_is_refused() -> None:
    plan = make_plan(SOURCE, DESTINATION, Placement.together(SOURCE, DESTINATION))
    number = next(i for i, s in enumerate(plan.segments) if s.pairing == number_of("dense"))
    routes = list(plan.routes[number])
    flow = next(i for i, r in enumerate(routes) if r.deliveries[0].near)
    first = routes[flow].deliveries[0]
    bent = replace(first, local=(99,) * len(first.local))
    routes[flow] = replace(routes[flow], deliveries=(bent, *routes[flow].deliveries[1:]))
    spoilt = (*plan.routes[:number], tuple(routes), *plan.routes[number + 1 :])
    refused(replace(plan, routes=spoilt), "does not exist")


def test_parameters_of_one_name_in_two_kinds_of_blocks_keep_their_own_shapes() -> None:
    blocks = (Block("a", 0), Block("b", 1))
    for a, b in ((8, 4), (4, 8)):
        kinds = {
            "a": (Parameter("layers.{layer}.w", (a, 2), "w"),),
            "b": (Parameter("layers.{layer}.w", (b, 2), "w"),),
        }
        layout = full_layout(BlockTable(blocks, kinds))
        prove_plan(make_plan(layout, layout))


WHOLE = BlockTable(
    (Block("a", 0), Block("a", 1)), {"a": (Parameter("layers.{layer}.w", (4,), "w"),)}
)


def held_by(*holders: tuple[int, ...]) -> ShardedTensor:
    """A tensor L whose shards all hold the whole of w."""
    piece = Piece("layers.{layer}.w", ((0, 4),), "L", (0,))
    return ShardedTensor("L", (4,), tuple(Shard(h, (piece,)) for h in holders))


@pytest.mark.parametrize(
    ("tensor", "stages", "places"),
    [
        (held_by((0,), (0,)), ((0,), (1,)), (0, 1)),
        (held_by((0, 0)), ((0,), (1,)), (0, 1)),
        (held_by((0, 1)), ((0, 0), (1, 2)), (0, 1)),
        (held_by((0,)), ((0,), (0,)), (0, 1)),  # one rank in two stages, with one name in both
        (held_by((0,)), ((0,),), (0, 0)),
    ],
    ids=["two shards", "holder twice", "rank twice in a stage", "two stages", "two blocks"],
)
def test_layout_with_a_tensor_twice_on_a_rank_is_refused(
    tensor: ShardedTensor, stages: tuple[tuple[int, ...], ...], places: tuple[int, int]
) -> None:
    sites = tuple(Site(number, stage, 0, number) for number, stage in enumerate(places))
    layout = Layout("twice", WHOLE, (BlockLayout("a", (tensor,)),), sites, stages)
    with pytest.raises(LayoutError, match="twice"):
        make_plan(full_layout(WHOLE), layout)


@pytest.mark.parametrize(("block", "template"), [("a", "b"), ("b", "a")])
def test_block_that_is_laid_out_as_one_of_another_kind_is_refused(
    block: str, template: str
) -> None:
    parameters = (Parameter("layers.{layer}.w", (4,), "w"),)
    table = BlockTable((Block(block, 0),), {"a": parameters, "b": parameters})
    held = BlockLayout(template, (held_by((0,)),))
    layout = Layout("mixed", table, (held,), (Site(0, 0, 0, 0),), ((0,),))
    with pytest.raises(LayoutError, match=f"a {block} block is laid out as {template}"):
        make_plan(full_layout(table), layout)


def test_boxes_turned_inside_out_are_refused() -> None:
    pairing = APART.pairings[number_of("embedding")]
    side = replace(pairing.destination, shard=pairing.destination.shard * 0 - 1)
    refused(
        with_pairing("embedding", low=pairing.high, high=pairing.low, destination=side), "plan:"
    )


def test_pairings_blocks_and_sites_counted_from_behind_are_refused() -> None:
    segment = APART.segments[0]
    placed = segment.blocks[0]
    for spoilt in (
        replace(segment, pairing=segment.pairing - len(APART.pairings)),
        replace(segment, blocks=(replace(placed, block=-1), *segment.blocks[1:])),
        replace(segment, blocks=(replace(placed, source=(-1,)), *segment.blocks[1:])),
    ):
        refused(replace(APART, segments=(spoilt, *APART.segments[1:])), "plan:")
