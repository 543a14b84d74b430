"""Megatron's layout by itself: what every rank holds against plain slices, and its refusals."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.actor.shape import ModelShape
from megarl.errors import LayoutError
from megarl.reshard.layout import Box, Layout, local_box
from megarl.reshard.megatron import (
    UNSUPPORTED,
    check_supported,
    megatron_layout,
    megatron_rank,
    padded_vocab_size,
)
from megarl.reshard.mesh import LearnerMesh
from megarl.reshard.pipeline import Pipeline
from tests.reshard.learner_slices import Arrays
from tests.reshard.megatron_oracle import Oracle
from tests.reshard.models import TINY_EXPERTS, numbered, tiny_shape
from tests.reshard.strategies import DENSE, MOE, SHARED, Side, learners, shapes


@dataclass(frozen=True)
class Drawn:
    """A policy and a layout of it with its plain slices."""

    shape: ModelShape
    side: Side


@st.composite
def drawn(draw: st.DrawFn) -> Drawn:
    """Any family on any mesh, even, uneven or written out; MTP layers where the family has them."""
    architecture = draw(st.sampled_from([*DENSE, *MOE]))
    learner = draw(learners(architecture in MOE))
    mtp = architecture in SHARED and draw(st.booleans())
    shape = draw(shapes(architecture, [learner], draw(st.booleans()), mtp))
    return Drawn(shape, learner.side(shape))


def index(box: Box) -> tuple[slice, ...]:
    return tuple(slice(*span) for span in box)


@settings(max_examples=150)
@given(drawn())
def test_pieces_and_paddings_of_every_shard_tile_its_local_tensor(case: Drawn) -> None:
    for template in case.side.layout.templates:
        for tensor in template.tensors:
            positions = [i for shard in tensor.shards for i in shard.holders]
            assert sorted(positions) == sorted(set(positions)), tensor.name
            for shard in tensor.shards:
                counts = np.zeros(tensor.shape, np.int64)
                for piece in shard.pieces:
                    local = local_box(piece.box, piece.at)
                    assert all(end <= n for (_, end), n in zip(local, tensor.shape, strict=True))
                    counts[index(local)] += 1
                for padding in shard.paddings:
                    counts[index(padding.box)] += 1
                assert (counts == 1).all(), tensor.name


@settings(max_examples=150)
@given(drawn())
def test_every_rank_holds_its_plain_slices_and_all_ranks_hold_every_element(case: Drawn) -> None:
    tensors, layout = numbered(case.shape), case.side.layout
    seen = {name: np.zeros(array.shape, bool) for name, array in tensors.items()}
    wanted = case.side.reference(tensors)
    for rank in layout.ranks:
        found: Arrays = {t.name: np.full(t.shape, -1, np.int64) for t in rank.tensors}
        assert len(found) == len(rank.tensors)
        for piece in rank.pieces:
            values = tensors[piece.tensor][index(piece.box)]
            into = found[piece.local][index(local_box(piece.box, piece.at))]
            into[...] = values.reshape(into.shape)
            seen[piece.tensor][index(piece.box)] = True
        for padding in rank.paddings:
            found[padding.local][index(padding.box)] = 0
        theirs = wanted[rank.rank]
        assert found.keys() == theirs.keys()
        for name, array in theirs.items():
            np.testing.assert_array_equal(found[name], array, err_msg=f"{rank.rank} {name}")
    assert all(array.all() for array in seen.values())


@settings(max_examples=60)
@given(drawn(), st.sampled_from([2, 3]))
def test_more_data_parallel_ranks_are_more_replicas_of_the_same(case: Drawn, times: int) -> None:
    """Rank r of a stage holds what rank r modulo the stage's former size held."""
    layout = case.side.layout
    mesh = case.side.mesh.mesh  # type: ignore[attr-defined]
    learner = replace(case.side.mesh, mesh=replace(mesh, dp=mesh.dp * times))  # type: ignore[type-var]
    more = learner.side(case.shape).layout  # type: ignore[attr-defined]
    for p, stage in enumerate(layout.stages):
        for position, rank in enumerate(more.stages[p]):
            theirs = more.rank(rank)
            mine = layout.rank(stage[position % mesh.stage_size])
            assert (mine.tensors, mine.pieces) == (theirs.tensors, theirs.pieces)


def locals_of(layout: Layout, tensor: str) -> list[tuple[int, str]]:
    """(rank, local name) of every holder of a parameter."""
    return [
        (rank.rank, piece.local)
        for rank in layout.ranks
        for piece in rank.pieces
        if piece.tensor == tensor
    ]


EMBEDDING = "model.embed_tokens.weight"
INPUT, OUTPUT = "embedding.word_embeddings.weight", "output_layer.weight"


def glm(num_layers: int = 4, **changes: object) -> ModelShape:
    return tiny_shape("Glm4MoeForCausalLM", num_layers=num_layers, num_mtp_layers=1, **changes)


