"""What a simulation reports and needs of memory, and that its arrays stay as they are."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable

import pytest

from megarl.errors import LayoutError
from megarl.reshard.explicit import full_layout
from megarl.reshard.layout import num_elements
from megarl.reshard.megatron import megatron_layout
from megarl.reshard.mesh import LearnerMesh, ServerMesh
from megarl.reshard.placement import Placement
from megarl.reshard.plan import make_plan
from megarl.reshard.sglang import sglang_layout
from megarl.reshard.simulate import Arrays, check, expected, needed_bytes, number
from tests.reshard.models import tiny_shape

SHAPE = tiny_shape(vocab_size=10)  # servers pad it
LEARNER = megatron_layout(SHAPE, LearnerMesh(tp=2))
SERVERS = sglang_layout(SHAPE, ServerMesh(4))


def test_report_counts_what_was_written_what_was_zeroed_and_the_moves_by_link() -> None:
    plan = make_plan(LEARNER, SERVERS, Placement.apart(LEARNER, SERVERS))
    report = check(plan)
    held = [tensor for rank in SERVERS.ranks for tensor in rank.tensors]
    paddings = [padding for rank in SERVERS.ranks for padding in rank.paddings]
    num_padding = sum(num_elements(padding.box) for padding in paddings)
    assert (report.num_ranks, report.num_tensors) == (4, len(held))
    assert report.num_padding == num_padding > 0
    assert report.num_elements == sum(math.prod(tensor.shape) for tensor in held) - num_padding
    assert report.num_moves == Counter(move.link for move in plan.moves)
    assert set(report.num_moves) == {"network", "fanout"}


def test_memory_of_a_simulation_is_that_of_its_arrays() -> None:
    whole = full_layout(LEARNER.table)
    count = sum(parameter.num_elements for parameter in whole.parameters)
    assert needed_bytes(make_plan(whole, whole)) == (8 + 8 + 9) * count
    two = sglang_layout(SHAPE, ServerMesh(1, servers=2))  # the second is a replica of the first
    held = sum(math.prod(tensor.shape) for tensor in two.rank(0).tensors)
    assert needed_bytes(make_plan(whole, two)) == 8 * count + (8 + 2 * 9) * held


@pytest.mark.parametrize("make", [number, expected])
def test_layout_is_numbered_where_its_numbers_just_fit(make: Callable[..., Arrays]) -> None:
    whole = full_layout(LEARNER.table)
    limit = 8 * sum(parameter.num_elements for parameter in whole.parameters)
    assert make(whole, limit_bytes=limit)
    with pytest.raises(LayoutError, match=f"needs {limit:,} bytes of memory, more than the limit"):
        make(whole, limit_bytes=limit - 1)


def test_arrays_that_replicas_share_cannot_be_written() -> None:
    for arrays in (number(LEARNER), expected(SERVERS)):
        for array in arrays[0].values():
            with pytest.raises(ValueError, match="read-only"):
                array[...] = 0
