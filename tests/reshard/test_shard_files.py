"""Safetensors files that are to be written: filled in order, and read as their headers say."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from safetensors import deserialize

from megarl.reshard.shard_files import TensorToStore, shard_files, write_index

SIZES = {"a": 60, "b": 40, "c": 1, "d": 250, "e": 30, "e_scale_inv": 80, "f": 20}
TENSORS = {name: TensorToStore("F8_E4M3", (size,)) for name, size in SIZES.items()}


def test_file_is_filled_to_its_last_byte_and_what_is_larger_has_one_alone() -> None:
    found = [list(each.tensors) for each in shard_files(TENSORS, 100)]
    assert found == [["a", "b"], ["c"], ["d"], ["e", "e_scale_inv"], ["f"]]
    assert [list(each.tensors) for each in shard_files(TENSORS)] == [list(SIZES)]


def test_files_are_read_by_safetensors_with_the_numbers_written_at_their_places(
    tmp_path: Path,
) -> None:
    tensors = {
        "byte": TensorToStore("F8_E4M3", (3,)),
        "half": TensorToStore("F16", (2, 3)),
        "long": TensorToStore("F32", (5,)),
        "more": TensorToStore("F8_E4M3", (30,)),
    }
    files = shard_files(tensors, 40)
    values: dict[str, np.ndarray] = {}
    for each in files:
        data = np.arange(each.num_bytes, dtype=np.uint8) % 60
        data[: len(each.header)] = np.frombuffer(each.header, np.uint8)
        data.tofile(tmp_path / each.name)
        for name, stored in each.tensors.items():
            values[name] = data[stored.start : stored.end]
    write_index(files, tmp_path)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == 3 + 12 + 20 + 30
    assert len(files) == 2 and set(index["weight_map"]) == set(tensors)
    for name, file in index["weight_map"].items():
        read = dict(deserialize((tmp_path / file).read_bytes()))[name]
        assert read["data"] == values[name].tobytes()
        assert (read["dtype"], tuple(read["shape"])) == (tensors[name].dtype, tensors[name].shape)


def test_one_file_has_no_index(tmp_path: Path) -> None:
    (single,) = shard_files(TENSORS)
    write_index([single], tmp_path)
    assert single.name == "model.safetensors" and not list(tmp_path.iterdir())
