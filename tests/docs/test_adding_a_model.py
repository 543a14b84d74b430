"""The family on the page docs/adding-a-model.md, put through the checks that the page names."""

from __future__ import annotations

import json
import re
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

from megarl.actor.families import FAMILIES
from megarl.actor.families.family import Family, Served
from megarl.actor.parameters import SWITCHED, block_table, sizes
from megarl.actor.shape import ModelShape
from megarl.errors import LayoutError
from megarl.reshard.explicit import full_layout
from megarl.reshard.megatron import megatron_layout
from megarl.reshard.mesh import LearnerMesh, ServerMesh
from megarl.reshard.placement import Placement
from megarl.reshard.plan import make_plan
from megarl.reshard.sglang import sglang_layout
from megarl.reshard.simulate import check
from tests.actor import test_parameters as parameters
from tests.actor.shapes import LATENT, ROUTED, WITH_SHARED
from tests.reshard.sglang_checkpoints import held_by, save_checkpoint
from tests.reshard.sglang_loaders import Case, Loaders

PAGE = Path(__file__).parents[2] / "docs" / "adding-a-model.md"


def family_on_the_page() -> Family:
    """What the page's one block of Python defines."""
    (code,) = re.findall(
        r"^```python\n(.*?)^```", PAGE.read_text("utf-8"), re.DOTALL | re.MULTILINE
    )
    names: dict[str, object] = {}
    exec(code, names)
    (family,) = (value for value in names.values() if isinstance(value, Family))
    return family


def shape_of(family: Family) -> ModelShape:
    """A tiny shape that has whatever the family can have but layers of multi-token prediction."""
    shape = ModelShape(
        architecture=family.architecture,
        num_layers=3,
        hidden_size=32,
        num_heads=8,
        num_kv_heads=2,
        head_dim=8,
        intermediate_size=64,
        vocab_size=100,
        tie_embeddings=False,
        qkv_bias=bool(family.qkv_bias),
        qk_norm=bool(family.qk_norm),
        rms_norm_eps=1e-6,
        rope_theta=10000.0,
        rope_scaling=None,
        max_positions=128,
    )
    experts = {"none": None, "qwen3": ROUTED, "deepseek": WITH_SHARED}[family.experts]
    if family.attention == "latent":
        shape = replace(shape, mla=LATENT, num_kv_heads=8, head_dim=6)
    if experts is not None and not family.served.dense_layers:
        experts = replace(experts, dense_layers=())
    return replace(shape, moe=experts)


@pytest.fixture
def added(monkeypatch: pytest.MonkeyPatch) -> Family:
    family = family_on_the_page()
    assert family.architecture not in FAMILIES
    monkeypatch.setitem(FAMILIES, family.architecture, family)  # type: ignore[arg-type]
    return family


def assert_travels(shape: ModelShape) -> None:
    """From files to Megatron to SGLang and back to files: proved, and every element simulated."""
    table = block_table(shape)
    files = full_layout(table)
    experts = {"ep": 2, "etp": 2} if shape.moe else {}
    learner = megatron_layout(shape, LearnerMesh(tp=2, pp=3, dp=2, **experts))
    for mesh in server_meshes(FAMILIES[shape.architecture]):
        servers = sglang_layout(shape, mesh)
        for source, destination in ((learner, servers), (servers, files)):
            check(make_plan(source, destination, Placement.apart(source, destination)))
    check(make_plan(files, learner, Placement.apart(files, learner)))


def server_meshes(family: Family) -> list[ServerMesh]:
    """Servers that show whatever the family claims of SGLang's model, beside plain ones."""
    served = family.served
    wide = ServerMesh(tp=4, ep=1 if family.experts == "none" else 2)
    meshes = [ServerMesh(tp=2, servers=2), wide]
    if served.attention_dp:
        copies = replace(wide, attention_dp=2)
        meshes += [copies, replace(copies, dp_head=True, dense_whole=served.dense_whole)]
    return meshes + [ServerMesh(tp=2, pp=2)] * served.pipeline


@pytest.mark.parametrize("architecture", FAMILIES)
def test_every_family_travels_from_files_to_megatron_to_sglang_and_back(architecture: str) -> None:
    assert_travels(shape_of(FAMILIES[architecture]))


