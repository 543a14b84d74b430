"""Safetensors checkpoints as layouts, whole and broken."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from megarl.actor.parameters import parameter_table
from megarl.errors import ModelError
from megarl.reshard.files import checkpoint_files, checkpoint_layout, map_tensors, read_header
from megarl.reshard.layout import full_layout
from megarl.reshard.megatron import megatron_layout
from megarl.reshard.mesh import LearnerMesh
from megarl.reshard.plan import make_plan
from megarl.reshard.proof import prove_layout
from tests.reshard.models import (
    Arrays,
    assert_equal,
    execute,
    megatron_slices,
    numbered,
    tiny_shape,
)

SHAPE = tiny_shape()
TABLE = parameter_table(SHAPE)


def tensors() -> Arrays:
    return {name: array.astype(np.float32) for name, array in numbered(SHAPE).items()}


def save_single(folder: Path, arrays: Arrays) -> Path:
    path = folder / "model.safetensors"
    save_file(arrays, path)
    return path


def save_sharded(folder: Path, arrays: Arrays, num_files: int = 3) -> dict[str, str]:
    weight_map = {}
    for i in range(num_files):
        name = f"model-{i + 1:05d}-of-{num_files:05d}.safetensors"
        mine = dict(list(arrays.items())[i::num_files])
        save_file(mine, folder / name)
        weight_map |= dict.fromkeys(mine, name)
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return weight_map


def refused(folder: Path, *words: str) -> None:
    with pytest.raises(ModelError) as caught:
        checkpoint_layout(folder, TABLE)
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize("save", [save_single, save_sharded])
def test_checkpoint_is_read_into_megatron_ranks(tmp_path: Path, save: object) -> None:
    save(tmp_path, tensors())  # type: ignore[operator]
    layout = checkpoint_layout(tmp_path, TABLE)
    prove_layout(layout)
    learner = megatron_layout(SHAPE, LearnerMesh(tp=2, pp=2))
    files = [map_tensors(path) for path in checkpoint_files(tmp_path)]
    found = execute(make_plan(layout, learner), files, learner)
    wanted = [megatron_slices(SHAPE, LearnerMesh(2, 2), r, numbered(SHAPE), 128) for r in range(4)]
    assert_equal(found, wanted)


def test_checkpoint_is_written_by_the_same_planner(tmp_path: Path) -> None:
    learner, mesh = megatron_layout(SHAPE, LearnerMesh(tp=2, pp=2)), LearnerMesh(2, 2)
    arrays = [megatron_slices(SHAPE, mesh, r, numbered(SHAPE), 128) for r in range(4)]
    whole = full_layout(TABLE)
    (found,) = execute(make_plan(learner, whole), arrays, whole)
    path = save_single(tmp_path, {name: a.astype(np.float32) for name, a in found.items()})
    assert_equal([map_tensors(path)], [tensors()])


def test_bfloat16_is_mapped_as_its_bits(tmp_path: Path) -> None:
    header = {"w": {"dtype": "BF16", "shape": [2], "data_offsets": [0, 4]}}
    raw = json.dumps(header).encode()
    path = tmp_path / "model.safetensors"
    path.write_bytes(struct.pack("<Q", len(raw)) + raw + struct.pack("<2H", 0x3F80, 0x4000))
    assert map_tensors(path)["w"].tolist() == [0x3F80, 0x4000]


def test_rotary_tables_and_a_stored_tied_head_are_ignored(tmp_path: Path) -> None:
    tied = tiny_shape(tie_embeddings=True)
    arrays = tensors() | {"model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(2, np.float32)}
    save_single(tmp_path, arrays)
    checkpoint_layout(tmp_path, parameter_table(tied))


def test_folder_without_weights_is_refused(tmp_path: Path) -> None:
    refused(tmp_path, str(tmp_path), "model.safetensors")


def test_truncated_file_is_named(tmp_path: Path) -> None:
    path = save_single(tmp_path, tensors())
    path.write_bytes(path.read_bytes()[:-8])
    refused(tmp_path, str(path), "truncated")


@pytest.mark.parametrize(
    "content", [b"", b"\x01\x02", b"not a safetensors file at all", b"\0" * 64]
)
def test_file_of_something_else_is_named(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    refused(tmp_path, str(path), "safetensors")


def test_broken_header_is_named(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(struct.pack("<Q", 4) + b"{oh}" + b"\0" * 8)
    refused(tmp_path, str(path), "broken safetensors header")


def test_missing_shard_is_named(tmp_path: Path) -> None:
    name = save_sharded(tmp_path, tensors())["lm_head.weight"]
    (tmp_path / name).unlink()
    refused(tmp_path, name, "missing")


def test_index_that_is_not_json_is_named(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors.index.json").write_text("{")
    refused(tmp_path, "model.safetensors.index.json", "broken")


def test_missing_tensor_is_named(tmp_path: Path) -> None:
    arrays = tensors()
    del arrays["model.layers.1.mlp.up_proj.weight"]
    save_single(tmp_path, arrays)
    refused(tmp_path, "model.layers.1.mlp.up_proj.weight", "1 of")


def test_tensor_of_another_shape_is_named(tmp_path: Path) -> None:
    save_single(tmp_path, tensors() | {"model.norm.weight": np.ones(9, np.float32)})
    refused(tmp_path, "model.norm.weight", "[9]", "[8]")


def test_tensor_that_the_model_does_not_have_is_named(tmp_path: Path) -> None:
    name = "model.layers.0.self_attn.q_proj.bias"
    save_single(tmp_path, tensors() | {name: np.ones(16, np.float32)})
    refused(tmp_path, name, "config.json")


def test_quantized_tensor_is_refused(tmp_path: Path) -> None:
    save_single(tmp_path, tensors() | {"model.norm.weight": np.ones(8, np.int8)})
    refused(tmp_path, "model.norm.weight", "I8", "BF16")


def test_tensor_in_two_files_is_refused(tmp_path: Path) -> None:
    weight_map = save_sharded(tmp_path, tensors())
    extra = next(n for n in weight_map.values() if n != weight_map["model.norm.weight"])
    arrays = dict(map_tensors(tmp_path / extra))
    save_file(arrays | {"model.norm.weight": np.ones(8, np.float32)}, tmp_path / extra)
    refused(tmp_path, "model.norm.weight", "both")


def test_header_gives_dtype_shape_and_bytes(tmp_path: Path) -> None:
    path = save_single(tmp_path, {"w": np.ones((2, 3), np.float16)})
    stored = read_header(path)["w"]
    assert (stored.dtype, stored.shape, stored.end - stored.start) == ("F16", (2, 3), 12)
    assert stored.end == path.stat().st_size
