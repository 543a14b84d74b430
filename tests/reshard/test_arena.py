"""Offsets in a source rank's shared memory file."""

from __future__ import annotations

import math

from megarl.reshard.arena import ALIGNMENT_BYTES, arena_layout
from megarl.reshard.megatron import megatron_layout
from megarl.reshard.mesh import LearnerMesh, ServerMesh
from megarl.reshard.plan import make_plan
from megarl.reshard.sglang import sglang_layout
from tests.reshard.models import tiny_shape

SOURCE = megatron_layout(tiny_shape(), LearnerMesh(tp=2, dp=2))
PLAN = make_plan(SOURCE, sglang_layout(tiny_shape(), ServerMesh(2)))


def test_arena_holds_what_the_plan_reads_and_no_more() -> None:
    for rank in SOURCE.ranks:
        offsets, _ = arena_layout(rank, PLAN, itemsize=2)
        assert set(offsets) == {move.src_local for move in PLAN.sends(rank.rank)}


def test_tensors_in_an_arena_are_aligned_and_do_not_overlap() -> None:
    for rank in SOURCE.ranks:
        sizes = {tensor.name: 4 * math.prod(tensor.shape) for tensor in rank.tensors}
        offsets, total = arena_layout(rank, PLAN, itemsize=4)
        end = 0
        for name, offset in sorted(offsets.items(), key=lambda item: item[1]):
            assert offset % ALIGNMENT_BYTES == 0 and offset >= end
            end = offset + sizes[name]
        assert end <= total < end + ALIGNMENT_BYTES


def test_rank_that_sends_nothing_has_an_empty_arena() -> None:
    many = megatron_layout(tiny_shape(), LearnerMesh(dp=64))
    plan = make_plan(many, sglang_layout(tiny_shape(), ServerMesh(1)))
    idle = next(rank for rank in many.ranks if not plan.sends(rank.rank))
    assert arena_layout(idle, plan, itemsize=4) == ({}, 0)
