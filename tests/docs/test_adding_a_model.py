"""The family on the page docs/adding-a-model.md, put through the checks that the page names."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from megarl.actor.families import FAMILIES
from megarl.actor.families.family import Family
from megarl.actor.parameters import block_table
from megarl.actor.shape import ModelShape
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
from tests.reshard.sglang_loaders import Case

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
    servers = sglang_layout(shape, ServerMesh(tp=2, servers=2))
    for source, destination in ((files, learner), (learner, servers), (servers, files)):
        check(make_plan(source, destination, Placement.apart(source, destination)))


@pytest.mark.parametrize("architecture", FAMILIES)
def test_every_family_travels_from_files_to_megatron_to_sglang_and_back(architecture: str) -> None:
    assert_travels(shape_of(FAMILIES[architecture]))


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


def test_sglangs_loaders_hold_what_the_page_says(added: Family, tmp_path: Path) -> None:
    shape = shape_of(added)
    tensors = save_checkpoint(tmp_path / "model", shape)
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    # SGLang builds the norms only where the config says so; transformers has them always.
    (tmp_path / "model" / "config.json").write_text(json.dumps({**config, "use_qk_norm": True}))
    meshes = [ServerMesh(tp=2), ServerMesh(tp=4)]
    cases = [asdict(Case(str(tmp_path / "model"), {"tp_size": mesh.tp})) for mesh in meshes]
    subprocess.run(
        [sys.executable, "-m", "tests.reshard.sglang_loaders", str(tmp_path)],
        input=json.dumps(cases),
        text=True,
        check=True,
        timeout=900,
        env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
    )
    for number, mesh in enumerate(meshes):
        layout, found = sglang_layout(shape, mesh), load_file(tmp_path / f"{number}.safetensors")
        for rank in layout.rank_ids:
            ours = held_by(layout, rank, tensors)
            assert {f"{rank}/{name}" for name in ours} == {
                name for name in found if name.startswith(f"{rank}/")
            }
            for name, array in ours.items():
                np.testing.assert_array_equal(array, found[f"{rank}/{name}"], err_msg=name)
