"""SGLang's layout of every family against what SGLang's own models and loaders hold on each rank.

One process plays every rank of every case; a layout is right where every parameter is equal, bit
for bit, and none is missing or too many.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

from megarl.actor.families import FAMILIES
from megarl.actor.families.family import Served as ServedAs
from megarl.actor.shape import LatentAttention, ModelShape
from megarl.errors import LayoutError
from megarl.reshard.blocks import ScaleBlock
from megarl.reshard.engine_tensors import float32_on_server
from megarl.reshard.explicit import full_layout
from megarl.reshard.layout import Layout, Piece, num_elements
from megarl.reshard.mesh import ServerMesh
from megarl.reshard.plan import make_plan
from megarl.reshard.recorded import from_json
from megarl.reshard.sglang import sglang_draft_layout, sglang_layout
from tests.reshard.models import tiny_shape
from tests.reshard.sglang_checkpoints import held_by, moe_shape, save_checkpoint
from tests.reshard.sglang_loaders import Case, Loaders

LLAMA, QWEN2, QWEN3 = "LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"
QWEN3_MOE, DEEPSEEK, GLM = "Qwen3MoeForCausalLM", "DeepseekV3ForCausalLM", "Glm4MoeForCausalLM"
FP8 = (128, 128)
# Their own models keep these for the draft; the server replaces them by the served model's.
SHARED_WITH_DRAFT = {"model.embed_tokens.weight", "lm_head.weight"}
NEVER_LOADED = np.finfo(np.float32).min  # what SGLang fills block scales with at first


def dense(architecture: str, **changes: Any) -> ModelShape:
    sizes = {"hidden_size": 32, "head_dim": 8, "intermediate_size": 64, "num_layers": 3}
    return tiny_shape(architecture, **{**sizes, **changes})


def large(architecture: str, **changes: Any) -> ModelShape:
    """With sizes that are made of blocks of 128."""
    sizes: dict[str, Any] = {
        "hidden_size": 256,
        "num_heads": 2,
        "head_dim": 128,
        "num_kv_heads": 2,
        "intermediate_size": 512,
        "num_layers": 2,
    }
    if architecture not in (QWEN3_MOE, DEEPSEEK, GLM):
        return tiny_shape(architecture, **{**sizes, **changes})
    experts = {"expert_intermediate_size": 256, "shared_intermediate_size": 256, "num_experts": 4}
    if architecture == QWEN3_MOE:
        experts |= {"shared_intermediate_size": 0, "dense_layers": ()}  # type: ignore[dict-item]
    return moe_shape(architecture, **{**sizes, "experts": experts, **changes})


UNEVEN = {"intermediate_size": 40}
SMALL_EXPERTS = {"expert_intermediate_size": 24, "shared_intermediate_size": 48}
LATENT = LatentAttention(128, 128, 128, 64, 64)  # kv_a has 192 rows: one block and a half
ONE_AND_A_QUARTER = LatentAttention(128, 128, 96, 64, 64)  # kv_b has 160 rows a head

MODELS: dict[str, tuple[ModelShape, ScaleBlock | None]] = {
    "llama": (dense(LLAMA), None),
    "llama tied": (dense(LLAMA, tie_embeddings=True, num_kv_heads=1), None),
    "qwen2": (dense(QWEN2), None),
    "qwen2 tied": (dense(QWEN2, tie_embeddings=True, num_kv_heads=1), None),
    "qwen3": (dense(QWEN3), None),
    "qwen3 tied": (dense(QWEN3, tie_embeddings=True, num_kv_heads=1), None),
    "qwen3 moe": (moe_shape(QWEN3_MOE, experts={"dense_layers": ()}), None),
    "deepseek": (moe_shape(DEEPSEEK, num_mtp_layers=1), None),
    "deepseek tied": (moe_shape(DEEPSEEK, tie_embeddings=True), None),
    "deepseek full rank": (moe_shape(DEEPSEEK, mla=LatentAttention(None, 16, 8, 4, 12)), None),
    "glm": (moe_shape(GLM, num_mtp_layers=1), None),
    "glm one kv head": (moe_shape(GLM, num_kv_heads=1), None),
    "qwen2 uneven": (dense(QWEN2, num_kv_heads=1, intermediate_size=50), None),
    "qwen3 uneven": (dense(QWEN3, num_heads=6, num_kv_heads=3), None),
    "deepseek uneven": (
        moe_shape(DEEPSEEK, num_heads=6, num_kv_heads=6, experts=SMALL_EXPERTS, **UNEVEN),
        None,
    ),
    "glm uneven": (moe_shape(GLM, num_kv_heads=1, experts=SMALL_EXPERTS, **UNEVEN), None),
    "llama fp8": (large(LLAMA), FP8),
    "qwen3 fp8": (large(QWEN3), FP8),
    "qwen3 moe fp8": (large(QWEN3_MOE), FP8),
    "deepseek fp8": (large(DEEPSEEK, num_heads=4, mla=LATENT, num_mtp_layers=1), FP8),
    "deepseek fp8 full rank": (
        large(DEEPSEEK, num_heads=4, mla=LatentAttention(None, 128, 128, 64, 64)),
        FP8,
    ),
    "deepseek fp8 cut blocks": (large(DEEPSEEK, mla=ONE_AND_A_QUARTER), FP8),
    "glm fp8": (large(GLM, num_mtp_layers=1), FP8),
}


@dataclass(frozen=True)
class Served:
    """A model on a server, or its draft."""

    model: str
    mesh: ServerMesh
    draft: bool = False

    def __str__(self) -> str:
        given = {k: v for k, v in asdict(self.mesh).items() if v != getattr(ServerMesh(), k)}
        words = [self.model, *(f"{k}={v}" for k, v in given.items())]
        return " ".join(words + ["draft"] * self.draft)

    def layout(self) -> Layout:
        shape, fp8_block = MODELS[self.model]
        make = sglang_draft_layout if self.draft else sglang_layout
        return make(shape, self.mesh, fp8_block)

    def case(self, root: Path, record: bool = False, dtype: str = "") -> Case:
        """The same for SGLang."""
        mesh = self.mesh
        flags: dict[str, Any] = {"tp_size": mesh.tp, "pp_size": mesh.pp, "ep_size": mesh.ep}
        if mesh.attention_dp > 1:
            flags |= {"attn_dp_size": mesh.attention_dp, "enable_dp_lm_head": mesh.dp_head}
        if mesh.dense_whole:
            flags["moe_dense_tp_size"] = 1
        if mesh.draft:
            flags |= DRAFTING
        environment = {}
        if mesh.pp_layers:
            environment["SGLANG_PP_LAYER_PARTITION"] = ",".join(map(str, mesh.pp_layers))
        if mesh.shared_whole:
            environment["SGLANG_SHARED_EXPERT_TP1"] = "1"
        return Case(
            str(root / self.model),
            flags,
            mesh.cpu,
            self.draft,
            mesh.fused_shared_experts,
            mesh.up_first,
            environment,
            record,
            dtype,
        )


def served(model: str, *meshes: dict[str, Any], draft: bool = False) -> list[Served]:
    return [Served(model, ServerMesh(**mesh), draft) for mesh in meshes]


DRAFTING = {
    "speculative_algorithm": "EAGLE",
    "speculative_num_steps": 1,
    "speculative_eagle_topk": 1,
    "speculative_num_draft_tokens": 2,
}
TP2, TP4, PP2 = {"tp": 2}, {"tp": 4}, {"tp": 2, "pp": 2}
TP4_EP2, TP4_EP4 = {"tp": 4, "ep": 2}, {"tp": 4, "ep": 4}
DP2 = {"tp": 2, "attention_dp": 2}
DP2_OF_4 = {"tp": 4, "ep": 2, "attention_dp": 2, "dp_head": True}
FUSED = {"fused_shared_experts": True}
CASES = [
    *served("llama", {}, TP2, PP2, {"servers": 2}),
    *served("llama tied", {}, TP4),
    *served("qwen2", TP2, TP4),
    *served("qwen2 tied", {}, TP2, PP2),
    *served("qwen3", TP4, {"tp": 4, "attention_dp": 2, "dp_head": True}),
    *served("qwen3 tied", TP4, DP2, PP2),
    *served("qwen3 moe", {}, TP4, TP4_EP2, TP4_EP4, DP2_OF_4, PP2, {"tp": 2, "up_first": True}),
    *served("deepseek", {}, TP4, TP4_EP2, TP4_EP4, DP2_OF_4, {"pp": 2, "pp_layers": (2, 1)}),
    *served(
        "deepseek",
        {"pp": 2, "draft": True},
        {**DP2, "dense_whole": True},
        {**TP2, "shared_whole": True},
    ),
    *served("deepseek", {**TP2, **FUSED}, {**TP2, "ep": 2, **FUSED}),
    *served("deepseek", TP2, DP2_OF_4, draft=True),
    *served("deepseek tied", TP2),
    *served("deepseek full rank", TP2),
    *served("glm", {}, TP4, TP4_EP2, DP2_OF_4, PP2, {**DP2, "dense_whole": True}),
    *served("glm", {**TP2, "ep": 2, **FUSED}, {**TP2, **FUSED, "up_first": True}),
    *served("glm", TP2, draft=True),
    *served("glm one kv head", TP4),
    *served("qwen2 uneven", {**TP2, "cpu": True}),
    *served("qwen3 uneven", {**TP4, "cpu": True}),
    *served("deepseek uneven", {**TP4, "cpu": True}, {**TP2, "ep": 2, "cpu": True}),
    *served("glm uneven", {**TP4, "attention_dp": 2, "cpu": True}),
    *served("llama fp8", TP2),
    *served("qwen3 fp8", TP2),
    *served("qwen3 moe fp8", TP2, {**TP2, "ep": 2}),
    *served("deepseek fp8", {}, {**TP2, "ep": 2}, DP2),
    *served("deepseek fp8", TP2, draft=True),
    *served("deepseek fp8 full rank", TP2),
    *served("glm fp8", TP2),
]
REFUSED = [
    *served("qwen3", {"tp": 3}),
    *served("glm", {"tp": 3}),
    *served("qwen3 fp8", TP4),
    *served("glm fp8", TP4_EP4),
    *served("deepseek fp8 cut blocks", TP2),
]
RECORDED = [
    *served("qwen2 tied", TP2),
    *served("qwen3 moe", TP4_EP2),
    *served("deepseek", DP2_OF_4, {**TP2, **FUSED}),
    *served("glm one kv head", TP4),
]
IN_BFLOAT16 = [
    *served("qwen3 moe", TP2),
    *served("deepseek", PP2),
    *served("glm", PP2),
    *served("glm", TP2, draft=True),
    *served("deepseek fp8", {}),
]
SMALL = {
    "vocab_size": 100,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
WITHOUT_TABLE = {
    "olmo2": SMALL,  # norms of whole queries and keys, cut with them
    "phi3": SMALL,  # q, k and v are one checkpoint tensor, gate and up another
    "mixtral": {**SMALL, "num_local_experts": 4, "num_experts_per_tok": 2},
}


@dataclass(frozen=True)
class Found:
    """What SGLang made of everything, and the tensors of each model."""

    root: Path
    tensors: dict[str, dict[str, torch.Tensor]]

    def path(self, number: int, ending: str) -> Path:
        return self.root / "out" / f"{number}.{ending}"

    def ranks(self, case: Served) -> list[dict[str, np.ndarray]]:
        """The parameters of each rank of one server."""
        path = self.path(CASES.index(case), "safetensors")
        assert path.exists(), self.path(CASES.index(case), "txt").read_text()
        held: list[dict[str, np.ndarray]] = [{} for _ in range(case.mesh.size)]
        for key, array in load_file(path).items():
            rank, _, name = key.partition("/")
            held[int(rank)][name] = array
        return held


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory, sglang_loaders: Loaders) -> Found:
    root = tmp_path_factory.mktemp("sglang")
    tensors = {name: save_checkpoint(root / name, *model) for name, model in MODELS.items()}
    cases = [case.case(root) for case in CASES + REFUSED]
    cases += [case.case(root, record=True) for case in RECORDED]
    for name, config in WITHOUT_TABLE.items():
        made = {"model_type": name, **config}
        cases.append(Case(str(root / name), {"tp_size": 2}, record=True, hf_config=made))
    cases += [case.case(root, dtype="bfloat16") for case in IN_BFLOAT16]
    (root / "out").mkdir()
    sglang_loaders.load(cases, root / "out")
    return Found(root, tensors)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_layout_says_what_sglangs_loaders_hold_on_every_rank(found: Found, case: Served) -> None:
    layout, ranks = case.layout(), found.ranks(case)
    for rank in layout.rank_ids:
        ours = held_by(layout, rank, found.tensors[case.model])
        theirs = ranks[rank % case.mesh.size]
        if case.draft:
            theirs = {n: a for n, a in theirs.items() if n not in SHARED_WITH_DRAFT}
        # Scales of a quantized cache, which SGLang deletes once the weights are loaded.
        theirs = {n: a for n, a in theirs.items() if not n.endswith((".k_scale", ".v_scale"))}
        assert sorted(ours) == sorted(theirs), rank
        for name, array in theirs.items():
            if case.model == "llama fp8" and name.endswith("_scale_inv"):
                # sglang 0.5.23 renames these scales in its llama's loader and drops them.
                assert ours[name].shape == array.shape
                assert (array == NEVER_LOADED).all(), "the llama's loader loads scales by now"
                continue
            np.testing.assert_array_equal(ours[name], array, err_msg=f"rank {rank} {name}")


@pytest.mark.parametrize("case", REFUSED, ids=str)
def test_layout_is_refused_where_sglang_refuses_the_model(found: Found, case: Served) -> None:
    number = len(CASES) + REFUSED.index(case)
    assert found.path(number, "txt").exists(), "SGLang loads it"
    with pytest.raises(LayoutError):
        case.layout()


@pytest.mark.parametrize("case", IN_BFLOAT16, ids=str)
def test_what_a_bfloat16_server_keeps_in_float32_is_said(found: Found, case: Served) -> None:
    number = len(CASES) + len(REFUSED) + len(RECORDED) + len(WITHOUT_TABLE)
    text = found.path(number + IN_BFLOAT16.index(case), "json").read_text()
    layout, (shape, _) = case.layout(), MODELS[case.model]
    ranks = json.loads(text)
    for rank, theirs in enumerate(ranks):
        held = {name for name in theirs if not name.endswith((".k_scale", ".v_scale"))}
        assert float32_on_server(shape, layout, rank) == held
    assert any(ranks) or case.model == "qwen3 moe"


Claim = tuple[Callable[[ServedAs], bool], Callable[[Served, ModelShape], bool]]
CLAIMS: dict[str, Claim] = {
    "attention_dp": (lambda to: to.attention_dp, lambda case, _: case.mesh.attention_dp > 1),
    "pipeline": (lambda to: to.pipeline, lambda case, _: case.mesh.pp > 1),
    "tied": (lambda to: to.tied != "never", lambda _, shape: shape.tie_embeddings),
    "tied copy": (
        lambda to: to.tied == "copy",
        lambda case, shape: shape.tie_embeddings and case.mesh.pp > 1,
    ),
    "fp8": (lambda to: to.fp8, lambda case, _: case.model.endswith("fp8")),
    "dense_whole": (lambda to: to.dense_whole, lambda case, _: case.mesh.dense_whole),
    "fuses_shared": (
        lambda to: to.fuses_shared is not None,
        lambda case, _: case.mesh.fused_shared_experts,
    ),
    "embeds_for_draft": (
        lambda to: to.embeds_for_draft,
        lambda case, _: case.mesh.draft and case.mesh.pp > 1,
    ),
}
"""Of `Served`: whether a family claims it, and whether a case shows it."""


@pytest.mark.parametrize("claim", CLAIMS)
@pytest.mark.parametrize("architecture", FAMILIES)
def test_what_a_family_claims_of_sglang_is_among_the_cases(architecture: str, claim: str) -> None:
    claims, shows = CLAIMS[claim]
    shapes = [(case, MODELS[case.model][0]) for case in CASES]
    shown = [c for c, shape in shapes if shape.architecture == architecture and shows(c, shape)]
    assert shown or not claims(FAMILIES[architecture].served)


def by_stored_tensor(pieces: tuple[Piece, ...]) -> set[Piece]:
    """The pieces with one for each checkpoint tensor of a stack."""
    apart = set()
    for piece in pieces:
        if "*" not in piece.tensor:
            apart.add(piece)
            continue
        first, end = piece.box[0]
        for expert in range(first, end):
            at = (piece.at[0] + expert - first, *piece.at[1:])
            name = piece.tensor.replace("*", str(expert))
            apart.add(Piece(name, piece.box[1:], piece.local, at))
    return apart


@pytest.mark.parametrize("case", RECORDED, ids=str)
def test_recorded_loader_gives_exactly_the_layout_of_the_table(found: Found, case: Served) -> None:
    number = len(CASES) + len(REFUSED) + RECORDED.index(case)
    recorded, ours = from_json(found.path(number, "json").read_text()), case.layout()
    assert recorded.rank_ids == ours.rank_ids
    for rank in ours.rank_ids:
        seen, said = recorded.rank(rank), ours.rank(rank)
        assert set(seen.tensors) == set(said.tensors)
        assert by_stored_tensor(seen.pieces) == by_stored_tensor(said.pieces)
        assert set(seen.paddings) == set(said.paddings)


@pytest.mark.parametrize("name", WITHOUT_TABLE)
def test_recorded_layout_of_a_family_without_table_can_be_planned_and_proved(
    found: Found, name: str
) -> None:
    number = len(CASES) + len(REFUSED) + len(RECORDED) + list(WITHOUT_TABLE).index(name)
    layout = from_json(found.path(number, "json").read_text())
    plan = make_plan(full_layout(layout.table), layout)
    written = [num_elements(piece.box) for rank in layout.ranks for piece in rank.pieces]
    assert plan.num_elements() == sum(written)
    assert len(written) < 100
    read = {piece.tensor for rank in layout.ranks for piece in rank.pieces}
    assert read == {parameter.name for parameter in layout.parameters}
