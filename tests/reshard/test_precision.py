"""Who quantizes what: plans to float8 destinations, against whole tensors quantized by numpy."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, reject, settings
from hypothesis import strategies as st

from megarl.actor.parameters import SCALE_SUFFIX, Block, BlockTable, Parameter, block_table
from megarl.actor.shape import LatentAttention, MixtureOfExperts, ModelShape
from megarl.errors import LayoutError
from megarl.reshard.blocks import holds_whole_blocks, joined, scale_box
from megarl.reshard.execute import clear_paddings, run, slices
from megarl.reshard.explicit import explicit_layout, full_layout
from megarl.reshard.layout import (
    Box,
    Layout,
    LocalTensor,
    Padding,
    Piece,
    RankLayout,
    Shard,
    ShardedTensor,
    local_box,
    overlap,
)
from megarl.reshard.megatron import megatron_layout
from megarl.reshard.mesh import LearnerMesh, ServerMesh
from megarl.reshard.plan import make_plan
from megarl.reshard.precision import Precisions, quantized_source, with_fp8
from megarl.reshard.proof import prove_layout
from megarl.reshard.scales import engine_scales
from megarl.reshard.sglang import sglang_layout
from tests.reshard.models import FAMILY_FLAGS, MOE_FLAGS, Arrays, random_weights, tiny_shape

FP8_MAX = 448.0
ARCHITECTURES = sorted({**FAMILY_FLAGS, **MOE_FLAGS})
BLOCKS = [(2, 2), (4, 4), (4, 2), (8, 4), (16, 8), (3, 2)]


def quantize(weight: np.ndarray, block: tuple[int, int]) -> tuple[np.ndarray, np.ndarray]:
    """(numbers to round to float8, scales) of the last two dims, block by block."""
    rows, columns = weight.shape[-2:]
    counts = (-(-rows // block[0]), -(-columns // block[1]))
    numbers = np.empty_like(weight)
    scales = np.empty((*weight.shape[:-2], *counts), np.float32)
    for i in range(counts[0]):
        for j in range(counts[1]):
            at = (
                ...,
                slice(i * block[0], (i + 1) * block[0]),
                slice(j * block[1], (j + 1) * block[1]),
            )
            scale = np.abs(weight[at]).max(axis=(-2, -1)) / FP8_MAX
            scales[..., i, j] = scale
            numbers[at] = weight[at] / scale[..., None, None]
    return numbers, scales


def quantized_whole(table: BlockTable, weights: Arrays, block: tuple[int, int]) -> Arrays:
    """Every parameter of a float8 table, from whole tensors."""
    found = dict(weights)
    for parameter in table.parameters:
        if parameter.precision == "float8":
            numbers, scales = quantize(weights[parameter.name], block)
            found[parameter.name], found[parameter.name + SCALE_SUFFIX] = numbers, scales
    return found


def empty(rank: RankLayout) -> Arrays:
    return {t.name: np.full(t.shape, np.nan, np.float32) for t in rank.tensors}


def filled(rank: RankLayout, tensors: Arrays) -> Arrays:
    """What a rank holds of whole tensors."""
    found = empty(rank)
    for piece in rank.pieces:
        at = slices(local_box(piece.box, piece.at))
        found[piece.local][at] = tensors[piece.tensor][slices(piece.box)].reshape(
            found[piece.local][at].shape
        )
    clear_paddings(rank, found)
    return found


def gathered(rank: RankLayout, arrays: Arrays, tensor: str, box: Box) -> np.ndarray:
    """A box of a parameter, from this rank's arrays alone; NaN where it holds nothing of it."""
    found = np.full(tuple(end - start for start, end in box), np.nan, np.float32)
    for piece in rank.pieces:
        shared = overlap(piece.box, box) if piece.tensor == tensor else None
        if shared is not None:
            skip = max(0, len(piece.at) - len(box))
            lacks = max(0, len(box) - len(piece.at))
            inner = [s[0] - p[0] for s, p in zip(shared, piece.box, strict=True)]
            start = (*piece.at[:skip], *(a + i for a, i in zip(
                piece.at[skip:], inner[lacks:], strict=True)))  # fmt: skip
            local = arrays[piece.local][slices(local_box(shared, start))]
            into = slices(
                tuple((s - b[0], e - b[0]) for (s, e), b in zip(shared, box, strict=True))
            )
            found[into] = local.reshape(found[into].shape)
    return found


