"""What SGLang's own arguments do to a layout, or that nobody knows: never neither."""

from __future__ import annotations

import json

import pytest

from megarl.actor.families import FAMILIES
from megarl.actor.shape import read_shape
from megarl.config.layouts import run_layouts
from megarl.config.load import load_layout, read_config
from megarl.config.server_arguments import INHERITED, LAYOUT_UNKNOWN, server_mesh
from megarl.errors import ConfigError, LayoutError
from megarl.reshard.mesh import ServerMesh
from megarl.rollout.engine_args import known_arguments
from tests.actor.published import PUBLISHED

ARGS = "--rollout.engine_args."


def mesh_of(place, model: str, words: str) -> ServerMesh:
    (place.model / "config.json").write_text(json.dumps(PUBLISHED[model]))
    config = read_config(place.file, ["--rollout.parallel.tp", "8", *words.split()])
    return server_mesh(config, read_shape(place.model))


def refusals(place, model: str, words: str) -> list[str]:
    (place.model / "config.json").write_text(json.dumps(PUBLISHED[model]))
    with pytest.raises(ConfigError) as caught:
        load_layout(place.file, ["--rollout.parallel.tp", "8", *words.split()])
    return caught.value.violations


@pytest.mark.parametrize(
    ("model", "words", "fused"),
    [
        ("DeepSeek-V3", "", True),
        ("DeepSeek-V3", "--rollout.parallel.ep 8", False),
        ("DeepSeek-V3", f"{ARGS}disable_shared_experts_fusion true", False),
        ("DeepSeek-V3", f"{ARGS}moe_runner_backend flashinfer_trtllm", False),
        ("DeepSeek-V3", f"{ARGS}enable_two_batch_overlap true", False),
        ("Kimi-K2", "", False),
        ("Kimi-K2", f"{ARGS}enforce_shared_experts_fusion true", True),
        ("Moonlight-16B-A3B", "", False),
        ("GLM-4.5", "", True),
        ("GLM-4.5", f"{ARGS}enable_two_batch_overlap true", True),
        ("GLM-4.5", f"--rollout.parallel.ep 8 {ARGS}enforce_shared_experts_fusion true", False),
        ("GLM-4.5", "--launch.device cpu", False),
        ("Qwen3-30B-A3B", "", False),
    ],
)
def test_shared_expert_is_a_slot_where_sglang_makes_it_one(place, model, words, fused) -> None:
    assert mesh_of(place, model, words).fused_shared_experts is fused


def test_arguments_of_sglang_are_the_mesh_that_they_mean(place) -> None:
    words = (
        f"--rollout.parallel.ep 8 --rollout.parallel.attention_dp 4 {ARGS}moe_a2a_backend deepep "
        f"{ARGS}enable_dp_lm_head true {ARGS}moe_dense_tp_size 1"
    )
    assert mesh_of(place, "DeepSeek-V3", words) == ServerMesh(
        tp=8, ep=8, attention_dp=4, dp_head=True, dense_whole=True, shared_whole=True
    )


def test_flashinfers_cutlass_has_the_up_projection_first(place) -> None:
    (place.model / "config.json").write_text(json.dumps(PUBLISHED["Qwen3-30B-A3B"]))
    backend = f"{ARGS}moe_runner_backend"
    layouts = [
        run_layouts(load_layout(place.file, [backend, value])).destination
        for value in ("triton", "flashinfer_cutlass")
    ]
    at = [
        {
            piece.tensor.rpartition("experts.*.")[2]: piece.at[1]
            for piece in layout.rank(0).pieces
            if piece.local == "model.layers.0.mlp.experts.w13_weight"
        }
        for layout in layouts
    ]
    assert at == [
        {"gate_proj.weight": 0, "up_proj.weight": 768},
        {"gate_proj.weight": 768, "up_proj.weight": 0},
    ]


