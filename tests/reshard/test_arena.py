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
        offsets, _ = arena_layout(rank, PLAN)
        assert set(offsets) == {move.src_local for move in PLAN.sends(rank.rank)}


def test_tensors_in_an_arena_are_aligned_and_do_not_overlap() -> None:
    for rank in SOURCE.ranks:
        sizes = {tensor.name: 2 * math.prod(tensor.shape) for tensor in rank.tensors}
        slots, total = arena_layout(rank, PLAN)
        end = 0
        for name, slot in sorted(slots.items(), key=lambda item: item[1].offset):
            assert slot.offset % ALIGNMENT_BYTES == 0 and slot.offset >= end
            end = slot.offset + sizes[name]
        assert end <= total < end + ALIGNMENT_BYTES


def test_rank_that_sends_nothing_has_an_empty_arena() -> None:
    many = megatron_layout(tiny_shape(), LearnerMesh(dp=64))
    plan = make_plan(many, sglang_layout(tiny_shape(), ServerMesh(1)))
    idle = next(rank for rank in many.ranks if not plan.sends(rank.rank))
    assert arena_layout(idle, plan) == ({}, 0)


def test_what_is_float32_whatever_the_policy_is_has_four_bytes() -> None:
    source = megatron_layout(tiny_shape("DeepseekV3ForCausalLM"), LearnerMesh())
    plan = make_plan(source, sglang_layout(tiny_shape("DeepseekV3ForCausalLM"), ServerMesh()))
    slots, _ = arena_layout(source.rank(0), plan)
    bias = "decoder.layers.1.mlp.router.expert_bias"
    assert {name for name, slot in slots.items() if slot.precision == "float32"} == {bias}
    after = min(slot.offset for slot in slots.values() if slot.offset > slots[bias].offset)
    assert after - slots[bias].offset >= 4 * math.prod(slots[bias].shape)