def quantized_here(
    rank: RankLayout, held: RankLayout, arrays: Arrays, shapes: dict[str, tuple[int, ...]],
    block: tuple[int, int],
) -> Arrays:  # fmt: skip
    """What `rank` holds, quantized from the arrays of `held` alone where it has scales."""
    found = empty(rank)
    for name in found.keys() & arrays.keys():
        found[name][...] = arrays[name]
    for scales in rank.pieces:
        if not scales.tensor.endswith(SCALE_SUFFIX):
            continue
        name = scales.tensor.removesuffix(SCALE_SUFFIX)
        units = (*(1 for _ in scales.box[:-2]), *block)
        box = tuple(
            (start * unit, min(end * unit, size))
            for (start, end), unit, size in zip(scales.box, units, shapes[name], strict=True)
        )
        weight = gathered(held, arrays, name, box)
        assert not np.isnan(weight).any(), (name, box)
        numbers, made = quantize(weight, block)
        at = slices(local_box(scales.box, scales.at))
        found[scales.local][at] = made.reshape(found[scales.local][at].shape)
        for piece in rank.pieces:
            shared = overlap(piece.box, box) if piece.tensor == name else None
            if shared is not None:
                one = replace(piece, box=shared, at=offset(piece, shared))
                mine = slices(local_box(one.box, one.at))
                part = numbers[
                    slices(
                        tuple((s - b[0], e - b[0]) for (s, e), b in zip(shared, box, strict=True))
                    )
                ]
                found[piece.local][mine] = part.reshape(found[piece.local][mine].shape)
    clear_paddings(rank, found)
    return found


def offset(piece: Piece, box: Box) -> tuple[int, ...]:
    added = max(0, len(piece.at) - len(box))
    inner = [b[0] - p[0] for b, p in zip(box, piece.box, strict=True)]
    inner = inner[len(inner) - (len(piece.at) - added) :]
    return (*piece.at[:added], *(a + i for a, i in zip(piece.at[added:], inner, strict=True)))


@st.composite
def sources(draw: st.DrawFn, architecture: str, shape: ModelShape) -> Layout:
    tp, pp = draw(st.sampled_from([1, 2, 4])), draw(st.sampled_from([1, 2]))
    ep, etp = 1, tp
    form = "per_expert"
    if architecture in MOE_FLAGS:
        ep = draw(st.sampled_from([e for e in (1, 2, 4) if tp % e == 0]))
        etp = draw(st.sampled_from([x for x in (1, 2) if tp % (ep * x) == 0]))
        form = draw(st.sampled_from(["per_expert", "grouped"]))
    mesh = LearnerMesh(tp=tp, pp=pp, ep=ep, etp=etp if architecture in MOE_FLAGS else 1)
    return megatron_layout(shape, mesh, 4, forms=("te", form))


@st.composite
def destinations(draw: st.DrawFn, shape: ModelShape, block: tuple[int, int]) -> Layout:
    tp = draw(st.sampled_from([1, 2, 4]))
    if draw(st.booleans()):
        return full_layout(block_table(shape, block))
    ep = draw(st.sampled_from([1, tp])) if shape.moe else 1
    return sglang_layout(shape, ServerMesh(tp=tp, ep=ep), block)


SEEN: Counter[object] = Counter()


@given(st.data())
@settings(max_examples=120)
def test_float8_destination_holds_what_whole_tensors_quantized_would_be(
    data: st.DataObject,
) -> None:
    architecture = data.draw(st.sampled_from(ARCHITECTURES))
    block = data.draw(st.sampled_from(BLOCKS))
    shape = tiny_shape(architecture)
    try:
        source = data.draw(sources(architecture, shape))
        destination = data.draw(destinations(shape, block))
        made = with_fp8(source, destination, block)
    except LayoutError:
        reject()
    for layout in (made.source, made.destination):
        prove_layout(layout)
    plan = make_plan(made.source, made.destination)
    SEEN.update(set(made.decisions.values()))
    shapes = {p.name: p.shape for p in destination.table.parameters}
    weights = random_weights(shape)
    wanted = quantized_whole(destination.table, weights, block)
    sent = {
        rank.rank: quantized_here(
            made.source.rank(rank.rank), rank, filled(rank, weights), shapes, block
        )
        for rank in source.ranks
    }
    for rank in made.destination.ranks:
        got = empty(rank)
        for move in plan.receives(rank.rank):
            run([move], sent[move.src], got)
        clear_paddings(rank, got)
        own = destination.rank(rank.rank)
        final = derived(own, rank, got, shapes, block)
        reference = filled(own, wanted)
        for name, array in reference.items():
            np.testing.assert_array_equal(final[name], array, err_msg=f"rank {rank.rank} {name}")


