"""The parameter table: Hugging Face names and shapes, each tensor once."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers
from safetensors import safe_open
from safetensors.torch import save_file
from transformers.modeling_layers import MtpModel

from megarl.actor.families import FAMILIES
from megarl.actor.families.dense import ENDS, gated_mlp, grouped_query_attention
from megarl.actor.families.family import Part
from megarl.actor.families.latent import latent_attention
from megarl.actor.families.moe import routed_experts, router, shared_experts
from megarl.actor.parameters import block_table, check_family, parameter_table
from megarl.actor.shape import ModelShape, read_shape
from megarl.errors import LayoutError
from tests.actor.shapes import LATENT, OF_FAMILY, ROUTED, WITH_SHARED, tiny_shape

DENSE = [name for name, family in FAMILIES.items() if family.experts == "none"]


def config_of(shape: ModelShape) -> transformers.PretrainedConfig:
    """The Hugging Face config of a shape, written field by field."""
    values: dict[str, object] = {
        "vocab_size": shape.vocab_size,
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "max_position_embeddings": shape.max_positions,
        "rms_norm_eps": shape.rms_norm_eps,
        "rope_parameters": {"rope_type": "default", "rope_theta": shape.rope_theta},
        "tie_word_embeddings": shape.tie_embeddings,
    }
    if shape.rotary_fraction != 1:
        values["partial_rotary_factor"] = shape.rotary_fraction
    if (moe := shape.moe) is not None:
        values |= {
            "num_experts_per_tok": moe.experts_per_token,
            "moe_intermediate_size": moe.expert_intermediate_size,
            "norm_topk_prob": moe.normalize,
        }
        if shape.architecture.startswith("Qwen3"):
            values |= {"num_experts": moe.num_experts, "mlp_only_layers": [*moe.dense_layers]}
        else:
            values |= {
                "n_routed_experts": moe.num_experts,
                "n_shared_experts": 2,
                "n_group": moe.num_groups,
                "topk_group": moe.groups_per_token,
                "routed_scaling_factor": moe.scaling,
                "first_k_dense_replace": len(moe.dense_layers),
                "num_mtp_layers": shape.num_mtp_layers,
            }
    if (mla := shape.mla) is not None:
        del values["head_dim"]
        values |= {
            "q_lora_rank": mla.q_lora_rank,
            "kv_lora_rank": mla.kv_lora_rank,
            "qk_nope_head_dim": mla.qk_nope_head_dim,
            "qk_rope_head_dim": mla.qk_rope_head_dim,
            "v_head_dim": mla.v_head_dim,
        }
    if shape.architecture.startswith("Glm"):
        values |= {"attention_bias": shape.qkv_bias, "use_qk_norm": shape.qk_norm}
    stem = shape.architecture.removesuffix("ForCausalLM")
    return getattr(transformers, f"{stem}Config")(**values)


CASES = [
    *(tiny_shape(name) for name in OF_FAMILY),
    *(tiny_shape(name, tie_embeddings=True) for name in DENSE),
    tiny_shape("DeepseekV3ForCausalLM", mla=replace(LATENT, q_lora_rank=None)),
    tiny_shape("DeepseekV3ForCausalLM", moe=replace(WITH_SHARED, dense_layers=(0, 1, 2))),
    tiny_shape("Glm4MoeForCausalLM", qkv_bias=False, qk_norm=False),
    tiny_shape(
        "Qwen3MoeForCausalLM",
        tie_embeddings=True,
        moe=replace(ROUTED, dense_layers=(1,)),
    ),
]


def stored(shape: ModelShape) -> dict[str, tuple[int, ...]]:
    """The table's checkpoint tensors."""
    return {
        name: parameter.shape[1:] if parameter.stacked else parameter.shape
        for parameter in parameter_table(shape)
        for name in parameter.stored_names()
    }


@pytest.mark.parametrize("shape", CASES, ids=lambda shape: shape.architecture)
def test_table_and_shape_are_those_of_a_checkpoint_that_transformers_saves(
    shape: ModelShape, tmp_path: Path
) -> None:
    model = getattr(transformers, shape.architecture)(config_of(shape))
    model.save_pretrained(tmp_path)
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        saved = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    assert stored(shape) == saved
    assert read_shape(tmp_path) == shape


@pytest.mark.parametrize("architecture", ["DeepseekV3ForCausalLM", "Glm4MoeForCausalLM"])
def test_transformers_loads_its_prediction_layer_from_the_names_of_the_table(
    architecture: str, tmp_path: Path
) -> None:
    shape = tiny_shape(architecture, num_mtp_layers=1)
    random = torch.Generator().manual_seed(5)
    weights = {name: torch.rand(size, generator=random) for name, size in stored(shape).items()}
    config_of(shape).save_pretrained(tmp_path)
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    model = getattr(transformers, architecture).from_pretrained(tmp_path)
    # transformers knows the layer by its number in the large model.
    model._keys_to_ignore_on_load_unexpected = [r"model\.layers\.3.*"]
    layer = MtpModel.from_pretrained(model).layers[0]  # raises where a tensor is missing
    table = block_table(shape)
    state = layer.state_dict()
    assert sum(tensor.numel() for tensor in state.values()) == sum(
        parameter.num_elements for parameter in table.kinds["mtp"]
    )
    for name, theirs in {
        "enorm": "enorm",
        "hnorm": "hnorm",
        "eh_proj": "eh_proj",
        "shared_head.norm": "post_norm",
        "self_attn.o_proj": "mtp_block.self_attn.o_proj",
        "mlp.shared_experts.down_proj": "mtp_block.mlp.shared_experts.down_proj",
    }.items():
        assert torch.equal(weights[f"model.layers.3.{name}.weight"], state[f"{theirs}.weight"])
    assert table.duplicates == (
        "model.layers.3.embed_tokens.weight",
        "model.layers.3.shared_head.head.weight",
    )


