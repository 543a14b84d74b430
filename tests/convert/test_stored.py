"""Boxes of tensors in files, read by every way there is, against slices of numpy."""

from __future__ import annotations

import zlib
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megarl.convert import stored
from megarl.convert.stored import Cast, FileTensor, bands, crc32, parts, whole_bits
from megarl.errors import CheckpointError
from megarl.reshard.execute import slices
from megarl.reshard.layout import Box

START = 7  # the first byte of the tensor in its file

shapes = st.lists(st.integers(1, 6), min_size=1, max_size=4).map(tuple)


@st.composite
def shapes_and_boxes(draw: st.DrawFn) -> tuple[tuple[int, ...], Box]:
    shape = draw(shapes)
    starts = [draw(st.integers(0, size - 1)) for size in shape]
    ends = [draw(st.integers(start + 1, size)) for start, size in zip(starts, shape, strict=True)]
    return shape, tuple(zip(starts, ends, strict=True))


def written(path: Path, shape: tuple[int, ...]) -> tuple[FileTensor, np.ndarray]:
    array = np.arange(np.prod(shape), dtype="<u2").reshape(shape) + 300
    path.write_bytes(b"x" * START + array.tobytes() + b"behind")
    return FileTensor(path, START, np.dtype("<u2"), shape), array


@given(shapes_and_boxes(), st.integers(2, 40), st.integers(1, 30), st.booleans())
def test_any_box_is_read_into_any_memory(
    tmp_path: Path, drawn: tuple[tuple[int, ...], Box], band: int, short: int, strided: bool
) -> None:
    shape, box = drawn
    tensor, array = written(tmp_path / "a", shape)
    wanted = array[slices(box)]
    memory = np.full((*wanted.shape, 2) if strided else wanted.shape, 9, "<u2")
    out = memory[..., 0] if strided else memory
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stored, "BAND_BYTES", band)
        patch.setattr(stored, "SHORT_BYTES", short)
        tensor.read(box, out)
        assert (out == wanted).all()
        assert not strided or (memory[..., 1] == 9).all()
        joined = [part.copy().reshape(-1) for part in parts(tensor, np.dtype("<u2"))]
        assert (np.concatenate(joined) == array.reshape(-1)).all()
        assert crc32(tmp_path / "a", START, array.nbytes) == zlib.crc32(array.tobytes())


@given(shapes_and_boxes(), st.integers(1, 60), st.integers(1, 3))
def test_bands_follow_each_other_and_are_whole_units_of_rows(
    drawn: tuple[tuple[int, ...], Box], num_bytes: int, unit: int
) -> None:
    _, box = drawn
    found = np.zeros(tuple(end - start for start, end in box), int)
    cut = list(bands(box, 2, unit, num_bytes))
    for number, (band, index) in enumerate(cut, 1):
        assert found[index].shape == tuple(end - start for start, end in band)
        assert not found[index].any()
        found[index] = number
    assert found.all()
    assert (np.diff(found.reshape(-1)) >= 0).all()  # row-major order
    dim = next((d for d, size in enumerate(found.shape) if size > 1), 0)
    for band, _ in cut[:-1]:
        assert (band[dim][1] - band[dim][0]) % unit == 0


def test_file_that_has_become_shorter_is_an_error_and_no_number(tmp_path: Path) -> None:
    tensor, array = written(tmp_path / "a", (4, 5))
    (tmp_path / "a").write_bytes(b"x" * 20)
    with pytest.raises(CheckpointError, match="a was truncated while it was read"):
        whole_bits(tensor, array.dtype)
    (tmp_path / "a").unlink()
    with pytest.raises(CheckpointError, match=r"a: cannot be read \(No such file"):
        whole_bits(tensor, array.dtype)
    with pytest.raises(CheckpointError, match="cannot be read"):
        crc32(tmp_path / "a", 0, 3)


def test_cast_rounds_each_part_and_names_what_does_not_fit(tmp_path: Path) -> None:
    numbers = np.linspace(-3, 7, 600, dtype="<f4").reshape(20, 30)
    (tmp_path / "a").write_bytes(numbers.tobytes())
    tensor = FileTensor(tmp_path / "a", 0, np.dtype("<f4"), (20, 30))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stored, "BAND_BYTES", 100)
        found = whole_bits(Cast(tensor, "F32", "F16"), np.dtype("<f2"))
        assert (found == numbers.astype("<f2")).all()
        numbers[17, 3] = 1e6
        (tmp_path / "a").write_bytes(numbers.tobytes())
        with pytest.raises(OverflowError, match="1e"):
            whole_bits(Cast(tensor, "F32", "F16"), np.dtype("<f2"))
