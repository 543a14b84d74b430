"""The checksum against its definition, over partitions, and against what it must catch."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.errors import ShapeError
from megarl.weight_sync import checksum, compiled
from megarl.weight_sync.checksum import CHUNK, add, box_checksum

Box = tuple[tuple[int, int], ...]


@pytest.fixture(params=["numpy", "c"])
def form(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Have box_checksum use one form of the host's sum."""
    chosen = request.getfixturevalue("in_c") if request.param == "c" else None
    monkeypatch.setattr(compiled, "find", lambda: chosen)
    return str(request.param)


def _brute_force(tensor: torch.Tensor, name: str) -> int:
    """The definition of design.md, word for word, on a whole tensor."""
    integer = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[tensor.element_size()]
    mask = (1 << 8 * tensor.element_size()) - 1
    bits = [int(b) & mask for b in tensor.contiguous().view(integer).reshape(-1).tolist()]
    total = 0
    for chunk in range(math.ceil(len(bits) / CHUNK)):
        mine = bits[chunk * CHUNK : (chunk + 1) * CHUNK]
        mix = int(checksum.mix64(checksum.tensor_id(name), np.array([chunk], np.uint64))[0])
        total += mix * sum(b * (2 * i + 1) for i, b in enumerate(mine))
    return total % (1 << 64)


def _whole(tensor: torch.Tensor, name: str = "w") -> int:
    return box_checksum(tensor, name, tensor.shape, [(0, n) for n in tensor.shape])


def _part(tensor: torch.Tensor, box: Box, name: str = "w") -> int:
    return box_checksum(tensor[tuple(slice(a, b) for a, b in box)], name, tensor.shape, box)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
