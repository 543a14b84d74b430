"""The cells of a layout: what each rank holds and whose turn it is, against brute force."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from benchmarks.reshard import models
from megarl.reshard.arena import arena_layout
from megarl.reshard.cover import Cover
from megarl.reshard.layout import Layout, num_elements
from megarl.reshard.megatron import megatron_layout
from megarl.reshard.mesh import LearnerMesh, ServerMesh
from megarl.reshard.pipeline import Pipeline
from megarl.reshard.placement import Placement
from megarl.reshard.plan import make_plan, minimum_bytes, minimum_elements
from megarl.reshard.sglang import sglang_layout
from tests.reshard.models import tiny_shape

MOE, LATENT = tiny_shape("Qwen3MoeForCausalLM"), tiny_shape("DeepseekV3ForCausalLM")
TIED = tiny_shape(tie_embeddings=True, num_kv_heads=1)
LAYOUTS = {
    "experts over ranks": megatron_layout(MOE, LearnerMesh(tp=2, dp=4, ep=4)),
    "a cut head": megatron_layout(TIED, LearnerMesh(tp=4, pp=2)),
    "stages": megatron_layout(
        LATENT, LearnerMesh(tp=2, pp=2, dp=2, ep=2), forms=("local", "grouped")
    ),
    "copied heads": sglang_layout(TIED, ServerMesh(4)),
    "copied attention": sglang_layout(MOE, ServerMesh(4, ep=2, attention_dp=2)),
    "two servers": sglang_layout(LATENT, ServerMesh(2, servers=2)),
}


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_pieces_of_different_ranks_are_equal_or_disjoint(layout: Layout) -> None:
    cover, boxes = Cover(layout), Counter()
    for rank in layout.rank_ids:
        mine = cover.held(rank)
        assert sum(num_elements(p.box) for p in mine) == sum(
            num_elements(p.box) for p in layout.rank(rank).pieces
        )
        boxes.update({(piece.tensor, piece.box) for piece in mine})
    counts = {p.name: np.zeros(p.shape, np.int64) for p in layout.parameters}
    for tensor, box in boxes:
        counts[tensor][tuple(slice(*span) for span in box)] += 1
    assert all((count == 1).all() for count in counts.values())


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_copies_take_turns(layout: Layout) -> None:
    cover = Cover(layout)
    shares = [sum(num_elements(p.box) for p in cover.share(rank)) for rank in layout.rank_ids]
    assert sum(shares) == sum(p.num_elements for p in layout.parameters)
    assert all(set(cover.share(rank)) <= set(cover.held(rank)) for rank in layout.rank_ids)
    assert min(shares) > 0


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_ranks_that_hold_the_same_of_a_layer_take_equally_many_turns(layout: Layout) -> None:
    cover = Cover(layout)
    layers = {p.name: p.name if p.layer is None else p.layer for p in layout.parameters}
    holders: dict[tuple[object, ...], list[int]] = {}
    for rank in layout.rank_ids:
        for piece in cover.held(rank):
            holders.setdefault((piece.tensor, piece.box), []).append(rank)
    turns = {
        (layers[cell[0]], tuple(ranks)): Counter(dict.fromkeys(ranks, 0))
        for cell, ranks in holders.items()
    }
    for rank in layout.rank_ids:
        for piece in cover.share(rank):
            turns[layers[piece.tensor], tuple(holders[piece.tensor, piece.box])][rank] += 1
    assert all(max(taken.values()) - min(taken.values()) <= 1 for taken in turns.values())


def test_bytes_that_a_destination_holds_are_counted_by_kinds_of_blocks() -> None:
    layout = LAYOUTS["copied attention"]
    written = [piece for rank in layout.ranks for piece in rank.pieces]
    assert minimum_elements(layout) == sum(num_elements(piece.box) for piece in written)
    shape = tiny_shape("Glm4MoeForCausalLM")
    experts = len(shape.layer_kinds) - len(shape.moe.dense_layers)  # type: ignore[union-attr]
    biases = experts * shape.moe.num_experts * 3  # type: ignore[union-attr]
    glm = sglang_layout(shape, ServerMesh(servers=3))
    assert minimum_bytes(glm, 2) == 2 * minimum_elements(glm) + 2 * biases


def test_one_ranks_part_of_a_trillion_parameters_writes_out_no_other_rank(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Kimi-K2 from 256 learner ranks to a server of 32: seconds, and sums by the thousand."""
    shape = models.KIMI_K2
    learner = megatron_layout(
        shape, LearnerMesh(tp=8, pp=8, dp=4, ep=32), pipeline=Pipeline.uneven(61, 8, last=5)
    )
    server = sglang_layout(shape, ServerMesh(32))
    plan = make_plan(learner, server, Placement.apart(learner, server, 8))

    def everything(_: Layout) -> None:
        raise AssertionError("all ranks are written out")

    monkeypatch.setattr(Layout, "ranks", property(everything))
    rank = learner.rank(5)
    assert len(Cover(learner).share(5)) < 1000
    assert len(Cover(server).held(3)) < 2000
    assert arena_layout(rank, plan) == ({}, 0)
    assert minimum_bytes(server, 2) > 2e12
    assert len(plan.operations_to(3, ["network"])) < 100_000
