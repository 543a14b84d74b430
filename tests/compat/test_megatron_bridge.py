"""Megatron-Bridge's parameter mappings against megarl's own tables."""

from __future__ import annotations

import doctest
import json
import subprocess
import sys
import zipfile
from collections.abc import Iterable
from dataclasses import replace

import pytest

from megarl.actor.families import FAMILIES
from megarl.actor.families.family import Part
from megarl.actor.parameters import block_table
from megarl.actor.shape import ModelShape
from megarl.compat import megatron_bridge
from megarl.compat.megatron_bridge import PACKAGE_VERSIONS, BridgeTables, bridge_tables
from megarl.errors import LayoutError
from megarl.reshard.megatron import megatron_layout
from megarl.reshard.mesh import LearnerMesh
from tests.actor.shapes import tiny_shape

TE, LOCAL = ("te", "per_expert"), ("local", "sequential")


class Mapping:
    """What a mapping object of megatron-bridge shows; subclasses bear its classes' names."""

    def __init__(self, megatron_param: str, hf_param: object) -> None:
        self.megatron_param = megatron_param
        self.hf_param = hf_param


class AutoMapping(Mapping):
    permute_dims: object = None


class QKVMapping(Mapping):
    pass


class GatedMLPMapping(Mapping):
    pass


class ReplicatedMapping(Mapping):
    pass


class RowParallelMapping(Mapping):
    pass


class MambaInProjMapping(Mapping):
    pass


class RMSNorm2ZeroCenteredRMSNormMapping(AutoMapping):
    pass


OURS, THEIRS = "decoder.layers.*.", "model.layers.*."
ENDS = [
    AutoMapping("embedding.word_embeddings.weight", "model.embed_tokens.weight"),
    AutoMapping("output_layer.weight", "lm_head.weight"),
    AutoMapping("decoder.final_layernorm.weight", "model.norm.weight"),
]
QKV = QKVMapping(
    f"{OURS}self_attention.linear_qkv.weight",
    {part: f"{THEIRS}self_attn.{part}_proj.weight" for part in "qkv"},
)
ATTENTION = [
    AutoMapping(
        f"{OURS}self_attention.linear_qkv.layer_norm_weight", f"{THEIRS}input_layernorm.weight"
    ),
    AutoMapping(f"{OURS}input_layernorm.weight", f"{THEIRS}input_layernorm.weight"),
    QKV,
    RowParallelMapping(
        f"{OURS}self_attention.linear_proj.weight", f"{THEIRS}self_attn.o_proj.weight"
    ),
]
HEAD_NORMS = [
    ReplicatedMapping(
        f"{OURS}self_attention.{x}_layernorm.weight", f"{THEIRS}self_attn.{x}_norm.weight"
    )
    for x in "qk"
]
MLP_NORM = AutoMapping(
    f"{OURS}pre_mlp_layernorm.weight", f"{THEIRS}post_attention_layernorm.weight"
)


def gated(ours: str, theirs: str) -> Mapping:
    names = {part: f"{THEIRS}mlp.{theirs}{part}_proj.weight" for part in ("gate", "up")}
    return GatedMLPMapping(f"{OURS}mlp.{ours}", names)


MLP = [
    MLP_NORM,
    AutoMapping(
        f"{OURS}mlp.linear_fc1.layer_norm_weight", f"{THEIRS}post_attention_layernorm.weight"
    ),
    gated("linear_fc1.weight", ""),
    AutoMapping(f"{OURS}mlp.linear_fc2.weight", f"{THEIRS}mlp.down_proj.weight"),
]
EXPERTS = [
    MLP_NORM,
    AutoMapping(f"{OURS}mlp.router.weight", f"{THEIRS}mlp.gate.weight"),
    gated("experts.linear_fc1.weight*", "experts.*."),
    gated("experts.local_experts.*.linear_fc1.weight", "experts.*."),
    *(
        AutoMapping(f"{OURS}mlp.experts.{name}", f"{THEIRS}mlp.experts.*.down_proj.weight")
        for name in ("linear_fc2.weight*", "local_experts.*.linear_fc2.weight")
    ),
]
LISTS: dict[str, list[Mapping]] = {
    "LlamaForCausalLM": ENDS + ATTENTION + MLP,
    "Qwen3ForCausalLM": ENDS + ATTENTION + HEAD_NORMS + MLP,
    "Qwen3MoeForCausalLM": ENDS + ATTENTION + HEAD_NORMS + EXPERTS,
}


def assert_same_megatron_side(
    monkeypatch: pytest.MonkeyPatch,
    found: BridgeTables,
    shape: ModelShape,
    forms: Iterable[tuple[str, str]] = (TE, LOCAL),
) -> None:
    """The tables found give the same parameters, and the same layout of every rank, as ours."""
    mesh = LearnerMesh(tp=2, pp=3, dp=2, ep=2 if shape.moe else 1)
    own = FAMILIES[shape.architecture]
    ours = [megatron_layout(shape, mesh, 8, forms=form) for form in forms]
    kinds = block_table(shape).kinds
    sides = {b: Part(p.weights, p.megatron) for b, p in found.blocks.items() if b in kinds}
    with monkeypatch.context() as patch:
        patch.setitem(FAMILIES, own.architecture, replace(own, blocks=sides))  # type: ignore[arg-type]
        theirs = [megatron_layout(shape, mesh, 8, forms=form) for form in forms]
    for mine, other in zip(ours, theirs, strict=True):
        assert set(other.parameters) == set(mine.parameters)
        for a, b in zip(mine.ranks, other.ranks, strict=True):
            assert set(a.tensors) == set(b.tensors)
            assert set(a.pieces) == set(b.pieces)
            assert set(a.paddings) == set(b.paddings)