def test_tied_embedding_has_a_second_holder_on_the_last_stage_only() -> None:
    tied = tiny_shape(tie_embeddings=True)
    assert locals_of(megatron_layout(tied, LearnerMesh()), EMBEDDING) == [(0, INPUT)]
    two = megatron_layout(tied, LearnerMesh(pp=2))
    assert locals_of(two, EMBEDDING) == [(0, INPUT), (1, OUTPUT)]


@pytest.mark.parametrize(
    ("written", "tied", "holders"),
    [
        ("Ett|ttmL", False, [(0, INPUT), (1, INPUT)]),
        ("Ett|ttmL", True, [(0, INPUT), (1, INPUT)]),
        ("Ett|tt|m|L", False, [(0, INPUT), (2, INPUT)]),
        ("Ett|tt|m|L", True, [(0, INPUT), (2, INPUT), (3, OUTPUT)]),
        ("EttttmL", True, [(0, INPUT)]),
    ],
)
def test_mtp_layers_bring_a_copy_of_the_embedding_to_their_stage(
    written: str, tied: bool, holders: list[tuple[int, str]]
) -> None:
    pp = written.count("|") + 1
    pipeline = Pipeline.from_layout(written, pp)
    layout = megatron_layout(glm(tie_embeddings=tied), LearnerMesh(pp=pp), 8, pipeline)
    assert locals_of(layout, EMBEDDING) == holders
    (home,) = {rank for rank, _ in locals_of(layout, "model.layers.4.eh_proj.weight")}
    assert home == written[: written.index("m")].count("|")
    (norm,) = {rank for rank, _ in locals_of(layout, "model.norm.weight")}
    assert norm == written[: written.rindex("t")].count("|")


def test_mtp_layers_are_in_the_last_chunk_of_their_stage() -> None:
    pipeline = Pipeline.from_layout("Et|t|t|tmL", 2)
    layout = megatron_layout(glm(), LearnerMesh(pp=2, vpp=2), 8, pipeline)
    assert locals_of(layout, EMBEDDING) == [(0, f"model0.{INPUT}"), (1, f"model1.{INPUT}")]
    names = {t.name for t in layout.rank(1).tensors}
    assert "model1.mtp.layers.0.mtp_model_layer.mlp.router.weight" in names
    assert locals_of(layout, "lm_head.weight") == [(1, f"model1.{OUTPUT}")]


def test_chunks_number_their_layers_from_zero_behind_the_chunks_name() -> None:
    layout = megatron_layout(tiny_shape(num_layers=4), LearnerMesh(pp=2, vpp=2))
    norms = [locals_of(layout, f"model.layers.{i}.input_layernorm.weight") for i in range(4)]
    name = "decoder.layers.0.self_attention.linear_qkv.layer_norm_weight"
    assert norms == [[(i % 2, f"model{i // 2}.{name}")] for i in range(4)]


def test_stages_number_their_layers_from_zero() -> None:
    layout = megatron_layout(tiny_shape(num_layers=4), LearnerMesh(pp=2))
    second = {p.local: p.tensor for p in layout.ranks[1].pieces}
    assert second["decoder.layers.0.mlp.linear_fc2.weight"] == "model.layers.2.mlp.down_proj.weight"


def test_rank_above_the_kv_heads_holds_a_part_of_a_head() -> None:
    # One group of 4 query heads, a key and a value, 4 rows each, over 4 ranks of 6 rows.
    rank = megatron_rank(tiny_shape(num_kv_heads=1), LearnerMesh(tp=4), 2)
    fused = [
        (piece.tensor.split(".")[4], piece.box[0], piece.at[0])
        for piece in rank.pieces
        if piece.local == "decoder.layers.0.self_attention.linear_qkv.weight"
    ]
    assert fused == [("q_proj", (12, 16), 0), ("k_proj", (0, 2), 4)]


def test_vocabulary_is_padded_to_a_multiple_of_divisor_times_tp() -> None:
    assert padded_vocab_size(151936, tp=8) == 152576
    assert padded_vocab_size(128, tp=1) == 128
    rank = megatron_rank(tiny_shape(vocab_size=100), LearnerMesh(tp=2), 1)
    paddings = {padding.local: padding.box for padding in rank.paddings}
    assert paddings["output_layer.weight"] == ((0, 128), (0, 8))


def test_routed_experts_are_cut_over_their_own_axes() -> None:
    """4 experts over ep=2, each over etp=2; attention over tp=4; experts have no replicas."""
    shape = tiny_shape("Qwen3MoeForCausalLM", num_kv_heads=4)
    layout = megatron_layout(shape, LearnerMesh(tp=4, ep=2, etp=2), 8)
    held = [
        (piece.box[0][0], piece.box[1], piece.at)
        for piece in layout.rank(3).pieces
        if piece.local == "decoder.layers.0.mlp.experts.linear_fc1.weight1"
    ]
    assert held == [(3, (4, 8), (0, 0)), (3, (4, 8), (4, 0))]  # gate and up, their second half


