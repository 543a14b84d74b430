"""Safetensors checkpoints as layouts, whole and broken."""

from __future__ import annotations

import json
import struct
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file
from safetensors.torch import save_file as save_tensors

from megarl.actor.parameters import BlockTable, block_table
from megarl.actor.shape import ModelShape
from megarl.errors import ModelError
from megarl.reshard.explicit import full_layout
from megarl.reshard.files import (
    StoredTensor,
    checkpoint_files,
    checkpoint_layout,
    layout_of_headers,
    map_tensors,
    policy_headers,
    read_header,
)
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
TABLE = block_table(SHAPE)


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


def refused(folder: Path, *words: str, table: BlockTable = TABLE) -> None:
    with pytest.raises(ModelError) as caught:
        checkpoint_layout(folder, table)
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    ("num_files", "shown"),
    [
        (1, "files model-00001-of-00001.safetensors"),
        (3, "files " + ", ".join(f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3))),
        (4, "files model-00001-of-00004.safetensors to model-00004-of-00004.safetensors"),
    ],
)
def test_layout_of_files_is_named_after_three_of_them_or_the_first_and_the_last(
    tmp_path: Path, num_files: int, shown: str
) -> None:
    save_sharded(tmp_path, tensors(), num_files)
    assert checkpoint_layout(tmp_path, TABLE).kind == shown


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
    checkpoint_layout(tmp_path, block_table(tied))


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


def by_expert(
    shape: ModelShape, fp8_block: tuple[int, int] | None = None
) -> dict[str, torch.Tensor]:
    """Every tensor of a checkpoint by its name there: numbered, and float8 where it is quantized.

    A float8 tensor is numbered from 0 to 126 over and over: as bits those are all finite.
    """
    found: dict[str, torch.Tensor] = {}
    first = 1
    for parameter in block_table(shape, fp8_block).parameters:
        count = parameter.num_elements
        numbers = torch.arange(first, first + count).reshape(parameter.shape)
        first += count
        if parameter.precision == "float8":
            numbers = (numbers % 127).to(torch.uint8).view(torch.float8_e4m3fn)
        else:
            numbers = numbers.float()
        names = parameter.stored_names()
        parts = list(numbers) if parameter.stacked else [numbers]
        found |= {name: part.contiguous() for name, part in zip(names, parts, strict=True)}
    return found


MIXED = tiny_shape("DeepseekV3ForCausalLM", num_layers=3, num_mtp_layers=1)
COPIES = ("model.layers.3.embed_tokens.weight", "model.layers.3.shared_head.head.weight")