@pytest.mark.parametrize("architecture", LISTS)
def test_mappings_of_a_family_amount_to_its_own_table(
    monkeypatch: pytest.MonkeyPatch, architecture: str
) -> None:
    found = bridge_tables(LISTS[architecture])
    assert found.left_out == ()
    assert_same_megatron_side(monkeypatch, found, tiny_shape(architecture))


def test_hugging_faces_names_are_those_of_the_mappings() -> None:
    renamed = [
        m if m is not QKV else QKVMapping(m.megatron_param, dict.fromkeys("qkv", f"{THEIRS}x"))
        for m in LISTS["LlamaForCausalLM"]
    ]
    weights = bridge_tables(renamed).blocks["dense"].weights
    assert {w.kind for w in weights if w.name == "model.layers.{layer}.x"} == {
        "query",
        "key",
        "value",
    }


@pytest.mark.parametrize(
    ("mapping", "words"),
    [
        (MambaInProjMapping(f"{OURS}x", "y"), r"a MambaInProjMapping: megarl does not.* by hand"),
        (
            RMSNorm2ZeroCenteredRMSNormMapping("decoder.final_layernorm.weight", "a"),
            "adds 1 to the values, and plans only copy",
        ),
        (AutoMapping(f"{OURS}mlp.other.weight", "y"), r"mlp.other.weight is no tensor.* ignore it"),
        (
            AutoMapping("embedding.word_embeddings.weight", "model.other.weight"),
            "holds model.other.weight, another mapping of the same embedding model.embed_tokens",
        ),
        (
            ReplicatedMapping(f"{OURS}mlp.linear_fc2.weight", f"{THEIRS}mlp.down_proj.weight"),
            "a ReplicatedMapping of 1 tensors, but megarl cuts it as columns of down",
        ),
        (AutoMapping(f"{OURS}self_attention.linear_qkv.weight", "y"), "cuts it as grouped_qkv"),
        (QKVMapping(f"{OURS}x", {"q": "a", "k": "b"}), "not a name for each of q, k, v"),
        (object(), "a object has no megatron_param"),
    ],
)
def test_what_is_not_read_is_named(mapping: object, words: str) -> None:
    with pytest.raises(LayoutError, match=words):
        bridge_tables([*LISTS["LlamaForCausalLM"], mapping])


def test_example_in_the_module_is_what_runs() -> None:
    assert doctest.testmod(megatron_bridge).failed == 0


def test_mapping_that_permutes_dims_is_refused() -> None:
    turned = AutoMapping(f"{OURS}mlp.linear_fc2.weight", f"{THEIRS}mlp.down_proj.weight")
    turned.permute_dims = (1, 0)
    with pytest.raises(LayoutError, match="permutes dims"):
        bridge_tables([*ENDS, *ATTENTION, turned])


MODULES = {
    "llama.llama_bridge": "LlamaForCausalLM",
    "qwen.qwen2_bridge": "Qwen2ForCausalLM",
    "qwen.qwen3_bridge": "Qwen3ForCausalLM",
    "qwen.qwen3_moe_bridge": "Qwen3MoeForCausalLM",
    "deepseek.deepseek_v3_bridge": "DeepseekV3ForCausalLM",
    "glm.glm45_bridge": "Glm4MoeForCausalLM",
}
# No GLM-4.5 has it: its shared experts have no gate.
ABSENT = {"glm.glm45_bridge": ["decoder.layers.*.mlp.shared_experts.router.weight"]}


@pytest.fixture(scope="module")
def registries(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[object]]:
    """The mappings of the real registries, each as a stand-in of its class's name."""
    folder = tmp_path_factory.mktemp("bridge")
    download = [sys.executable, "-m", "pip", "download", f"megatron-bridge=={PACKAGE_VERSIONS[0]}"]
    options = ["--no-deps", "--ignore-requires-python", "--only-binary", ":all:", "-q", "-d"]
    fetched = subprocess.run([*download, *options, str(folder)], capture_output=True, text=True)
    if fetched.returncode:
        pytest.skip(f"megatron-bridge cannot be fetched: {fetched.stderr[-200:]}")
    (wheel,) = folder.glob("*.whl")
    zipfile.ZipFile(wheel).extractall(folder / "unpacked")
    program = [sys.executable, "-m", "tests.compat.bridge_registries", str(folder / "unpacked")]
    out = subprocess.run([*program, *MODULES], check=True, capture_output=True, text=True).stdout
    return {
        module: [stand_in(*fields) for fields in rows] for module, rows in json.loads(out).items()
    }


def stand_in(name: str, megatron: str, hf: object, permute: object) -> object:
    made = type(name, (Mapping,), {})(megatron, hf)
    made.permute_dims = permute  # type: ignore[attr-defined]
    return made


@pytest.mark.slow
@pytest.mark.parametrize("module", MODULES)
def test_real_registry_amounts_to_megarls_table(
    monkeypatch: pytest.MonkeyPatch, registries: dict[str, list[object]], module: str
) -> None:
    family = FAMILIES[MODULES[module]]
    num_layers = 3  # what the program's config says
    found = bridge_tables(registries[module], num_layers, ABSENT.get(module, ()))
    mtp = 1 if "mtp" in family.blocks else 0
    shape = tiny_shape(family.architecture, num_mtp_layers=mtp)
    # GLM's registry has the grouped experts only.
    forms = [TE] if module == "glm.glm45_bridge" else [TE, LOCAL]
    assert_same_megatron_side(monkeypatch, found, shape, forms)


@pytest.mark.slow
def test_real_registry_with_a_tensor_of_no_model_is_refused(
    registries: dict[str, list[object]],
) -> None:
    with pytest.raises(LayoutError, match=r"shared_experts\.router\.weight is no tensor"):
        bridge_tables(registries["glm.glm45_bridge"], 3)