@pytest.mark.parametrize("experts", ["per_expert", "grouped", "sequential"])
@pytest.mark.parametrize("spec", ["te", "local"])
@pytest.mark.parametrize("shape", CASES, ids=lambda shape: shape.architecture)
def test_each_engine_holds_each_parameter_once(shape: ModelShape, spec: str, experts: str) -> None:
    shape = replace(shape, num_mtp_layers=1 if "mtp" in FAMILIES[shape.architecture].blocks else 0)
    for kind, parameters in block_table(shape).kinds.items():
        part = FAMILIES[shape.architecture].blocks[kind]
        kinds = {parameter.kind for parameter in parameters}
        for table in (part.megatron, part.sglang):
            held = Counter(
                kind
                for tensor in table
                if kinds.issuperset(tensor.kinds) and {spec, experts}.issuperset(tensor.forms)
                for kind in tensor.kinds
            )
            assert held == dict.fromkeys(kinds, 1), kind


def test_layers_come_in_the_order_of_the_forward_pass() -> None:
    shape = tiny_shape("DeepseekV3ForCausalLM", num_mtp_layers=1)
    layers = [p.layer for p in parameter_table(shape) if p.layer is not None]
    assert layers == sorted(layers)
    assert set(layers) == {0, 1, 2, 3}


def test_scales_of_an_fp8_checkpoint_follow_their_tensors() -> None:
    table = parameter_table(tiny_shape("DeepseekV3ForCausalLM"), fp8_block=(8, 8))
    scaled = {p.name.removesuffix("_scale_inv"): p for p in table if p.name.endswith("_scale_inv")}
    assert {p.name for p in table if p.precision == "float8"} == set(scaled)
    experts = scaled["model.layers.1.mlp.experts.*.down_proj.weight"]
    assert experts.shape == (8, 2, 1)
    assert scaled["model.layers.1.self_attn.kv_a_proj_with_mqa.weight"].shape == (1, 2)
    plain = {p.name for p in table if p.precision == "policy"}
    assert "model.layers.1.mlp.gate.weight" in plain


@pytest.mark.parametrize("architecture", FAMILIES)
def test_no_family_has_tensors_that_its_fields_say_it_never_has(architecture: str) -> None:
    check_family(FAMILIES[architecture])


@pytest.mark.parametrize(
    ("part", "fields", "named"),
    [
        (
            grouped_query_attention() + gated_mlp(),
            {"qkv_bias": True},
            "q_norm.weight is of kind 'query_norm', and qk_norm=False",
        ),
        (
            grouped_query_attention() + gated_mlp(),
            {"qk_norm": True},
            "q_proj.bias is of kind 'query_bias', and qkv_bias=False",
        ),
        (
            latent_attention() + gated_mlp(),
            {},
            "q_a_proj.weight is of kind 'query_down', and attention='grouped'",
        ),
        (
            router() + routed_experts(),
            {"experts": "qwen3"},
            "e_score_correction_bias is of kind 'router_bias', and experts='qwen3'",
        ),
        (
            shared_experts(),
            {"experts": "qwen3"},
            "gate_proj.weight is of kind 'shared_gate', and experts='qwen3'",
        ),
        (gated_mlp() + gated_mlp(), {}, "is a second tensor of kind 'mlp_norm'"),
    ],
    ids=["norms", "biases", "low ranks", "router bias", "shared experts", "twice"],
)
def test_family_whose_tensors_would_be_left_out_everywhere_is_refused(
    part: Part, fields: dict[str, object], named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    llama = FAMILIES["LlamaForCausalLM"]
    wrong = replace(llama, blocks={"dense": part, **ENDS}, **fields)  # type: ignore[arg-type]
    monkeypatch.setitem(FAMILIES, llama.architecture, wrong)  # type: ignore[arg-type]
    with pytest.raises(LayoutError) as error:
        block_table(tiny_shape(llama.architecture))
    assert f"family {llama.architecture}, block dense: model.layers." in str(error.value)
    assert named in str(error.value)


@pytest.mark.parametrize("field", ["qkv_bias", "qk_norm"])
def test_shape_that_has_what_its_family_never_has_is_refused(field: str) -> None:
    with pytest.raises(LayoutError, match=f"{field} of the shape .* LlamaForCausalLM"):
        block_table(tiny_shape("LlamaForCausalLM", **{field: True}))


@pytest.mark.parametrize("block", [(0, 128), (128, -1)])
def test_float8_block_without_elements_is_refused(block: tuple[int, int]) -> None:
    with pytest.raises(LayoutError, match=rf"fp8_block is \({block[0]}, {block[1]}\)"):
        block_table(tiny_shape("LlamaForCausalLM"), block)
