"""A checkpoint written by all learner ranks at once: whole, loadable, bit for bit the policy's."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from megarl.config.model_folder import COPIED
from megarl.float8 import BlockScaling
from megarl.reshard.files import INDEX
from megarl.reshard.mesh import LearnerMesh
from megarl.weight_sync.checkpoint_files import runs
from tests.reshard.models import tiny_shape
from tests.reshard.sglang_checkpoints import hf_config
from tests.reshard.test_sglang_loaders import QWEN3, large
from tests.weight_sync import full_ranks, tiny
from tests.weight_sync.forked import Ranks
from tests.weight_sync.full_ranks import Policy, stored
from tests.weight_sync.servers import make_model

MESH = LearnerMesh(tp=2, pp=2)


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    made = full_ranks.start(4)
    yield made
    made.kill()


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = make_model(tmp_path / "model")
    (folder / "tokenizer.json").write_text("{}")
    (folder / "optimizer.pt").write_text("large")
    return folder


def test_folder_loads_in_transformers_and_equals_the_policy(
    ranks: Ranks, model: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "out" / "v000001-x"
    policy = Policy(tiny.SHAPE, MESH, seed=6)
    assert ranks.ask(("write", policy, (folder, model, 1 << 30))) == [True] * 4
    names = {path.name for path in folder.iterdir()}
    assert names == {"model.safetensors", "config.json", "tokenizer.json"}
    loaded = AutoModelForCausalLM.from_pretrained(folder, dtype="auto").state_dict()
    for name, tensor in tiny.weights(tiny.SHAPE, 6).items():
        assert torch.equal(loaded[name], tensor), name
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]


def test_float8_is_written_as_deepseek_ships_it(ranks: Ranks, model: Path, tmp_path: Path) -> None:
    folder, shape = tmp_path / "v000003-x", large(QWEN3)
    policy = Policy(shape, LearnerMesh(tp=2, dp=2), 7, "bf16", BlockScaling(128, 128))
    assert ranks.ask(("write", policy, (folder, model, 200_000))) == [True] * 4
    config = json.loads((folder / "config.json").read_text())
    assert config["quantization_config"] == hf_config(shape, (128, 128))["quantization_config"]
    found = {}
    for path in folder.glob("*.safetensors"):
        found |= load_file(path)
    wanted = stored(shape, 7, "bf16", float8=True)
    assert sorted(found) == sorted(wanted)
    for name, tensor in found.items():
        assert tensor.dtype == wanted[name].dtype
        assert torch.equal(tensor.view(torch.uint8), wanted[name].view(torch.uint8)), name


@pytest.mark.parametrize("family", ["Qwen3MoeForCausalLM", "DeepseekV3ForCausalLM"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_several_files_hold_every_tensor_once(
    ranks: Ranks, model: Path, tmp_path: Path, family: str, dtype: str
) -> None:
    folder = tmp_path / "v000002-x"
    policy = Policy(tiny_shape(family), MESH, 7, dtype)
    assert ranks.ask(("write", policy, (folder, model, 4000))) == [True] * 4
    index = json.loads((folder / INDEX).read_text())["weight_map"]
    wanted = stored(policy.shape, 7, dtype)
    assert sorted(index) == sorted(wanted)
    files = sorted(folder.glob("*.safetensors"))
    assert len(files) > 2
    for path in files:
        for name, tensor in load_file(path).items():
            assert index[name] == path.name
            assert tensor.dtype == wanted[name].dtype
            assert torch.equal(tensor, wanted[name]), name


def test_config_says_the_precision_of_what_was_written(
    ranks: Ranks, model: Path, tmp_path: Path
) -> None:
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "quantization_config": {}}))
    folder = tmp_path / "v000003-x"
    ranks.ask(("write", Policy(tiny.SHAPE, MESH, 8, "bf16"), (folder, model, 1 << 30)))
    written = json.loads((folder / "config.json").read_text())
    assert written == {**config, "torch_dtype": "bfloat16"}
    assert ".pt" not in COPIED


def test_folder_is_not_there_where_a_rank_fails(ranks: Ranks, model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "v000004-x"
    policy = Policy(tiny.SHAPE, MESH, seed=6)
    answers = ranks.ask(("write", policy, (folder, model, 1 << 30, 2)))
    assert all("learner rank 2" in answer and str(folder) in answer for answer in answers)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model"]


def test_folder_that_cannot_be_made_is_named(ranks: Ranks, model: Path, tmp_path: Path) -> None:
    closed = tmp_path / "closed"
    closed.write_text("a file, into which root cannot write a folder either")
    policy = Policy(tiny.SHAPE, MESH, seed=6)
    answers = ranks.ask(("write", policy, (closed / "v1-x", model, 1 << 30)))
    assert all(f"Not a directory: '{closed}" in answer for answer in answers)


def test_runs_of_a_box_cover_it_once() -> None:
    shape, box = (3, 4, 5), ((1, 3), (2, 4), (0, 5))
    length, offsets = runs(shape, box)
    flat = torch.arange(60).view(shape)
    found = [flat.view(-1)[at : at + length] for at in offsets]
    assert length == 10
    assert torch.equal(torch.cat(found), flat[1:3, 2:4].reshape(-1))
