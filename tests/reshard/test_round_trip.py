"""Random policies and meshes travel file -> Megatron -> SGLang -> file, element by element."""

from __future__ import annotations

import math

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.actor.parameters import block_table
from megarl.actor.shape import ModelShape
from megarl.reshard.cover import Cover
from megarl.reshard.explicit import full_layout
from megarl.reshard.layout import Layout, local_box
from megarl.reshard.megatron import megatron_layout, megatron_rank
from megarl.reshard.mesh import LearnerMesh, ServerMesh
from megarl.reshard.plan import make_plan, minimum_elements
from megarl.reshard.sglang import sglang_layout
from tests.reshard.models import (
    FAMILY_FLAGS,
    assert_equal,
    execute,
    held,
    megatron_slices,
    numbered,
    sglang_slices,
    tiny_shape,
)

Case = tuple[ModelShape, LearnerMesh, ServerMesh, int]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """A policy, meshes that can hold it, and a vocabulary divisor; tp may exceed the kv heads."""
    kv_heads = draw(st.sampled_from([1, 2, 3, 4, 8]))
    divisors = [d for d in range(1, kv_heads + 1) if kv_heads % d == 0]
    learner_over, server_over = (draw(st.sampled_from([1, 1, 2, 4])) for _ in range(2))
    learner_tp = kv_heads * learner_over if learner_over > 1 else draw(st.sampled_from(divisors))
    server_tp = kv_heads * server_over if server_over > 1 else draw(st.sampled_from(divisors))
    pp = draw(st.integers(1, 3))
    queries = math.lcm(learner_over, server_over) * draw(st.integers(1, 3))
    shape = tiny_shape(
        draw(st.sampled_from(sorted(FAMILY_FLAGS))),
        num_layers=pp * draw(st.integers(1, 2)),
        hidden_size=draw(st.integers(1, 5)),
        num_heads=kv_heads * queries,
        num_kv_heads=kv_heads,
        head_dim=draw(st.sampled_from([2, 4, 6])),
        intermediate_size=math.lcm(learner_tp, server_tp) * draw(st.integers(1, 3)),
        vocab_size=draw(st.integers(1, 300)),
        tie_embeddings=draw(st.booleans()),
    )
    mesh = LearnerMesh(learner_tp, pp, draw(st.integers(1, 3)))
    return shape, mesh, ServerMesh(server_tp), draw(st.sampled_from([1, 8, 128]))


@settings(max_examples=25)
@given(cases())
def test_any_policy_travels_from_file_to_megatron_to_sglang_and_back(case: Case) -> None:
    shape, mesh, server, divisor = case
    tensors = numbered(shape)
    files = full_layout(block_table(shape))
    learner = megatron_layout(shape, mesh, divisor)
    rollout = sglang_layout(shape, server)

    in_megatron = execute(make_plan(files, learner), [tensors], learner)
    ranks = range(mesh.size)
    assert_equal(
        in_megatron, [megatron_slices(shape, mesh, rank, tensors, divisor) for rank in ranks]
    )
    in_sglang = execute(make_plan(learner, rollout), in_megatron, rollout)
    assert_equal(
        in_sglang, [sglang_slices(shape, server.tp, rank, tensors) for rank in range(server.tp)]
    )
    assert_equal(execute(make_plan(rollout, files), in_sglang, files), [tensors])


@settings(max_examples=25)
@given(cases())
def test_any_plan_writes_every_destination_element_exactly_once(case: Case) -> None:
    shape, mesh, server, divisor = case
    learner, rollout = megatron_layout(shape, mesh, divisor), sglang_layout(shape, server)
    plan = make_plan(learner, rollout)
    counts = held(rollout, fill=0)
    for move in plan.moves:
        box = local_box(move.box, move.dst_at)
        counts[move.dst][move.dst_local][tuple(slice(*interval) for interval in box)] += 1
    for rank, arrays in zip(rollout.ranks, counts, strict=True):
        for padding in rank.paddings:
            arrays[padding.local][tuple(slice(*interval) for interval in padding.box)] += 1
        assert all((array == 1).all() for array in arrays.values())
    assert plan.num_elements() == minimum_elements(rollout)


@settings(max_examples=20)
@given(cases())
def test_any_disjoint_cover_has_every_global_element_once(case: Case) -> None:
    shape, mesh, server, divisor = case
    for layout in (megatron_layout(shape, mesh, divisor), sglang_layout(shape, server)):
        assert_covered_once(layout)


def assert_covered_once(layout: Layout) -> None:
    counts = {p.name: np.zeros(p.shape, np.int64) for p in layout.parameters}
    cover = Cover(layout)
    for rank in layout.ranks:
        held_here = {tensor.name: tensor.shape for tensor in rank.tensors}
        for piece in cover.share(rank.rank):
            counts[piece.tensor][tuple(slice(*interval) for interval in piece.box)] += 1
            local = local_box(piece.box, piece.at)
            limits = zip(local, held_here[piece.local], strict=True)
            assert all(end <= size for (_, end), size in limits)
    assert all((count == 1).all() for count in counts.values())


@settings(max_examples=15)
@given(cases())
def test_the_same_layout_twice_keeps_every_element_on_its_rank_or_a_replica(case: Case) -> None:
    shape, mesh, _, divisor = case
    layout = megatron_layout(shape, mesh, divisor)
    plan = make_plan(layout, layout)
    for move in plan.moves:
        assert (move.src_local, move.src_at) == (move.dst_local, move.dst_at) or (
            shape.tie_embeddings and move.tensor == "model.embed_tokens.weight"
        )
    arrays = [
        megatron_slices(shape, mesh, rank, numbered(shape), divisor) for rank in range(mesh.size)
    ]
    assert_equal(execute(plan, arrays, layout), arrays)


@settings(max_examples=15)
@given(cases())
def test_one_rank_built_alone_is_the_rank_of_the_whole_layout(case: Case) -> None:
    shape, mesh, _, divisor = case
    layout = megatron_layout(shape, mesh, divisor)
    alone = tuple(megatron_rank(shape, mesh, rank, divisor) for rank in range(mesh.size))
    assert alone == layout.ranks