def derived(
    own: RankLayout, planned: RankLayout, got: Arrays, shapes: dict[str, tuple[int, ...]],
    block: tuple[int, int],
) -> Arrays:  # fmt: skip
    """What a rank has once it has quantized, by itself, what came without scales."""
    missing = {t.name for t in own.tensors} - {t.name for t in planned.tensors}
    scales = [p for p in own.pieces if p.local in missing]
    names = {p.tensor.removesuffix(SCALE_SUFFIX) for p in scales}
    part = RankLayout(
        own.rank,
        tuple(t for t in own.tensors),
        tuple(p for p in own.pieces if p.local in missing or p.tensor in names),
        tuple(p for p in own.paddings if p.local in missing),
    )
    made = quantized_here(part, planned, got, shapes, block)
    return {**got, **{t.name: made[t.name] for t in own.tensors if t.name in locals_of(part)}}


def locals_of(rank: RankLayout) -> set[str]:
    return {piece.local for piece in rank.pieces} | {padding.local for padding in rank.paddings}


def decisions(shape: ModelShape, mesh: LearnerMesh, block: tuple[int, int]) -> dict[str, str]:
    made = with_fp8(megatron_layout(shape, mesh), full_layout(block_table(shape, block)), block)
    return {kind: when for (_, kind), when in made.decisions.items()}


WIDE = tiny_shape(hidden_size=256, num_heads=8, num_kv_heads=4, head_dim=64, intermediate_size=512)


def test_heads_of_half_a_block_are_quantized_before_where_two_of_them_are_held() -> None:
    assert decisions(WIDE, LearnerMesh(tp=2), (128, 128)) == dict.fromkeys(
        ["query", "key", "value", "attention_output", "gate", "up", "down"], "before"
    )


def test_one_key_head_of_half_a_block_takes_the_queries_beside_it_behind_the_wire() -> None:
    found = decisions(WIDE, LearnerMesh(tp=4), (128, 128))
    after = {kind for kind, when in found.items() if when == "after"}
    assert after == {"query", "key", "value"}  # 2 x 64 rows of queries, 64 of keys and values


def test_scales_of_a_fused_tensor_are_one_below_another() -> None:
    source = megatron_layout(WIDE, LearnerMesh(tp=2))
    made, _ = quantized_source(source, block_table(WIDE, (128, 128)), (128, 128))
    name = "decoder.layers.0.self_attention.linear_qkv.weight"
    rank = made.rank(1)
    shapes = {tensor.name: tensor.shape for tensor in rank.tensors}
    assert shapes[name] == (512, 256) and shapes[name + SCALE_SUFFIX] == (4, 2)
    assert [
        (p.tensor.split(".")[-2], p.box, p.at)
        for p in rank.pieces
        if p.local == name + SCALE_SUFFIX
    ] == [
        ("q_proj", ((2, 4), (0, 2)), (0, 0)),
        ("k_proj", ((1, 2), (0, 2)), (2, 0)),
        ("v_proj", ((1, 2), (0, 2)), (3, 0)),
    ]


def test_engine_scales_of_a_tensor_with_padding_are_refused() -> None:
    pieces = (Piece("a", ((0, 4), (0, 8)), "fc1", (0, 0)),)
    shard = Shard((0, 1), pieces, (Padding("fc1", ((4, 8), (0, 8))),))
    tensor = ShardedTensor("fc1", (8, 8), (shard,))
    with pytest.raises(LayoutError, match=r"fc1: positions \[0, 1\] of a stage hold padding"):
        engine_scales(tensor, {"a": Parameter("a", (4, 8), "a")}, (4, 4))


def of_two_ranks(kind: str, spans: list[list[tuple[int, int]]], scale_rows: int = 0) -> Layout:
    """Ranks that hold rows of a weight [20, 8] one below another and, if asked, all its scales."""
    ranks = []
    for rank, own in enumerate(spans):
        pieces, row = [], 0
        for low, high in own:
            pieces.append(Piece("a", ((low, high), (0, 8)), "a", (row, 0)))
            row += high - low
        tensors = [LocalTensor("a", (row, 8))]
        if scale_rows:
            tensors.append(LocalTensor("s", (scale_rows, 2)))
            pieces.append(Piece("a" + SCALE_SUFFIX, ((0, scale_rows), (0, 2)), "s", (0, 0)))
        ranks.append(RankLayout(rank, tuple(tensors), tuple(pieces)))
    weight = Parameter("a", (20, 8), "a", None, "float8" if scale_rows else "policy", True)
    scales = Parameter("a" + SCALE_SUFFIX, (scale_rows, 2), "s", None, "float32")
    table = BlockTable((Block("all"),), {"all": (weight, scales) if scale_rows else (weight,)})
    return explicit_layout(kind, table, ranks)


HALVES = [[(0, 10)], [(10, 20)]]  # 10 is no multiple of 4


