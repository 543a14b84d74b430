"""Archives of tensors, as torch's own."""

from __future__ import annotations

import io
import zipfile
from pathlib import Path

import pytest
import torch

from megarl.convert.archive import ALIGNMENT, TOP, find_tensor, recipe, write_tensor
from megarl.convert.numbers import TORCH, bits_of

SHAPES = ((3, 4), (1, 7, 2), (5,), (1, 1, 1), (0, 3))


def parts_of(tensor: torch.Tensor, dtype: str, size: int) -> list[memoryview]:
    data = bits_of(tensor, dtype).tobytes()
    return [memoryview(data[at : at + size]) for at in range(0, len(data), size)]


@pytest.mark.parametrize("dtype", ["F32", "F16", "BF16"])
@pytest.mark.parametrize("shape", SHAPES)
def test_torch_loads_the_archive_and_it_is_found_as_one_of_torchs(
    shape: tuple[int, ...], dtype: str, tmp_path: Path
) -> None:
    tensor = torch.randn(shape).to(TORCH[dtype])
    path = tmp_path / "a"
    with path.open("wb") as file:
        file.write(b"before")
        size = write_tensor(file, dtype, shape, parts_of(tensor, dtype, 5))
        file.write(b"behind")
    data = path.read_bytes()
    assert len(data) == size + len(b"beforebehind")
    loaded = torch.load(io.BytesIO(data[6:-6]), weights_only=True)
    assert loaded.dtype == tensor.dtype
    assert torch.equal(loaded, tensor)
    with path.open("rb") as file:
        found = find_tensor(file, 6, size)
    assert (found.size, found.first, found.is_contiguous) == (shape, 0, True)
    assert found.storage % ALIGNMENT == 0
    bits = data[6 + found.storage :][: found.num_bytes]
    assert bits == bits_of(tensor, dtype).tobytes()


@pytest.mark.parametrize("dtype", ["F32", "F16", "BF16"])
@pytest.mark.parametrize("shape", SHAPES)
def test_records_are_those_of_torch(shape: tuple[int, ...], dtype: str) -> None:
    ours, torchs = io.BytesIO(), io.BytesIO()
    tensor = torch.zeros(shape, dtype=TORCH[dtype])
    write_tensor(ours, dtype, shape, parts_of(tensor, dtype, 64))
    torch.save(tensor, torchs)
    with zipfile.ZipFile(ours) as left, zipfile.ZipFile(torchs) as right:
        pickled = right.read(f"{TOP}/data.pkl")
        assert recipe(dtype, shape) == left.read(f"{TOP}/data.pkl") == pickled
        identity = f"{TOP}/.data/serialization_id"  # a hash of the archive, which nothing reads
        assert {*left.namelist(), identity} == set(right.namelist())
        for name in left.namelist():
            assert left.read(name) == right.read(name), name


def test_archive_of_something_else_is_none_of_a_tensor() -> None:
    out = io.BytesIO()
    torch.save([1, 2], out)
    with pytest.raises(AttributeError):
        find_tensor(out, 0, len(out.getvalue()))
    with pytest.raises(zipfile.BadZipFile):
        find_tensor(io.BytesIO(b"x" * 99), 0, 99)
