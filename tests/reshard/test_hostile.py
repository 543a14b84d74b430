"""Files of weights and of plans that are broken in any way are refused by name."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megarl.errors import ModelError
from megarl.reshard.files import MAX_HEADER_BYTES, checkpoint_files, map_tensors, read_header
from tests.hostile import SEEDED, deep, hurt

HEADER = {
    "__metadata__": {"format": "pt"},
    "a": {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]},
    "b": {"dtype": "BF16", "shape": [4], "data_offsets": [16, 24]},
    "c": {"dtype": "I64", "shape": [], "data_offsets": [24, 32]},
}


def file_of(path: Path, header: str | bytes, length: int | None = None) -> Path:
    raw = header if isinstance(header, bytes) else header.encode()
    path.write_bytes(struct.pack("<Q", len(raw) if length is None else length) + raw + bytes(32))
    return path


def check(path: Path) -> None:
    """Tensors that lie within the file, apart from each other, or an error that names the file."""
    try:
        header = read_header(path)
        arrays = map_tensors(path, header)
    except ModelError as error:
        assert str(path) in str(error)
        assert len(str(error)) < 5000
        return
    places = sorted((t.start, t.end) for t in header.values())
    assert all(0 < start <= end <= path.stat().st_size for start, end in places)
    assert all(end <= start for (_, end), (start, _) in zip(places, places[1:], strict=False))
    assert all(arrays[name].shape == header[name].shape for name in arrays)


@SEEDED
@given(hurt(HEADER))
def test_any_header_is_read_or_refused_by_its_file(tmp_path: Path, header: Any) -> None:
    check(file_of(tmp_path / "x.safetensors", json.dumps(header)))


@SEEDED
@given(st.binary(max_size=300), st.integers(0, 400))
def test_any_bytes_as_weights_are_read_or_refused(tmp_path: Path, bad: bytes, at: int) -> None:
    path = file_of(tmp_path / "x.safetensors", json.dumps(HEADER))
    good = path.read_bytes()
    path.write_bytes(good[:at] + bad + good[at + len(bad) :])
    check(path)
    path.write_bytes(good[:at])
    check(path)


ENTRY = '{"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}'


@pytest.mark.parametrize(
    ("header", "found"),
    [
        pytest.param(deep(), "broken", id="too deep"),
        pytest.param(b"\xff\xfe{}", "broken", id="no UTF-8"),
        pytest.param(f'{{"a": {ENTRY}, "a": {ENTRY}}}', "twice", id="one name twice"),
        pytest.param(f'{{"a": {ENTRY}, "b": {ENTRY}}}', "b begins within a", id="overlap"),
        pytest.param(
            '{"a": {"dtype": "I64", "shape": [-2, -2], "data_offsets": [0, 32]}}',
            "a is no tensor",
            id="negative sizes",
        ),
        pytest.param(
            '{"a": {"dtype": "F32", "shape": [4], "data_offsets": [-16, 0]}}',
            "a is no tensor",
            id="negative offsets",
        ),
        pytest.param(
            '{"a": {"dtype": "F32", "shape": [4294967296, 4294967296], "data_offsets": [0, 0]}}',
            "a has 0 bytes",
            id="a size that 64 bits do not hold",
        ),
        pytest.param(
            '{"a": {"dtype": "X", "shape": [1e999], "data_offsets": [0, 0]}}', "no tensor", id="inf"
        ),
    ],
)
def test_header_that_says_what_cannot_be_is_refused(
    tmp_path: Path, header: str | bytes, found: str
) -> None:
    with pytest.raises(ModelError, match=f"x.safetensors.*{found}"):
        read_header(file_of(tmp_path / "x.safetensors", header))


@pytest.mark.parametrize("length", [0, MAX_HEADER_BYTES, 2**63, 2**64 - 1])
def test_header_length_beyond_the_file_is_refused_unread(tmp_path: Path, length: int) -> None:
    with pytest.raises(ModelError, match=r"x\.safetensors is not a whole safetensors file"):
        read_header(file_of(tmp_path / "x.safetensors", json.dumps(HEADER), length))


INDEX = {"metadata": {"total_size": 1}, "weight_map": {"a": "x.safetensors", "b": "x.safetensors"}}


@SEEDED
@given(hurt(INDEX))
def test_any_index_names_files_of_its_folder_or_is_refused(tmp_path: Path, index: Any) -> None:
    (tmp_path / "x.safetensors").touch()
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    try:
        found = checkpoint_files(tmp_path)
    except ModelError as error:
        assert str(tmp_path) in str(error)
        return
    assert set(found) <= {tmp_path / "x.safetensors"}