def test_weight_that_the_source_cuts_within_a_block_is_sent_without_its_scales() -> None:
    made = with_fp8(of_two_ranks("source", HALVES), of_two_ranks("whole", [[(0, 20)]], 5), (4, 4))
    assert made.decisions == {("all", "a"): "after"}
    assert [t.name for t in made.destination.rank(0).tensors] == ["a"]
    assert [p.precision for p in made.destination.table.parameters] == ["policy"]
    assert make_plan(made.source, made.destination).num_elements() == 160


def test_weight_that_neither_side_holds_in_whole_blocks_is_refused_with_its_rows() -> None:
    with pytest.raises(LayoutError, match=r"blocks of \[4, 4\].*server holds \[0:10, 0:8\]"):
        with_fp8(of_two_ranks("source", HALVES), of_two_ranks("server", HALVES, 5), (4, 4))


def test_scales_of_another_block_size_are_refused() -> None:
    with pytest.raises(LayoutError, match=r"\[4, 2\] needs scales of shape \[5, 4\].*\[5, 2\]"):
        with_fp8(of_two_ranks("source", HALVES), of_two_ranks("server", HALVES, 5), (4, 2))


def test_receiver_that_holds_scales_of_blocks_it_does_not_hold_is_refused() -> None:
    server = of_two_ranks("server", [[(0, 12)], [(12, 20)]], 5)
    with pytest.raises(LayoutError, match=r"position 0 .*\[0:5, 0:2\]"):
        with_fp8(of_two_ranks("source", HALVES), server, (4, 4))


def test_destination_that_mixes_float8_with_others_in_a_tensor_is_refused() -> None:
    float8 = Parameter("a", (8, 8), "a", None, "float8", True)
    scales = Parameter("a" + SCALE_SUFFIX, (2, 2), "s", None, "float32")
    other = Parameter("b", (8, 8), "b")
    table = BlockTable((Block("all"),), {"all": (float8, scales, other)})
    rank = RankLayout(
        0,
        (LocalTensor("ab", (16, 8)), LocalTensor("s", (2, 2))),
        (
            Piece("a", ((0, 8), (0, 8)), "ab", (0, 0)),
            Piece("b", ((0, 8), (0, 8)), "ab", (8, 0)),
            Piece("a" + SCALE_SUFFIX, ((0, 2), (0, 2)), "s", (0, 0)),
        ),
    )
    plain = BlockTable((Block("all"),), {"all": (replace(float8, precision="policy"), other)})
    with pytest.raises(LayoutError, match="one precision"):
        with_fp8(full_layout(plain), explicit_layout("mixed", table, [rank]), (4, 4))


DEEPSEEK_V3 = ModelShape(
    architecture="DeepseekV3ForCausalLM",
    num_layers=61,
    hidden_size=7168,
    num_heads=128,
    num_kv_heads=128,
    head_dim=192,
    intermediate_size=18432,
    vocab_size=129280,
    tie_embeddings=False,
    qkv_bias=False,
    qk_norm=False,
    rms_norm_eps=1e-6,
    rope_theta=10000.0,
    rope_scaling=None,
    max_positions=4096,
    mla=LatentAttention(1536, 512, 128, 64, 128),
    moe=MixtureOfExperts(256, 8, 2048, 2048, True, "sigmoid", True, 2.5, 8, 4, (0, 1, 2)),
)


def test_deepseek_v3_goes_from_tp8_ep32_to_tp16_wholly_before_the_wire_in_half_the_bytes() -> None:
    block = (128, 128)
    mesh = LearnerMesh(tp=8, dp=4, ep=32)
    source = megatron_layout(DEEPSEEK_V3, mesh)
    destination = sglang_layout(DEEPSEEK_V3, ServerMesh(tp=16), block)
    made: Precisions = with_fp8(source, destination, block)
    assert set(made.decisions.values()) == {"before"}
    sizes = {"float8": 1, "policy": 2, "float32": 4}
    sent = sum(p.num_elements * sizes[p.precision] for p in made.destination.parameters)
    plain = sum(p.num_elements * 2 for p in source.parameters)
    assert 0.5 < sent / plain < 0.51


def test_boxes_join_to_whole_blocks_where_their_union_is_one() -> None:
    boxes: list[Box] = [((1, 2), (64, 128), (0, 256)), ((1, 2), (0, 64), (0, 256))]
    assert joined(boxes) == (((1, 2), (0, 128), (0, 256)),)
    assert holds_whole_blocks(joined(boxes)[0], (4, 512, 256), (128, 128))
    assert not any(holds_whole_blocks(box, (4, 512, 256), (128, 128)) for box in boxes)
    assert scale_box(joined(boxes)[0], (128, 128)) == ((1, 2), (0, 1), (0, 2))
