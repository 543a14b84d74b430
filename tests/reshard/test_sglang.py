"""SGLang's layout without SGLang: what it refuses, and what large servers come to."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from megarl.actor.families import FAMILIES
from megarl.actor.families.family import Served
from megarl.actor.shape import LatentAttention, MixtureOfExperts, ModelShape
from megarl.errors import LayoutError
from megarl.reshard.mesh import ServerMesh
from megarl.reshard.sglang import sglang_draft_layout, sglang_layout, sglang_rank
from tests.reshard.models import tiny_shape
from tests.reshard.sglang_checkpoints import moe_shape

KIMI_K2 = ModelShape(
    architecture="DeepseekV3ForCausalLM",
    num_layers=61,
    hidden_size=7168,
    num_heads=64,
    num_kv_heads=64,
    head_dim=112,
    intermediate_size=18432,
    vocab_size=163840,
    tie_embeddings=False,
    qkv_bias=False,
    qk_norm=False,
    rms_norm_eps=1e-6,
    rope_theta=50000.0,
    rope_scaling=None,
    max_positions=131072,
    mla=LatentAttention(1536, 512, 128, 64, 128),
    moe=MixtureOfExperts(384, 8, 2048, 2048, True, "sigmoid", True, 2.827, 1, 1, (0,)),
)


@pytest.mark.parametrize(
    ("changes", "tp", "words"),
    [
        ({"num_heads": 4}, 3, "4 attention heads do not split over rollout.parallel.tp=3"),
        ({"intermediate_size": 18}, 4, "18 columns of down_proj"),
        ({"num_heads": 12, "num_kv_heads": 4, "intermediate_size": 48}, 6, "4 kv heads"),
    ],
)
def test_size_that_does_not_split_is_named(changes: dict[str, int], tp: int, words: str) -> None:
    with pytest.raises(LayoutError, match=words) as caught:
        sglang_layout(tiny_shape(**changes), ServerMesh(tp))
    assert "use rollout.parallel.tp from 1, 2" in str(caught.value)


@pytest.mark.parametrize(
    ("architecture", "changes", "mesh", "words"),
    [
        ("Llama", {}, {"tp": 2, "attention_dp": 2}, "no data parallel attention"),
        ("Llama", {}, {"tp": 2, "ep": 2}, "has no experts here; use ep=1"),
        ("Llama", {"tie_embeddings": True}, {"pp": 2}, "no copy of a tied embedding"),
        ("Llama", {}, {"pp": 3}, "2 layers do not fill pp=3 stages"),
        ("Llama", {}, {"pp": 2, "pp_layers": (2, 1)}, "add up to 3 layers, the model has 2"),
        ("Glm4Moe", {"tie_embeddings": True}, {}, "never ties its head"),
        ("Glm4Moe", {}, {"tp": 4, "ep": 4, "cpu": True, "fused_shared_experts": True}, "on a CPU"),
        ("Qwen3Moe", {}, {}, "layers 0 have no experts, but SGLang's"),
        ("DeepseekV3", {"num_heads": 16}, {"tp": 16}, "exceeds the 8 experts"),
        ("DeepseekV3", {"experts": {"num_experts": 6}}, {"tp": 4, "ep": 4}, "6 experts do not"),
        (
            "DeepseekV3",
            {"experts": {"shared_intermediate_size": 64}},
            {"fused_shared_experts": True},
            "one fused shared expert of the routed ones' size; .* of 64; use rollout.engine_args",
        ),
    ],
)
def test_server_that_sglang_has_not_is_refused_with_the_reason(
    architecture: str, changes: dict[str, Any], mesh: dict[str, Any], words: str
) -> None:
    make = tiny_shape if architecture == "Llama" else moe_shape
    with pytest.raises(LayoutError, match=words):
        sglang_layout(make(f"{architecture}ForCausalLM", **changes), ServerMesh(**mesh))


@pytest.mark.parametrize(
    ("mesh", "words"),
    [
        ({"tp": 4, "ep": 3}, "ep=3 does not divide tp=4"),
        ({"tp": 4, "dp_head": True}, "dp_head needs attention_dp > 1"),
        ({"pp": 2, "pp_layers": (1,)}, "names 1 stages, pp=2"),
    ],
)
def test_mesh_that_contradicts_itself_is_refused(mesh: dict[str, Any], words: str) -> None:
    with pytest.raises(LayoutError, match=words):
        ServerMesh(**mesh)


def test_block_that_two_shards_would_share_is_refused_with_its_arithmetic() -> None:
    with pytest.raises(LayoutError, match=r"rows \[0, 576\) .*: 576 = 4 x 128 \+ 64") as caught:
        sglang_layout(KIMI_K2, ServerMesh(32), (128, 128))
    assert "gate_proj" in str(caught.value)
    assert "multiple of 128 rows" in str(caught.value)


def test_float8_is_refused_where_sglang_would_change_its_layout() -> None:
    with pytest.raises(LayoutError, match="float8"):
        sglang_layout(tiny_shape(), ServerMesh(up_first=True), (4, 4))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"intermediate_size": 36}, "36 columns of down_proj to a multiple of 8"),
        ({"num_kv_heads": 1}, "1 kv heads to a multiple of 2"),
    ],
)
def test_float8_is_refused_where_a_cpu_server_would_pad_it(
    changes: dict[str, int], words: str
) -> None:
    shape = tiny_shape(**changes)
    with pytest.raises(LayoutError, match=f"SGLang pads {words} with float8"):
        sglang_layout(shape, ServerMesh(2, cpu=True), (4, 4))
    whole = tiny_shape(intermediate_size=32)
    on_gpu, on_cpu = (sglang_layout(whole, ServerMesh(2, cpu=cpu), (4, 4)) for cpu in (False, True))
    assert on_gpu.ranks == on_cpu.ranks  # nothing is padded, so that both hold the same


def test_float8_experts_are_refused_on_a_cpu_only_where_they_would_be_padded() -> None:
    shape = tiny_shape("Qwen3MoeForCausalLM")
    assert shape.moe is not None
    wide, narrow = (
        replace(shape, moe=replace(shape.moe, expert_intermediate_size=size)) for size in (24, 20)
    )
    layout = sglang_layout(wide, ServerMesh(2, cpu=True), (4, 4))
    assert layout.ranks == sglang_layout(wide, ServerMesh(2), (4, 4)).ranks
    words = "SGLang pads 20 columns of an expert's down_proj to a multiple of 8 with float8"
    with pytest.raises(LayoutError, match=words):
        sglang_layout(narrow, ServerMesh(2, cpu=True), (4, 4))


def test_largest_servers_are_laid_out() -> None:
    layout = sglang_layout(KIMI_K2, ServerMesh(32, servers=8), (64, 64))
    assert len(layout.rank_ids) == 256


@pytest.mark.parametrize(("pp", "rows"), [(1, None), (2, 32)])
def test_tied_head_on_a_stage_of_its_own_is_cut_over_all_ranks_of_the_server(
    pp: int, rows: int | None
) -> None:
    """Where attention is data parallel; on the stage of the embedding it is the embedding."""
    shape = tiny_shape(tie_embeddings=True)
    layout = sglang_layout(shape, ServerMesh(4, attention_dp=2, pp=pp))
    found = {t.name: t.shape for rank in layout.ranks for t in rank.tensors}
    assert found["model.embed_tokens.weight"][0] == 64  # of 128, over the two of one attention
    assert found.get("lm_head.weight", (None,))[0] == rows


def test_kv_heads_are_copied_where_ranks_outnumber_them() -> None:
    layout = sglang_layout(tiny_shape(), ServerMesh(4))
    keys = [
        piece.box[0]
        for rank in layout.ranks
        for piece in rank.pieces
        if piece.tensor == "model.layers.0.self_attn.k_proj.weight"
    ]
    assert keys == [(0, 4), (0, 4), (4, 8), (4, 8)]


def test_kv_heads_are_padded_with_zeros_on_a_cpu() -> None:
    shape = tiny_shape(num_kv_heads=1, intermediate_size=64)
    held = [sglang_rank(shape, ServerMesh(2, cpu=True), rank) for rank in (0, 1)]
    name = "model.layers.0.self_attn.qkv_proj.weight"
    pieces = [sum(piece.local == name for piece in rank.pieces) for rank in held]
    paddings = [[p.box[0] for p in rank.paddings if p.local == name] for rank in held]
    assert pieces == [3, 0]
    assert paddings == [[], [(0, 16), (16, 20), (20, 24)]]


def test_experts_are_padded_on_a_cpu_to_32_columns_on_every_rank() -> None:
    shape = tiny_shape("Qwen3MoeForCausalLM")  # 4 experts of 8 columns, which all fit on rank 0
    name = "model.layers.0.mlp.experts.w2_weight"
    for rank, pieces, padding in ((0, [(0, 8)], (8, 32)), (1, [], (0, 32))):
        held = sglang_rank(shape, ServerMesh(2, cpu=True), rank)
        assert [t.shape for t in held.tensors if t.name == name] == [(4, 8, 32)]
        assert [p.box[2] for p in held.pieces if p.local == name] == pieces
        assert [p.box[2] for p in held.paddings if p.local == name] == [padding]


def test_rank_beyond_the_vocabulary_holds_only_padding() -> None:
    shape = tiny_shape(vocab_size=10)
    rank = sglang_rank(shape, ServerMesh(4), 3)
    assert not [p for p in rank.pieces if p.local == "lm_head.weight"]
    assert [p.box for p in rank.paddings if p.local == "lm_head.weight"] == [((0, 16), (0, 8))]


@pytest.mark.parametrize(
    ("mesh", "words"),
    [
        ({"tp": 3, "ep": 3}, "no tp does with ep=3, attention_dp=1; with ep=1, .* from 1, 2, 4$"),
        (
            {"tp": 10, "attention_dp": 5, "ep": 5, "dp_head": True},
            "with ep=1, attention_dp=1 use rollout.parallel.tp from 1, 2, 4$",
        ),
    ],
)
def test_server_that_fits_with_no_tp_is_refused_with_what_fits(
    mesh: dict[str, Any], words: str
) -> None:
    with pytest.raises(LayoutError, match=words):
        sglang_layout(moe_shape("DeepseekV3ForCausalLM"), ServerMesh(**mesh))


def test_kind_of_a_layout_says_all_that_is_not_plain() -> None:
    shape = moe_shape("Glm4MoeForCausalLM", num_mtp_layers=1)
    mesh = ServerMesh(4, ep=2, attention_dp=2, pp=2, servers=3, dp_head=True, pp_layers=(2, 1))
    words = "tp=4 ep=2 attention_dp=2 pp=2 servers=3 dp_head pp_layers=2+1"
    assert sglang_layout(shape, mesh).kind == f"sglang {words}"
    assert sglang_draft_layout(shape, mesh).kind == f"sglang draft {words}"
    assert sglang_layout(tiny_shape(), ServerMesh(2), (4, 2)).kind == "sglang tp=2 fp8=4x2"
    assert sglang_layout(tiny_shape(), ServerMesh(cpu=True)).kind == "sglang tp=1 cpu"


@pytest.mark.parametrize(
    ("mesh", "tied", "words"),
    [
        ({"tp": 2, "attention_dp": 2}, False, "has no data parallel attention"),
        ({"pp": 2}, False, "not known to have pipeline stages; use pp=1"),
        ({"dense_whole": True}, False, "do not follow moe_dense_tp_size"),
        ({}, True, "never ties its head"),
    ],
)
def test_what_a_family_does_not_claim_is_refused(
    monkeypatch: pytest.MonkeyPatch, mesh: dict[str, Any], tied: bool, words: str
) -> None:
    plain = replace(FAMILIES["Qwen3ForCausalLM"], served=Served())
    monkeypatch.setitem(FAMILIES, plain.architecture, plain)  # type: ignore[arg-type]
    shape = tiny_shape("Qwen3ForCausalLM", tie_embeddings=tied)
    with pytest.raises(LayoutError, match=words):
        sglang_layout(shape, ServerMesh(**mesh))


def test_rank_of_no_server_is_refused() -> None:
    assert sglang_rank(tiny_shape(), ServerMesh(2, servers=2), 3).tensors
    for rank in (-1, 4, 5):
        with pytest.raises(LayoutError, match=f"server rank {rank} is not among the 4 ranks"):
            sglang_rank(tiny_shape(), ServerMesh(2, servers=2), rank)


def test_tied_head_is_held_once() -> None:
    rank = sglang_rank(tiny_shape(tie_embeddings=True), ServerMesh(1), 0)
    assert "lm_head.weight" not in {tensor.name for tensor in rank.tensors}


def test_last_stage_embeds_for_the_draft_of_deepseek() -> None:
    shape = moe_shape("DeepseekV3ForCausalLM", num_mtp_layers=1)
    for draft, holders in ((False, [0]), (True, [0, 1])):
        layout = sglang_layout(shape, ServerMesh(pp=2, draft=draft))
        held = [r for r in (0, 1) if any("embed" in t.name for t in layout.rank(r).tensors)]
        assert held == holders


def test_draft_is_refused_without_a_layer_of_multi_token_prediction() -> None:
    with pytest.raises(LayoutError, match="has 0 layers of multi-token prediction"):
        sglang_draft_layout(moe_shape("Glm4MoeForCausalLM"), ServerMesh())
