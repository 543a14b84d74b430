"""Layouts made of ranks written out, against the layouts that the ranks were written from."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.actor.parameters import Block, BlockTable, Parameter, block_table
from megarl.errors import LayoutError
from megarl.reshard.explicit import explicit_layout, full_layout, one_block
from megarl.reshard.layout import Layout, LocalTensor, Padding, Piece, RankLayout
from megarl.reshard.megatron import megatron_layout
from megarl.reshard.mesh import LearnerMesh, ServerMesh
from megarl.reshard.proof import prove_layout
from megarl.reshard.sglang import sglang_layout
from tests.reshard.models import FAMILY_FLAGS, MOE_FLAGS, tiny_shape

DENSE, MOE = sorted(FAMILY_FLAGS), sorted(MOE_FLAGS)


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    moe = draw(st.booleans())
    architecture = draw(st.sampled_from(MOE if moe else DENSE))
    tied = not moe and draw(st.booleans())
    shape = tiny_shape(architecture, num_layers=4, tie_embeddings=tied)
    size = draw(st.sampled_from([1, 2]))
    if draw(st.booleans()):
        ep = draw(st.sampled_from([1, size])) if moe else 1
        return sglang_layout(shape, ServerMesh(tp=size, ep=ep))
    pp, dp = draw(st.sampled_from([1, 2, 4])), draw(st.sampled_from([1, 2]))
    ep = draw(st.sampled_from([1, size * dp])) if moe else 1
    return megatron_layout(shape, LearnerMesh(tp=size, pp=pp, dp=dp, ep=ep), vocab_divisor=64)


def parts(rank: RankLayout) -> Counter[object]:
    return Counter([*rank.tensors, *rank.pieces, *rank.paddings])


@given(layouts())
@settings(max_examples=60)
def test_layout_made_of_its_ranks_written_out_has_the_same_ranks(layout: Layout) -> None:
    made = explicit_layout(layout.kind, layout.table, layout.ranks)
    assert made.rank_ids == layout.rank_ids
    for found, wanted in zip(made.ranks, layout.ranks, strict=True):
        assert found.rank == wanted.rank
        assert parts(found) == parts(wanted)
    prove_layout(made)


@given(layouts())
@settings(max_examples=20)
def test_writing_out_twice_changes_nothing(layout: Layout) -> None:
    once = explicit_layout("x", layout.table, layout.ranks)
    assert explicit_layout("x", layout.table, once.ranks).digest == once.digest


def test_replicas_become_one_shard() -> None:
    shape = tiny_shape(num_layers=4)
    layout = megatron_layout(shape, LearnerMesh(tp=2, dp=2))
    made = explicit_layout("x", layout.table, layout.ranks)
    for template in made.templates:
        for tensor in template.tensors:
            assert sorted(h for s in tensor.shards for h in s.holders) == [0, 1, 2, 3]
            assert len(tensor.shards) <= 2


def test_full_layout_of_a_table_is_its_parameters_under_their_names() -> None:
    table = block_table(tiny_shape("Glm4MoeForCausalLM"))
    (rank,) = full_layout(table).ranks
    assert {t.name: t.shape for t in rank.tensors} == {p.name: p.shape for p in table.parameters}
    assert parts(explicit_layout("x", table, [rank]).rank(0)) == parts(rank)
    prove_layout(full_layout(table))


TABLE = BlockTable(
    (Block("one", 0), Block("one", 1)), {"one": (Parameter("w.{layer}.x", (4,), "w"),)}
)
FIRST = Piece("w.0.x", ((0, 4),), "a", (0,))
SECOND = Piece("w.1.x", ((0, 4),), "a", (4,))


def refused(rank: RankLayout, *words: str) -> None:
    with pytest.raises(LayoutError) as caught:
        explicit_layout("mine", TABLE, [rank])
    for word in words:
        assert word in str(caught.value)


def test_tensor_with_pieces_of_two_blocks_is_refused() -> None:
    rank = RankLayout(3, (LocalTensor("a", (8,)),), (FIRST, SECOND))
    refused(rank, "mine", "rank 3", "a holds", "w.0.x", "w.1.x")


def test_tensor_with_a_piece_of_no_parameter_is_refused() -> None:
    piece = Piece("v", ((0, 4),), "a", (0,))
    refused(RankLayout(3, (LocalTensor("a", (4,)),), (piece,)), "mine", "rank 3", "'v'")


def test_piece_in_a_tensor_that_the_rank_does_not_have_is_refused() -> None:
    refused(RankLayout(3, (), (FIRST,)), "mine", "rank 3", "part in a")


def test_two_tensors_of_one_name_are_refused() -> None:
    tensors = (LocalTensor("a", (4,)), LocalTensor("b", (4,)), LocalTensor("a", (4,)))
    refused(RankLayout(3, tensors, ()), "mine", "rank 3", "2 tensors named a")


def test_ranks_that_hold_nothing_and_paddings_alone_are_kept() -> None:
    table = one_block((Parameter("w", (3, 2), "w"), Parameter("v", (1,), "v")))
    piece = Piece("w", ((0, 3), (0, 2)), "w", (0, 0))
    ranks = (
        RankLayout(5, (LocalTensor("w", (3, 2)),), (piece,)),
        RankLayout(2, (LocalTensor("w", (3, 2)),), (), (Padding("w", ((0, 3), (0, 2))),)),
        RankLayout(9, (), ()),
    )
    made = explicit_layout("x", table, ranks)
    assert made.rank_ids == (2, 5, 9)
    assert {rank.rank: parts(rank) for rank in made.ranks} == {r.rank: parts(r) for r in ranks}
