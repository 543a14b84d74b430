"""Messages of a plan over several nodes: both ends list the same, and all of them together."""

from __future__ import annotations

import pytest
import torch

from megarl.errors import WeightSyncError
from megarl.reshard.megatron import megatron_layout
from megarl.reshard.mesh import LearnerMesh, ServerMesh
from megarl.reshard.placement import Device
from megarl.reshard.plan import Plan, make_plan
from megarl.reshard.sglang import sglang_layout
from megarl.types import ServerEndpoint
from megarl.weight_sync import packing, parcels
from megarl.weight_sync.places import Place, learner_devices, placement, server_devices
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
    assert sum(p.num_elements for p in sent) * 4 == sum(made.traffic.network_out.values())
    inside = [parcels.inside_node(made, rank, LIMIT) for rank in made.destination.rank_ids]
    for parcel in {parcel for mine in inside for parcel in mine}:
        holders = [rank for rank, mine in enumerate(inside) if parcel in mine]
        assert [parcels.server_member(rank) for rank in holders] == sorted(
            {parcel.giver, parcel.taker}
        )
    taken = sum(p.num_elements for rank, mine in enumerate(inside) for p in mine
                if p.taker == parcels.server_member(rank))  # fmt: skip
    assert taken * 4 == sum(made.traffic.fanout_in.values()) > 0


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
    for transfer in packing.incoming(found, tensors, torch.float32):
        buffer = transfer.buffer()
        buffer.fill_(1.0)
        direct += any(t.data_ptr() <= buffer.data_ptr() < t.data_ptr() + t.numel() * 4
                      for t in tensors.values())  # fmt: skip
        transfer.done(buffer)
    assert direct > len(found) // 2
    written = sum(int(tensor.sum()) for tensor in tensors.values())
    assert written == sum(parcel.num_elements for parcel in found)


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
