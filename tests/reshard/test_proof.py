"""A sabotaged plan is refused, and the error names the tensor, the interval and the ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from megarl.actor.parameters import Parameter
from megarl.errors import LayoutError
from megarl.reshard.explicit import explicit_layout, one_block
from megarl.reshard.layout import Layout, LocalTensor, Padding, Piece, RankLayout
from megarl.reshard.megatron import megatron_layout
from megarl.reshard.mesh import LearnerMesh, ServerMesh
from megarl.reshard.plan import Move, make_plan, prove_moves
from megarl.reshard.proof import prove_layout
from megarl.reshard.sglang import sglang_layout
from tests.reshard.models import tiny_shape

SHAPE = tiny_shape()
SOURCE = megatron_layout(SHAPE, LearnerMesh(tp=2, pp=2))
DESTINATION = sglang_layout(SHAPE, ServerMesh(2))
MOVES = make_plan(SOURCE, DESTINATION).moves
VICTIM = next(
    i for i, move in enumerate(MOVES) if move.tensor == "model.layers.1.self_attn.k_proj.weight"
)


def refused(moves: tuple[Move, ...], *words: str) -> None:
    with pytest.raises(LayoutError) as caught:
        prove_moves(moves, SOURCE, DESTINATION)
    for word in words:
        assert word in str(caught.value)


def changed(index: int, **changes: object) -> tuple[Move, ...]:
    move = replace(MOVES[index], **changes)  # type: ignore[arg-type]
    return (*MOVES[:index], move, *MOVES[index + 1 :])


def test_untouched_plan_is_proved() -> None:
    prove_moves(MOVES, SOURCE, DESTINATION)


def test_order_of_moves_does_not_matter() -> None:
    prove_moves(MOVES[::-1], SOURCE, DESTINATION)


@pytest.mark.parametrize("index", range(len(MOVES)))
def test_any_dropped_move_is_named(index: int) -> None:
    move = MOVES[index]
    words = (move.tensor, move.dst_local, f"rank {move.dst}", "written by nothing")
    refused(MOVES[:index] + MOVES[index + 1 :], *words)


@pytest.mark.parametrize("index", range(len(MOVES)))
def test_any_doubled_move_is_named(index: int) -> None:
    move = MOVES[index]
    refused((*MOVES, move), move.tensor, move.dst_local, "written 2 times")


def test_swapped_key_and_value_are_refused() -> None:
    key = MOVES[VICTIM]
    value = next(
        m for m in MOVES if m.dst == key.dst and m.tensor == key.tensor.replace("k_proj", "v_proj")
    )
    moves = tuple(
        replace(m, dst_at=value.dst_at)
        if m == key
        else replace(m, dst_at=key.dst_at)
        if m == value
        else m
        for m in MOVES
    )
    refused(moves, "k_proj", "writes", key.dst_local)


def test_read_from_rank_that_does_not_hold_the_tensor_is_refused() -> None:
    move = MOVES[VICTIM]
    refused(changed(VICTIM, src=0), move.tensor, "rank 0", "reads", move.src_local)


def test_read_of_other_rows_is_refused() -> None:
    move = MOVES[VICTIM]
    at = (move.src_at[0] + 1, *move.src_at[1:])
    refused(changed(VICTIM, src_at=at), move.tensor, "reads")


def test_layers_counted_per_stage_are_not_mixed_up() -> None:
    # Two stages both have a local layer 0: one sends the other's.
    move = MOVES[VICTIM]
    other = move.tensor.replace("layers.1", "layers.0")
    refused(changed(VICTIM, tensor=other), other, "rank")


def test_overlapping_moves_are_named_with_their_interval() -> None:
    move = MOVES[VICTIM]
    (start, end), columns = move.box
    half = (start + end) // 2
    part = replace(move, box=((start, half), columns))
    first = move.dst_at[0]
    refused((*MOVES, part), f"[{first}:{first + half - start}, 0:8]", "written 2 times")


def test_move_into_padding_is_refused() -> None:
    index = next(i for i, m in enumerate(MOVES) if m.tensor == "lm_head.weight" and m.dst == 1)
    move = MOVES[index]
    rows = move.box[0][1] - move.box[0][0]
    refused(changed(index, dst_at=(rows, 0)), "lm_head.weight", "writes")


def prove_in_moves(layout: Layout) -> None:
    prove_moves((), layout, layout)


both_proofs = pytest.mark.parametrize("prove", [prove_layout, prove_in_moves])
Prove = Callable[[Layout], None]


@both_proofs
def test_layout_that_holds_elements_twice_in_one_place_is_refused(prove: Prove) -> None:
    parameter = Parameter("w", (4,), "final_norm")
    pieces = (Piece("w", ((0, 3),), "x", (0,)), Piece("w", ((1, 4),), "x", (1,)))
    rank = RankLayout(0, (LocalTensor("x", (4,)),), pieces)
    layout = explicit_layout("bent", one_block((parameter,)), (rank,))
    with pytest.raises(LayoutError, match=r"bent: rank 0: x \[1:3\] is written 2 times"):
        prove(layout)


@both_proofs
def test_layout_whose_padding_leaves_a_gap_is_refused(prove: Prove) -> None:
    parameter = Parameter("w", (4,), "final_norm")
    rank = RankLayout(
        0,
        (LocalTensor("x", (8,)),),
        (Piece("w", ((0, 4),), "x", (0,)),),
        (Padding("x", ((5, 8),)),),
    )
    with pytest.raises(LayoutError, match=r"x \[4:5\]"):
        prove(explicit_layout("holed", one_block((parameter,)), (rank,)))


@both_proofs
def test_layout_piece_beyond_its_parameter_is_refused(prove: Prove) -> None:
    parameter = Parameter("w", (4,), "final_norm")
    pieces = (Piece("w", ((2, 6),), "x", (0,)),)
    rank = RankLayout(0, (LocalTensor("x", (4,)),), pieces)
    with pytest.raises(LayoutError, match=r"\[2:6\] of w"):
        prove(explicit_layout("long", one_block((parameter,)), (rank,)))


def test_part_that_no_source_rank_holds_is_named_when_planning() -> None:
    lame = explicit_layout("lame", SOURCE.table, SOURCE.ranks[:3])
    with pytest.raises(LayoutError, match=r"ranks \[.*written by nothing"):
        make_plan(lame, DESTINATION)