def test_the_page_lists_the_reserved_kinds_the_dims_and_the_fields_of_a_family() -> None:
    def first_cells(title: str) -> set[str]:
        section = PAGE.read_text("utf-8").partition(f"### {title}\n")[2].partition("\n#")[0]
        rows = re.findall(r"^\| (`.*?) \|", section, re.MULTILINE)
        return {word for row in rows for word in re.findall(r"`(\w+)`", row)}

    every = replace(shape_of(FAMILIES["DeepseekV3ForCausalLM"]), moe=WITH_SHARED)
    assert first_cells("Reserved kinds") == {kind for kinds in SWITCHED.values() for kind in kinds}
    assert first_cells("Dims") == sizes(every).keys()
    assert first_cells("Fields of a family") == {field.name for field in fields(Family)}


def test_the_pages_family_without_its_flag_is_refused(
    added: Family, monkeypatch: pytest.MonkeyPatch
) -> None:
    silent = replace(added, qk_norm=False)
    monkeypatch.setitem(FAMILIES, added.architecture, silent)  # type: ignore[arg-type]
    with pytest.raises(LayoutError, match=r"HunYuan.*'query_norm', and qk_norm=False"):
        block_table(shape_of(silent))


def test_the_pages_family_travels_as_the_others(added: Family) -> None:
    assert_travels(shape_of(added))


def test_the_pages_family_has_what_transformers_saves(added: Family, tmp_path: Path) -> None:
    parameters.test_table_and_shape_are_those_of_a_checkpoint_that_transformers_saves(
        shape_of(added), tmp_path
    )


@pytest.mark.parametrize("spec", ["te", "local"])
def test_each_engine_holds_each_parameter_of_the_pages_family_once(
    added: Family, spec: str
) -> None:
    parameters.test_each_engine_holds_each_parameter_once(shape_of(added), spec, "sequential")


def test_megatron_holds_the_pages_family_as_it_holds_qwen3(added: Family) -> None:
    shape, mesh = shape_of(added), LearnerMesh(tp=4, pp=3)
    qwen3 = megatron_layout(replace(shape, architecture="Qwen3ForCausalLM"), mesh)
    for ours, theirs in zip(megatron_layout(shape, mesh).ranks, qwen3.ranks, strict=True):
        assert set(ours.tensors) == set(theirs.tensors)
        assert {(p.local, p.box, p.at) for p in ours.pieces} == {
            (p.local, p.box, p.at) for p in theirs.pieces
        }


def test_the_pages_family_is_refused_what_it_does_not_claim(added: Family) -> None:
    shape = shape_of(added)
    assert added.served == Served(tied="one_stage")
    for mesh in (ServerMesh(tp=2, attention_dp=2), ServerMesh(pp=2), ServerMesh(dense_whole=True)):
        with pytest.raises(LayoutError, match="SGLang's HunYuanDenseV1ForCausalLM"):
            sglang_layout(shape, mesh)


def test_sglangs_loaders_hold_what_the_page_says(
    added: Family, tmp_path: Path, sglang_loaders: Loaders
) -> None:
    served: list[tuple[ModelShape, ServerMesh, dict[str, torch.Tensor]]] = []
    cases = []
    for tied in (False, True) if added.served.tied != "never" else (False,):
        shape, folder = replace(shape_of(added), tie_embeddings=tied), tmp_path / f"tied-{tied}"
        tensors = save_checkpoint(folder, shape)
        config = json.loads((folder / "config.json").read_text())
        # SGLang builds the norms only where the config says so; transformers has them always.
        (folder / "config.json").write_text(json.dumps({**config, "use_qk_norm": True}))
        for mesh in server_meshes(added):
            flags = {"tp_size": mesh.tp, "pp_size": mesh.pp, "ep_size": mesh.ep}
            if mesh.attention_dp > 1:
                flags |= {"attn_dp_size": mesh.attention_dp, "enable_dp_lm_head": mesh.dp_head}
            cases.append(Case(str(folder), flags))
            served.append((shape, mesh, tensors))
    sglang_loaders.load(cases, tmp_path)
    for number, (shape, mesh, tensors) in enumerate(served):
        layout, found = sglang_layout(shape, mesh), load_file(tmp_path / f"{number}.safetensors")
        for rank in range(mesh.size):
            ours = held_by(layout, rank, tensors)
            assert {f"{rank}/{name}" for name in ours} == {
                name for name in found if name.startswith(f"{rank}/")
            }
            for name, array in ours.items():
                np.testing.assert_array_equal(array, found[f"{rank}/{name}"], err_msg=name)