def save_torch(folder: Path, arrays: dict[str, torch.Tensor], num_files: int = 4) -> None:
    weight_map = {}
    for i in range(num_files):
        name = f"model-{i}.safetensors"
        mine = dict(list(arrays.items())[i::num_files])
        save_tensors(mine, folder / name)
        weight_map |= dict.fromkeys(mine, name)
    index = {"weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def test_experts_one_by_one_are_read_into_megatron_ranks(tmp_path: Path) -> None:
    copy = torch.zeros(MIXED.vocab_size, MIXED.hidden_size)
    save_torch(tmp_path, by_expert(MIXED) | {name: copy.clone() for name in COPIES})
    layout = checkpoint_layout(tmp_path, block_table(MIXED))
    prove_layout(layout)
    mesh = LearnerMesh(tp=2, ep=2)
    files = [map_tensors(path) for path in checkpoint_files(tmp_path)]
    for forms in (("te", "per_expert"), ("te", "grouped")):
        learner = megatron_layout(MIXED, mesh, forms=forms)
        found = execute(make_plan(layout, learner), files, learner)
        wanted = [
            megatron_slices(MIXED, mesh, rank, numbered(MIXED), 128, forms=forms)
            for rank in range(2)
        ]
        assert_equal(found, wanted)


def test_float8_weights_are_mapped_as_bits_with_their_scales(tmp_path: Path) -> None:
    stored = by_expert(MIXED, (4, 2))
    save_torch(tmp_path, stored)
    table = block_table(MIXED, (4, 2))
    layout = checkpoint_layout(tmp_path, table)
    prove_layout(layout)
    files = [map_tensors(path) for path in checkpoint_files(tmp_path)]
    whole = full_layout(table)
    (found,) = execute(make_plan(layout, whole), files, whole)
    for parameter in table.parameters:
        names = parameter.stored_names()
        parts = [stored[name] for name in names]
        bits = [p.view(torch.uint8) if p.dtype == torch.float8_e4m3fn else p for p in parts]
        wanted = torch.stack(bits) if parameter.stacked else bits[0]
        np.testing.assert_array_equal(found[parameter.name], wanted.numpy())
    assert {a.dtype.name for arrays in files for a in arrays.values()} == {"uint8", "float32"}


def test_float8_weights_are_refused_where_config_json_says_nothing_of_them(tmp_path: Path) -> None:
    save_torch(tmp_path, by_expert(MIXED, (4, 2)))
    refused(tmp_path, "F8_E4M3", "quantization_config", table=block_table(MIXED))


def test_weights_without_scales_are_refused_where_config_json_says_float8(tmp_path: Path) -> None:
    save_torch(tmp_path, by_expert(MIXED))
    refused(tmp_path, "F32", "F8_E4M3", table=block_table(MIXED, (4, 2)))


def test_prediction_layer_that_config_json_does_not_count_is_named(tmp_path: Path) -> None:
    save_torch(tmp_path, by_expert(MIXED))
    without = block_table(replace(MIXED, num_mtp_layers=0))
    refused(tmp_path, "layer 3", "0 to 2", "num_nextn_predict_layers", table=without)


@pytest.mark.parametrize("has_layer", [True, False])
def test_policy_is_read_without_the_prediction_layer_whether_it_is_stored_or_not(
    tmp_path: Path, has_layer: bool
) -> None:
    copies = {name: torch.zeros(MIXED.vocab_size, MIXED.hidden_size) for name in COPIES}
    stored = by_expert(MIXED) | copies
    kept = {n: t for n, t in stored.items() if has_layer or not n.startswith("model.layers.3.")}
    save_torch(tmp_path, kept)
    policy = block_table(replace(MIXED, num_mtp_layers=0))
    headers = policy_headers(tmp_path, block_table(MIXED), policy)
    prove_layout(layout_of_headers(headers, policy))
    names = {name for header in headers.values() for name in header}
    assert names == {n for n in stored if not n.startswith("model.layers.3.")}


def test_missing_expert_and_expert_of_another_shape_are_named(tmp_path: Path) -> None:
    name = "model.layers.1.mlp.experts.2.up_proj.weight"
    table, stored = block_table(MIXED), by_expert(MIXED)
    save_torch(tmp_path, {n: t for n, t in stored.items() if n != name})
    refused(tmp_path, name, "1 of", table=table)
    save_torch(tmp_path, stored | {name: torch.zeros(8, 9)})
    refused(tmp_path, name, "[8, 9]", "[8, 8]", table=table)


def test_copy_of_the_embedding_of_another_shape_is_named(tmp_path: Path) -> None:
    save_torch(tmp_path, by_expert(MIXED) | {COPIES[0]: torch.zeros(5, 8)})
    refused(tmp_path, COPIES[0], "[5, 8]", "[100, 8]", table=block_table(MIXED))


def test_layers_that_lie_alike_in_their_files_share_a_template() -> None:
    shape = tiny_shape("DeepseekV3ForCausalLM", num_layers=12)
    headers: dict[Path, dict[str, StoredTensor]] = {}
    for parameter in block_table(shape).parameters:
        layer = parameter.layer
        number = 0 if layer is None else layer // 2
        file = headers.setdefault(Path(f"model-{number}.safetensors"), {})
        for name in parameter.stored_names():
            stored = parameter.shape[1:] if parameter.stacked else parameter.shape
            file[name] = StoredTensor("BF16", stored, 0, 0)
    layout = layout_of_headers(headers, block_table(shape))
    kinds = [template.kind for template in layout.templates]
    assert sorted(kinds) == ["dense", "embedding", "final_norm", "head", "moe"]


def test_layout_of_163_files_with_92_000_tensors() -> None:
    shape = tiny_shape(
        "DeepseekV3ForCausalLM",
        num_layers=61,
        num_mtp_layers=1,
        moe=replace(MIXED.moe, num_experts=256, dense_layers=(0, 1, 2)),  # type: ignore[type-var]
    )
    table = block_table(shape, (4, 2))
    dtypes = {"float8": "F8_E4M3", "float32": "F32", "policy": "BF16"}
    tensors = [
        (name, StoredTensor(dtypes[p.precision], p.shape[1:] if p.stacked else p.shape, 0, 0))
        for p in table.parameters
        for name in p.stored_names()
    ]
    assert len(tensors) > 90_000
    size = -(-len(tensors) // 163)
    headers = {
        Path(f"model-{i:05d}.safetensors"): dict(tensors[i * size : (i + 1) * size])
        for i in range(163)
    }
    layout = layout_of_headers(headers, table)
    assert len(layout.rank_ids) == 163


def test_header_gives_dtype_shape_and_bytes(tmp_path: Path) -> None:
    path = save_single(tmp_path, {"w": np.ones((2, 3), np.float16)})
    stored = read_header(path)["w"]
    assert (stored.dtype, stored.shape, stored.end - stored.start) == ("F16", (2, 3), 12)
    assert stored.end == path.stat().st_size