@pytest.mark.parametrize(
    ("model", "words", "text"),
    [
        (
            "DeepSeek-V3",
            f"{ARGS}moe_a2a_backend deepep",
            "use rollout.parallel.ep = 8, as many as rollout.parallel.tp",
        ),
        (
            "GLM-4.5",
            f"--rollout.parallel.ep 8 {ARGS}moe_a2a_backend megamoe",
            "moe_a2a_backend = 'megamoe': what ranks of SGLang's Glm4MoeForCausalLM then hold is "
            "not known; use 'deepep' or ",
        ),
        (
            "Llama-3.1-8B",
            f"{ARGS}moe_a2a_backend deepep",
            "SGLang's LlamaForCausalLM then hold is not known; leave it out",
        ),
        (
            "DeepSeek-V3",
            f"--rollout.parallel.ep 8 {ARGS}moe_a2a_backend deepep "
            f"{ARGS}enforce_shared_experts_fusion true",
            "leave out enforce_shared_experts_fusion",
        ),
        (
            "DeepSeek-V3",
            f"--rollout.parallel.tp 1 {ARGS}moe_a2a_backend nixl",
            "a server of one rank has nothing to exchange",
        ),
        ("GLM-4.5", f"{ARGS}moe_runner_backend triton_kernel", "how it holds experts is not known"),
        (
            "GLM-4.5",
            f"{ARGS}moe_runner_backend flashinfer_cutlass --rollout.precision.weights fp8",
            "SGLang has it for unquantized experts",
        ),
        (
            "GLM-4.5",
            f"{ARGS}moe_runner_backend flashinfer_cutlass --launch.device cpu",
            "a CPU has no such kernel",
        ),
        (
            "GLM-4.5",
            f"{ARGS}moe_runner_backend flashinfer_cutlass --rollout.parallel.ep 2",
            "SGLang wants rollout.parallel.ep = 1 or 8 (tp) with it",
        ),
        (
            "GLM-4.5",
            f"{ARGS}moe_runner_backend flashinfer_trtllm",
            "pads an expert's 1536 columns, cut over tp / ep = 8 ranks, to multiples of 128",
        ),
        ("GLM-4.5", f"{ARGS}attn_dp_size 2", "use rollout.parallel.attention_dp"),
        ("GLM-4.5", f"{ARGS}enable_eplb true", "enable_eplb = true: what the servers' ranks"),
        (
            "GLM-4.5",
            f"{ARGS}enable_dp_lm_head true",
            "enable_dp_lm_head needs rollout.parallel.attention_dp above 1",
        ),
    ],
)
def test_argument_that_no_layout_can_say_is_refused(place, model, words, text) -> None:
    found = refusals(place, model, words)
    assert len(found) == 1 and text in found[0], found


def test_harmless_values_of_refused_arguments_are_taken(place) -> None:
    words = [
        word
        for name, values in LAYOUT_UNKNOWN.items()
        for value in values[:1]
        for word in (f"{ARGS}{name}", str(value).lower())
    ]
    load_layout(place.file, words)


def test_refused_arguments_are_arguments_of_the_pinned_sglang() -> None:
    assert set(LAYOUT_UNKNOWN) <= known_arguments()[1].keys()


def test_run_refuses_arguments_whose_layout_is_not_known(place) -> None:
    assert "leave it out, or use 1" in place.violation(f"{ARGS}moe_dp_size", "2")


@pytest.mark.parametrize("name", INHERITED)
def test_variable_that_changes_the_layout_of_servers_is_refused(place, monkeypatch, name) -> None:
    monkeypatch.setenv(name, "1")
    with pytest.raises(ConfigError, match=f"{name} = 1 in the environment") as caught:
        load_layout(place.file)
    assert len(caught.value.violations) == 1


def test_shared_experts_that_sglang_fuses_into_several_slots_are_refused_with_what_to_do(
    place,
) -> None:
    model = {**PUBLISHED["GLM-4.5"], "n_shared_experts": 2}
    (place.model / "config.json").write_text(json.dumps(model))
    with pytest.raises(LayoutError, match="disable_shared_experts_fusion = true"):
        run_layouts(load_layout(place.file, []))


def test_families_say_for_themselves_with_which_exchanges_they_are_known() -> None:
    known = {name: set(family.served.all_to_all) for name, family in FAMILIES.items()}
    assert {name for name, backends in known.items() if backends} == {
        name for name, family in FAMILIES.items() if family.experts != "none"
    }


@pytest.mark.parametrize("size", ["3", "'1'", "1.0"])
def test_ranks_of_dense_layers_that_sglang_refuses_are_refused(place, size: str) -> None:
    [text] = refusals(place, "DeepSeek-V3", f"{ARGS}moe_dense_tp_size {size}")
    assert "SGLang takes only 1, or 8 as rollout.parallel.tp" in text


def test_dense_layers_over_all_ranks_are_cut_as_if_nothing_was_said(place) -> None:
    mesh = mesh_of(place, "DeepSeek-V3", f"{ARGS}moe_dense_tp_size 8")
    assert mesh == mesh_of(place, "DeepSeek-V3", "")
