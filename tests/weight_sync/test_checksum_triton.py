"""The kernel's tables on a CPU, and the kernel itself where Triton is: tests/gpu/run.sh --dry."""

from __future__ import annotations

import ctypes
import importlib.machinery
import os
import sys
from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.compat import placeholders
from megarl.errors import ShapeError
from megarl.reshard.mesh import LearnerMesh, ServerMesh
from megarl.weight_sync import checksum_triton
from megarl.weight_sync.checksum import CHUNK, box_checksum, mix64, tensor_id
from megarl.weight_sync.checksum_triton import BoxValues, Launch, box_checksums
from megarl.weight_sync.control import SourceSpec
from tests.reshard.models import tiny_shape
from tests.weight_sync.rig import Rig

Box = tuple[tuple[int, int], ...]
DTYPES = [torch.float32, torch.bfloat16, torch.float8_e4m3fn]
SHAPES = [(70_001,), (300, 333), (3, 35_000), (9, 80, 129), (90_000, 1), (64, 7168), (2, 3, 4)]


@st.composite
def _boxes(draw: st.DrawFn) -> tuple[tuple[int, ...], list[Box]]:
    """A shape, and boxes anywhere in it."""
    shape = draw(st.sampled_from(SHAPES))
    boxes = []
    for _ in range(draw(st.integers(1, 4))):
        box = []
        for size in shape:
            start = draw(st.integers(0, size - 1))
            box.append((start, draw(st.integers(start + 1, size))))
        boxes.append(tuple(box))
    return shape, boxes