def test_kind_names_the_whole_mesh() -> None:
    layout = megatron_layout(tiny_shape(num_layers=4), LearnerMesh(2, 2, 3, cp=1, ep=1, vpp=2), 64)
    assert layout.kind == (
        "megatron tp=2 pp=2 vpp=2 cp=1 dp=3 ep=1 etp=1 vocab_divisor=64 forms=te+per_expert"
    )


ODD = replace(TINY_EXPERTS, expert_intermediate_size=9, shared_intermediate_size=18)


@pytest.mark.parametrize(
    ("shape", "mesh", "words"),
    [
        (
            tiny_shape(),
            LearnerMesh(pp=3),
            r"2 layers .* learner.parallel.pp=3; use a pp that divides 2",
        ),
        (tiny_shape(), LearnerMesh(tp=3), r"4 attention heads .* learner.parallel.tp=3"),
        (tiny_shape(intermediate_size=18), LearnerMesh(tp=4), r"18 rows of the gate"),
        (
            tiny_shape(num_heads=12, num_kv_heads=4, intermediate_size=48),
            LearnerMesh(tp=6),
            r"4 kv heads .*, or a multiple of it",
        ),
        (tiny_shape(num_kv_heads=1, head_dim=1), LearnerMesh(tp=4), r"6 rows of the fused qkv"),
        (glm(), LearnerMesh(dp=3, ep=3), r"4 experts .*ep=3; use an ep that divides 4"),
        (glm(moe=ODD), LearnerMesh(dp=2, etp=2), r"9 rows of an expert's gate .*etp=2"),
        (glm(moe=ODD), LearnerMesh(tp=4), r"18 rows of the shared experts' gate .*tp=4"),
    ],
)
def test_what_megatron_does_not_split_is_named(
    shape: ModelShape, mesh: LearnerMesh, words: str
) -> None:
    with pytest.raises(LayoutError, match=words):
        megatron_layout(shape, mesh)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Pipeline.even(4, 2), r"4 decoder layers, the model and its mesh have 2; give"),
        (lambda: Pipeline.even(2, 1), r"1 stages, the model and its mesh have 2"),
        (lambda: Pipeline.even(2, 2, num_mtp=1), r"1 MTP layers, the model and its mesh have 0"),
        (lambda: Pipeline.from_layout("Et|||tL", 2), r"2 chunks in a stage, the model .* have 1"),
    ],
)
def test_pipeline_of_another_model_or_mesh_is_refused(
    make: Callable[[], Pipeline], words: str
) -> None:
    with pytest.raises(LayoutError, match=words):
        megatron_layout(tiny_shape(), LearnerMesh(pp=2), pipeline=make())


@pytest.mark.parametrize("forms", [("te",), ("te", "local"), ("te", "per_expert", "grouped")])
def test_forms_that_are_not_one_of_attention_and_one_of_experts_are_refused(
    forms: tuple[str, ...],
) -> None:
    with pytest.raises(LayoutError, match="must have one of"):
        megatron_layout(tiny_shape(), LearnerMesh(), forms=forms)


def test_settings_that_change_the_layout_are_all_named() -> None:
    check_supported({"hidden_size": 8, "add_bias_linear": False, "moe_latent_size": None})
    wrong = {"use_kitchen": True, "moe_mlp_glu_interleave_size": 32, "normalization": "LayerNorm"}
    with pytest.raises(LayoutError) as error:
        check_supported(wrong)
    assert "use_kitchen=True (use False)" in str(error.value)
    assert "moe_mlp_glu_interleave_size=32 (use None)" in str(error.value)
    assert "normalization='LayerNorm' (use 'RMSNorm')" in str(error.value)


@pytest.mark.parametrize("balancing", ["quantile_balancing", ["none", "quantile_balancing"]])
def test_balancing_by_a_second_bias_is_refused(balancing: object) -> None:
    check_supported({"moe_router_load_balancing_type": ["seq_aux_loss", "none"]})
    with pytest.raises(LayoutError, match="qb_beta"):
        check_supported({"moe_router_load_balancing_type": balancing})


def test_settings_that_change_the_layout_are_fields_of_megatrons_config(megatron: Oracle) -> None:
    defaults = megatron.defaults()
    differ = {
        name
        for name, right in UNSUPPORTED.items()
        if defaults[name] not in [repr(v) for v in right]
    }
    assert differ == {"add_bias_linear"}


@pytest.mark.parametrize("divisor", [0, -128])
def test_vocabulary_divisor_below_one_is_refused(divisor: int) -> None:
    with pytest.raises(LayoutError, match=f"vocab_divisor is {divisor}"):
        megatron_layout(tiny_shape(), LearnerMesh(), vocab_divisor=divisor)
