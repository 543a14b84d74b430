"""Plans written and read back, and plans made before."""

from __future__ import annotations

import json

import pytest

from megarl.errors import LayoutError
from megarl.reshard.megatron import megatron_layout
from megarl.reshard.mesh import LearnerMesh, ServerMesh
from megarl.reshard.placement import Placement
from megarl.reshard.plan import Plan, make_plan
from megarl.reshard.sglang import sglang_layout
from megarl.reshard.store import cached_plan, from_json, to_json
from tests.reshard.models import tiny_shape

SOURCE = megatron_layout(tiny_shape(num_layers=4), LearnerMesh(tp=2, pp=2, dp=2))
DESTINATION = sglang_layout(tiny_shape(num_layers=4), ServerMesh(4, servers=2))


def plan() -> Plan:
    return make_plan(SOURCE, DESTINATION, Placement.apart(SOURCE, DESTINATION, 4))


def test_plan_read_back_is_the_plan_that_was_written() -> None:
    written = plan()
    read = from_json(to_json(written))
    assert read.digest == written.digest
    assert read.moves == written.moves
    assert read.traffic == written.traffic
    assert [read.sends(rank) for rank in range(8)] == [written.sends(rank) for rank in range(8)]


def test_text_of_a_plan_is_the_same_each_time() -> None:
    assert to_json(plan()) == to_json(plan())


@pytest.mark.parametrize(
    "text", ["", "{}", "[]", '{"planner": 1}', '{"planner": "megarl planner 1"}']
)
def test_text_that_is_no_plan_is_refused(text: str) -> None:
    with pytest.raises(LayoutError):
        from_json(text)


def test_plan_that_was_changed_is_refused() -> None:
    body = json.loads(to_json(plan()))
    placed = next(o for o in body["objects"] if o[0] == "Device")
    placed[1] += 1
    with pytest.raises(LayoutError, match=r"changed|no plan"):
        from_json(json.dumps(body))


def test_class_that_is_not_of_a_plan_is_refused() -> None:
    body = json.loads(to_json(plan()))
    body["objects"][0][0] = "Popen"
    with pytest.raises(LayoutError, match="no plan"):
        from_json(json.dumps(body))


def test_same_layouts_and_placement_are_planned_once() -> None:
    again = megatron_layout(tiny_shape(num_layers=4), LearnerMesh(tp=2, pp=2, dp=2))
    first = cached_plan(SOURCE, DESTINATION)
    assert cached_plan(again, DESTINATION) is first
    assert cached_plan(SOURCE, DESTINATION, policy_bytes=4) is not first
    apart = Placement.apart(SOURCE, DESTINATION, 4)
    assert cached_plan(SOURCE, DESTINATION, apart) is not first


def test_text_that_lost_a_part_is_refused_by_a_sentence() -> None:
    body = json.loads(to_json(plan()))
    pieces = next(o for o in body["objects"] if o[0] == "Pieces")
    pieces[-1] = pieces[-1][:-1]
    with pytest.raises(LayoutError, match=r"changed|no plan"):
        from_json(json.dumps(body))