@pytest.mark.parametrize("shape", [(1,), (7,), (3 * CHUNK + 5,), (300, 257), (2, 40_000), (3, 5)])
def test_whole_tensor_has_the_checksum_of_the_definition(
    form: str, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    tensor = torch.randn(shape).to(dtype)
    assert _whole(tensor) == _brute_force(tensor, "w")


@st.composite
def _partitions(draw: st.DrawFn) -> tuple[tuple[int, ...], list[Box]]:
    """A shape that spans several chunks, cut into boxes by repeated splits."""
    shape = draw(
        st.sampled_from([(70_001,), (300, 333), (3, 35_000), (9, 80, 129), (90_000, 1), (2, 3, 4)])
    )
    boxes: list[Box] = [tuple((0, n) for n in shape)]
    for _ in range(draw(st.integers(0, 6))):
        index = draw(st.integers(0, len(boxes) - 1))
        dim = draw(st.integers(0, len(shape) - 1))
        start, stop = boxes[index][dim]
        if stop - start < 2:
            continue
        cut = draw(st.integers(start + 1, stop - 1))
        box = boxes.pop(index)
        boxes.append((*box[:dim], (start, cut), *box[dim + 1 :]))
        boxes.append((*box[:dim], (cut, stop), *box[dim + 1 :]))
    return shape, boxes


@settings(max_examples=60)
@given(_partitions())
def test_parts_of_any_partition_add_up_to_the_whole(
    form: str, case: tuple[tuple[int, ...], list[Box]]
) -> None:
    shape, boxes = case
    tensor = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    assert add([_part(tensor, box) for box in boxes]) == _whole(tensor)


@settings(max_examples=40)
@given(_partitions(), st.sampled_from([torch.float32, torch.bfloat16, torch.float8_e4m3fn]))
def test_the_three_forms_are_equal_on_every_box(
    in_c: compiled.Library, case: tuple[tuple[int, ...], list[Box]], dtype: torch.dtype
) -> None:
    shape, boxes = case
    tensor = torch.randn(shape, generator=torch.Generator().manual_seed(2)).to(dtype)
    identity = checksum.tensor_id("w")
    for box in boxes:
        values = tensor[tuple(slice(a, b) for a, b in box)]
        starts, length = checksum.runs(shape, box)
        rows = values.reshape(len(starts), length)
        bits = checksum._bits(values).reshape(len(starts), length)
        in_numpy = checksum._host_sum(bits, identity, starts)
        assert in_c.sum_runs(bits, starts, identity) == in_numpy
        assert checksum._device_sum(rows, identity, starts) == in_numpy


@pytest.mark.parametrize("shape", [(70, 3), (3, 70), (70, 70)])
def test_sum_on_a_device_is_the_same_in_blocks_of_any_size(
    monkeypatch: pytest.MonkeyPatch, shape: tuple[int, int]
) -> None:
    tensor = torch.randn(shape)
    starts = np.arange(0, 2 * tensor.numel(), 2 * shape[1], dtype=np.uint64)  # runs with gaps
    identity = checksum.tensor_id("w")
    monkeypatch.setattr(checksum, "_TORCH_BLOCK", 64)
    in_numpy = checksum._host_sum(checksum._bits(tensor), identity, starts)
    assert checksum._device_sum(tensor, identity, starts) == in_numpy


def test_a_library_that_is_not_ours_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(compiled, "__file__", str(tmp_path / "compiled.py"))
    suffix = compiled.importlib.machinery.EXTENSION_SUFFIXES[0]
    (tmp_path / f"{compiled.LIBRARY}{suffix}").write_bytes(b"no library")
    compiled.find.cache_clear()
    try:
        assert compiled.find() is None
        assert "not usable" in caplog.text and "run in numpy" in caplog.text
    finally:
        compiled.find.cache_clear()


@pytest.mark.parametrize("box", [((0, 3), (0, 50), (0, 700)), ((1, 2), (3, 40), (0, 700))])
def test_values_that_lie_apart_in_memory_have_the_sum_of_those_together(
    form: str, box: Box
) -> None:
    shape = (3, 50, 700)  # 50 rows of each are beside 20 of something else, as experts' halves are
    fused = torch.randn(3, 70, 700)
    index = tuple(slice(a, b) for a, b in box)
    apart, together = fused[:, :50][index], fused[:, :50].contiguous()[index]
    across = together.transpose(1, 2).contiguous().transpose(1, 2)
    sums = {box_checksum(values, "w", shape, box) for values in (apart, together, across)}
    assert len(sums) == 1


def test_swapped_elements_rows_or_tensors_change_the_checksum(form: str) -> None:
    tensor = torch.randn(400, 200)
    elements, rows = tensor.clone(), tensor.clone()
    elements[0, 0], elements[0, 1] = tensor[0, 1], tensor[0, 0]
    rows[[3, 377]] = tensor[[377, 3]]
    assert len({_whole(tensor), _whole(elements), _whole(rows), _whole(tensor, "v")}) == 4


def test_a_missing_doubled_or_shifted_part_changes_the_sum(form: str) -> None:
    tensor = torch.randn(400, 200)
    upper, lower = ((0, 100), (0, 200)), ((100, 400), (0, 200))
    whole = _whole(tensor)
    shifted = box_checksum(tensor[:100], "w", (400, 200), ((1, 101), (0, 200)))
    assert add([_part(tensor, upper), _part(tensor, lower)]) == whole
    assert _part(tensor, lower) != whole
    assert add([_part(tensor, upper), _part(tensor, upper), _part(tensor, lower)]) != whole
    assert add([shifted, _part(tensor, lower)]) != whole


@pytest.mark.parametrize("element", [0, 1, CHUNK - 1, CHUNK, 79_999])
@pytest.mark.parametrize("bit", [0, 15, 31])
def test_one_flipped_bit_changes_the_checksum(form: str, element: int, bit: int) -> None:
    tensor = torch.randn(400, 200)
    changed = tensor.clone()
    flat = changed.view(torch.int32).view(-1)
    flat[element] ^= torch.tensor(1 << bit, dtype=torch.int64).to(torch.int32)
    assert _whole(changed) != _whole(tensor)


def test_negative_zero_differs_from_zero(form: str) -> None:
    assert _whole(torch.tensor([0.0])) != _whole(torch.tensor([-0.0]))


def test_empty_box_adds_nothing(form: str) -> None:
    assert _part(torch.randn(8, 4), ((3, 3), (0, 4))) == _part(torch.randn(8, 4), ((0, 8), (2, 2)))
    assert _part(torch.randn(0), ((0, 0),)) == 0


@pytest.mark.parametrize(
    ("box", "starts", "length"),
    [
        (((0, 3), (0, 4), (0, 5)), [0], 60),
        (((1, 3), (0, 4), (0, 5)), [20], 40),
        (((1, 3), (1, 3), (0, 5)), [25, 45], 10),
        (((0, 2), (1, 2), (3, 5)), [8, 28], 2),
    ],
)
def test_runs_are_as_long_as_global_order_allows(box: Box, starts: list[int], length: int) -> None:
    found = checksum.runs((3, 4, 5), box)
    assert (found[0].tolist(), found[1]) == (starts, length)


@pytest.mark.parametrize(
    ("shape", "memory", "num_runs"),
    [
        ((3, 4, 5), (20, 5, 1), 1),
        ((3, 4, 5), (24, 6, 1), 12),
        ((3, 4, 5), (99, 5, 1), 3),
        ((3, 1, 5), (5, 77, 1), 1),  # where there is one, its stride says nothing
        ((1, 4, 5), (77, 5, 1), 1),
    ],
)
def test_runs_lie_whole_in_memory_and_are_no_shorter_than_that(
    shape: tuple[int, ...], memory: tuple[int, ...], num_runs: int
) -> None:
    starts, length = checksum.runs(shape, tuple((0, size) for size in shape), memory)
    size = int(np.prod(shape))
    assert (length, starts.tolist()) == (size // num_runs, list(range(0, size, size // num_runs)))


def test_values_of_another_shape_than_the_box_are_refused() -> None:
    with pytest.raises(ShapeError, match="exactly the elements"):
        box_checksum(torch.zeros(3, 4), "w", (8, 4), ((0, 2), (0, 4)))


def test_copy_past_the_caches_writes_every_byte_and_no_other(in_c: compiled.Library) -> None:
    source = torch.randint(1, 256, (400,), dtype=torch.uint8)
    for size in (0, 1, 15, 16, 63, 64, 65, 79, 80, 127, 128, 300):
        for at in range(17):
            for of in (0, 3, 16):
                copied = torch.zeros(400, dtype=torch.uint8)
                in_c.copy(copied.data_ptr() + at, source.data_ptr() + of, size)
                assert torch.equal(copied[at : at + size], source[of : of + size])
                assert copied.count_nonzero() == size