def _values(shape: Sequence[int], boxes: Sequence[Box], dtype: torch.dtype) -> list[BoxValues]:
    tensor = torch.randn(*shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    return [
        BoxValues(tensor[tuple(slice(a, b) for a, b in box)], "w", tuple(shape), box)
        for box in boxes
    ]


def _carry_out(launch: Launch, anchor: int, sums: list[int]) -> None:
    """What the kernel does with a launch's tables, element by element, and what it relies on."""
    shape = launch.shape
    span = shape.columns * shape.unroll * shape.loops
    integer = {1: ctypes.c_uint8, 2: ctypes.c_uint16, 4: ctypes.c_uint32}[shape.itemsize]
    for number, row, begin, end in launch.tiles.tolist():
        offset, rows, stride, first, row_step, identity, at, _ = launch.parts[number].tolist()
        here = range(row, min(row + shape.rows, rows))
        assert 0 < end - begin <= span <= CHUNK
        assert not shape.is_full or (len(here) == shape.rows and end - begin == span)
        for r in here:
            address = anchor + shape.itemsize * (offset + r * stride + begin)
            if shape.is_aligned:
                assert address % 16 == 0 and (end - begin) * shape.itemsize % 16 == 0
            bits = np.ctypeslib.as_array((integer * (end - begin)).from_address(address))
            index = np.arange(end - begin, dtype=np.int64) + first + r * row_step + begin
            assert shape.crosses or index[0] // CHUNK == index[-1] // CHUNK
            weights = 2 * (index % CHUNK) + 1
            mixes = mix64(identity % (1 << 64), (index // CHUNK).astype(np.uint64))
            total = np.sum(bits.astype(np.uint64) * weights.astype(np.uint64) * mixes)
            sums[at] = (sums[at] + int(total)) % (1 << 64)


@settings(max_examples=40)
@given(_boxes(), st.sampled_from(DTYPES))
def test_tiles_hold_every_element_once_with_what_the_kernel_relies_on(
    case: tuple[tuple[int, ...], list[Box]], dtype: torch.dtype
) -> None:
    values = _values(*case, dtype)
    tables = checksum_triton._tables(values, torch.device("cpu"))
    sums = [0] * len(values)
    for launch in tables.launches:
        _carry_out(launch, tables.anchor.data_ptr(), sums)
    assert sums == [box_checksum(v.values, "w", v.shape, v.box) for v in values]


def test_transposed_and_scattered_values_are_copied_into_one_piece_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(checksum_triton, "_MAX_PARTS", 40)
    values = [
        BoxValues(torch.randn(50, 6).t(), "w", (6, 50), ((0, 6), (0, 50))),
        BoxValues(torch.randn(50, 20, 7)[:, :10, :3], "v", (50, 20, 7), ((0, 50), (0, 10), (0, 3))),
    ]
    tables = checksum_triton._tables(values, torch.device("cpu"))
    assert len(tables.copies) == 1
    sums = [0, 0]
    for launch in tables.launches:
        _carry_out(launch, tables.anchor.data_ptr(), sums)
    assert sums == [box_checksum(v.values, v.name, v.shape, v.box) for v in values]


def test_whole_tensors_take_one_launch_whatever_their_number() -> None:
    tensors = [torch.zeros(64, 4096, dtype=torch.bfloat16) for _ in range(12)]
    values = [
        BoxValues(t, f"w{i}", (64, 4096), ((0, 64), (0, 4096))) for i, t in enumerate(tensors)
    ]
    tables = checksum_triton._tables(values, torch.device("cpu"))
    (launch,) = tables.launches
    assert launch.shape.is_full and launch.shape.is_aligned and not launch.shape.crosses
    assert len(launch.tiles) == 12 * 64 * 4096 // CHUNK


def test_rows_of_all_outer_dims_are_one_part_where_they_are_equally_far_apart() -> None:
    boxes = [((0, 9), (0, 80), (3, 90)), ((2, 7), (0, 80), (0, 129)), ((0, 9), (5, 6), (0, 129))]
    tables = checksum_triton._tables(
        _values((9, 80, 129), boxes, torch.float32), torch.device("cpu")
    )
    (parts,) = {launch.parts.numpy().tobytes() for launch in tables.launches}
    table = np.frombuffer(parts, np.int64).reshape(-1, 8)
    assert table[:, 1].tolist() == [9 * 80, 1, 9] and table[:, 6].tolist() == [0, 1, 2]


def test_without_a_gpu_boxes_are_summed_one_by_one() -> None:
    values = _values((300, 333), [((0, 300), (0, 333)), ((5, 9), (1, 2))], torch.float32)
    assert box_checksums(values) == [box_checksum(v.values, "w", v.shape, v.box) for v in values]
    assert box_checksums([]) == []


def test_placeholder_of_triton_does_not_count_as_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    placeholder = placeholders._Placeholder("triton")
    placeholder.__spec__ = importlib.machinery.ModuleSpec("triton", placeholders._FINDER)
    monkeypatch.setitem(sys.modules, "triton", placeholder)
    checksum_triton.is_available.cache_clear()
    assert not checksum_triton.is_available()
    checksum_triton.is_available.cache_clear()


@pytest.mark.skipif(
    not checksum_triton.is_available() or os.environ.get("TRITON_INTERPRET") != "1",
    reason="needs Triton and TRITON_INTERPRET=1",
)
@settings(max_examples=15)
@given(_boxes(), st.sampled_from(DTYPES))
def test_kernel_in_the_interpreter_equals_the_checksum(
    case: tuple[tuple[int, ...], list[Box]], dtype: torch.dtype
) -> None:
    values = _values(*case, dtype)
    wanted = [box_checksum(v.values, "w", v.shape, v.box) for v in values]
    assert checksum_triton.sums(values) == wanted
    assert checksum_triton.sums(values) == wanted  # with the tables of the first time
    with pytest.raises(ShapeError, match="exactly the elements of the box"):
        checksum_triton.sums([BoxValues(values[0].values, "w", values[0].shape, ())])


def test_identity_of_a_tensor_fits_into_the_table() -> None:
    value = BoxValues(torch.zeros(4), "model.norm.weight", (4,), ((0, 4),))
    tables = checksum_triton._tables([value], torch.device("cpu"))
    stored = int(tables.launches[0].parts[0, 5])
    assert stored % (1 << 64) == tensor_id("model.norm.weight")


class _InTorch:
    """A summation without the kernel."""

    def __init__(self, boxes: list[BoxValues]) -> None:
        self._boxes = boxes

    def run(self) -> list[int]:
        return [box_checksum(b.values, b.name, b.shape, b.box) for b in self._boxes]


def test_receiver_makes_its_tables_once_and_again_when_a_tensor_moved(
    rig: Callable[..., Rig], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checksum_triton, "pays", lambda device: True)
    monkeypatch.setattr(checksum_triton, "sums", lambda boxes: _InTorch(boxes).run())
    monkeypatch.setattr(checksum_triton, "Summation", _InTorch)
    shape = tiny_shape("Glm4MoeForCausalLM")  # its router is wider on the server than on the wire
    made = rig(SourceSpec(shape, LearnerMesh(), 8), ServerMesh(1), "bf16")
    first: object = None
    for version in range(3):
        made.learn(version)
        assert made.sync(version) == []
        kept = made.receivers[0]._sums._kept
        assert kept is not None
        first = first or kept[2]
        assert kept[2] is first
    _, lasting, _ = kept
    assert 0 < len(lasting) < len(made.receivers[0]._route.pieces)  # type: ignore[union-attr]
    for parameter in made.models[0].tensors.values():
        parameter.data = torch.full_like(parameter, torch.nan)
    assert made.sync(9) == []
    moved = made.receivers[0]._sums._kept
    assert moved is not None and moved[2] is not first
