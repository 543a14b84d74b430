"""Messages of a plan over several nodes: both ends list the same, and all of them together."""

from __future__ import annotations

import pytest
import torch

from megarl.errors import WeightSyncError
from megarl.reshard import execute
from megarl.reshard.engine_tensors import float32_on_server, learner_buffers
from megarl.reshard.megatron import megatron_layout
from megarl.reshard.mesh import LearnerMesh, ServerMesh
from megarl.reshard.placement import Device
from megarl.reshard.plan import Plan, make_plan
from megarl.reshard.sglang import sglang_layout
from megarl.types import ServerEndpoint
from megarl.weight_sync import packing, parcels
from megarl.weight_sync.formats import wire_format
from megarl.weight_sync.places import Place, learner_devices, placement, server_devices
from tests.reshard.models import tiny_shape
from tests.weight_sync.tiny import SHAPE

LIMIT = 4096


def plan(learner: list[str], server: list[str]) -> Plan:
    """From as many data-parallel ranks of TP 2 as there are nodes, to a server rank on each."""
    source = megatron_layout(SHAPE, LearnerMesh(tp=2, dp=len(learner) // 2), 128)
    endpoint = ServerEndpoint("s", "", len(server), 0, nodes=tuple(server))
    places = [Place(node, rank) for rank, node in enumerate(learner)]
    where = placement(learner_devices(places), server_devices(endpoint, places))
    return make_plan(source, sglang_layout(SHAPE, ServerMesh(len(server), cpu=True)), where, 4)


PLANS = {
    "apart": plan(["a"] * 2, ["b"] * 2),
    "replicas": plan(["a", "a", "b", "b"], ["b", "b", "c", "c"]),
    "across": plan(["a"] * 4, ["b", "b", "c", "c"]),
}


@pytest.mark.parametrize("name", PLANS)
def test_givers_and_takers_list_the_same_messages(name: str) -> None:
    made = PLANS[name]
    sent = {p for r in made.source.rank_ids for p in parcels.from_learner(made, r, LIMIT)}
    got = {p for r in made.destination.rank_ids for p in parcels.to_server(made, r, LIMIT)}
    assert sent == got
    assert sum(p.num_bytes for p in sent) == sum(made.traffic.network_out.values())
    inside = [parcels.inside_node(made, rank, LIMIT) for rank in made.destination.rank_ids]
    for parcel in {parcel for mine in inside for parcel in mine}:
        holders = [rank for rank, mine in enumerate(inside) if parcel in mine]
        assert [parcels.server_member(rank) for rank in holders] == sorted(
            {parcel.giver, parcel.taker}
        )
    taken = sum(p.num_bytes for rank, mine in enumerate(inside) for p in mine
                if p.taker == parcels.server_member(rank))  # fmt: skip
    assert taken == sum(made.traffic.fanout_in.values()) > 0


@pytest.mark.parametrize("name", PLANS)
def test_members_are_those_that_give_or_take_a_message(name: str) -> None:
    made = PLANS[name]
    found = {p for r in made.destination.rank_ids for p in parcels.to_server(made, r, LIMIT)}
    found |= {p for r in made.destination.rank_ids for p in parcels.inside_node(made, r, LIMIT)}
    assert set(parcels.members(made)) == {p.giver for p in found} | {p.taker for p in found}
    assert list(parcels.members(made)) == sorted(parcels.members(made), key=lambda m: m[0] != "l")


def test_plan_on_one_node_has_no_members() -> None:
    assert parcels.members(plan(["a", "a"], ["a"])) == ()


def test_box_that_lies_whole_in_memory_is_received_where_it_belongs() -> None:
    made = PLANS["apart"]
    tensors = {t.name: torch.zeros(t.shape) for t in made.destination.ranks[0].tensors}
    found = parcels.to_server(made, 0, 1)  # one box a message
    direct = 0
    wire = wire_format("fp32", made.destination)
    for transfer in packing.incoming(found, tensors, wire):
        buffer = transfer.buffer().view(torch.float32)
        buffer.fill_(1.0)
        direct += any(t.data_ptr() <= buffer.data_ptr() < t.data_ptr() + t.numel() * 4
                      for t in tensors.values())  # fmt: skip
        transfer.done(buffer)
    assert direct > len(found) // 2
    written = sum(int(tensor.sum()) for tensor in tensors.values())
    assert written * 4 == sum(parcel.num_bytes for parcel in found)


@pytest.mark.parametrize("limit", [1, 1 << 10, 1 << 20])
def test_message_with_wide_and_narrow_elements_arrives_whole(limit: int) -> None:
    """A bfloat16 policy: the expert bias travels as float32, a router is widened on arrival."""
    shape = tiny_shape("Glm4MoeForCausalLM")
    source, destination = megatron_layout(shape, LearnerMesh()), sglang_layout(shape, ServerMesh())
    devices = [[Device(node, 0)] for node in range(2)]
    made = make_plan(source, destination, placement(*devices), 2)
    wire, wide = wire_format("bf16", source), float32_on_server(shape, destination, 0)
    given = {
        tensor.name: torch.randn(tensor.shape).to(
            torch.float32 if tensor.name in learner_buffers(shape, source, 0) else torch.bfloat16
        )
        for tensor in source.ranks[0].tensors
    }
    taken = {
        tensor.name: torch.zeros(
            tensor.shape, dtype=torch.float32 if tensor.name in wide else torch.bfloat16
        )
        for tensor in destination.ranks[0].tensors
    }
    sent = packing.outgoing(parcels.from_learner(made, 0, limit), given, wire)
    got = packing.incoming(parcels.to_server(made, 0, limit), taken, wire)
    total = 0
    for giving, taking in zip(sent, got, strict=True):
        buffer = taking.buffer()
        buffer.copy_(giving.buffer())
        taking.done(buffer)
        total += buffer.nbytes
    assert total == sum(made.traffic.network_out.values())
    for move in made.moves:
        written, read = execute.written(move, taken), execute.read(move, given)
        assert torch.equal(written.float(), read.float()), move


def test_servers_apart_in_the_same_way_share_a_plan_whatever_their_nodes_are_called() -> None:
    places = [Place("a", 0), Place("b", 0)]
    one, other, beside = (
        server_devices(ServerEndpoint("s", "", 2, 0, nodes=nodes, gpus=(0, 1)), places)
        for nodes in (("x", "y"), ("p", "q"), ("x", "b"))
    )
    assert one == other == (Device(2, 0), Device(3, 1))
    assert beside == (Device(2, 0), Device(1, 1))


def test_server_that_does_not_say_where_it_is_stands_beside_learner_rank_0() -> None:
    (device,) = server_devices(ServerEndpoint("s", "", 1, 0), [Place("b", 0), Place("a", 0)])
    assert device.node == 0 and device.gpu > 1000


def test_server_with_another_number_of_nodes_than_ranks_is_refused() -> None:
    with pytest.raises(WeightSyncError, match="s: 1 nodes and 2 GPUs for tp=2"):
        server_devices(ServerEndpoint("s", "", 2, 0, nodes=("x",)), [Place("a", 0)])
