"""Which node and GPU each rank is on, where nobody says."""

from __future__ import annotations

import pytest

from megarl.reshard.megatron import megatron_layout
from megarl.reshard.mesh import LearnerMesh, ServerMesh
from megarl.reshard.placement import Placement
from megarl.reshard.sglang import sglang_layout
from tests.reshard.models import tiny_shape

LEARNER = megatron_layout(tiny_shape(), LearnerMesh(tp=2, dp=3))
SERVERS = sglang_layout(tiny_shape(), ServerMesh(2, servers=2))


@pytest.mark.parametrize(("per_node", "nodes"), [(1, 6), (2, 3), (4, 2), (6, 1), (8, 1)])
def test_servers_that_are_apart_begin_on_the_node_after_the_learners_last(
    per_node: int, nodes: int
) -> None:
    made = Placement.apart(LEARNER, SERVERS, per_node)
    assert {device.node for device in made.source.values()} == set(range(nodes))
    assert min(device.node for device in made.destination.values()) == nodes
    assert not made.shares_nodes
    devices = [*made.source.values(), *made.destination.values()]
    assert len(set(devices)) == len(devices) == 10
    assert max(device.gpu for device in devices) < per_node
