"""Sums of many boxes in host memory by one table: each is the box's own, and what is finite."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.errors import ShapeError
from megarl.reshard.layout import Piece
from megarl.weight_sync import checksum_host, compiled, live_sums
from megarl.weight_sync.checksum import CHUNK, box_checksum
from megarl.weight_sync.checksum_triton import BoxValues
from megarl.weight_sync.live_sums import LiveSums

DTYPES = [torch.float32, torch.bfloat16, torch.float8_e4m3fn]


@pytest.fixture(autouse=True)
def _compiled(in_c: compiled.Library, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "find", lambda: in_c)


def _alone(box: BoxValues) -> int:
    """The oracle: numpy's form of the sum of one box."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compiled, "find", lambda: None)
        return box_checksum(box.values, box.name, box.shape, box.box)


@st.composite
def _boxes(draw: st.DrawFn) -> list[BoxValues]:
    """Boxes of tensors of several types, lying with gaps in larger memory, some transposed."""
    found = []
    for number in range(draw(st.integers(1, 4))):
        dtype = draw(st.sampled_from(DTYPES))
        shape = draw(
            st.sampled_from(
                [(70_001,), (300, 333), (3, 35_000), (9, 80, 129), (90, 1), (2, 3, 4), (5, 1, 8)]
            )
        )
        spare = [draw(st.integers(0, 2)) for _ in shape]
        whole = torch.randn([n + more for n, more in zip(shape, spare, strict=True)])
        tensor = whole.to(dtype)[tuple(slice(more, None) for more in spare)]
        if draw(st.booleans()):
            tensor = tensor.transpose(0, -1).contiguous().transpose(0, -1)
        starts = [draw(st.integers(0, n - 1)) for n in shape]
        ends = [draw(st.integers(a + 1, n)) for a, n in zip(starts, shape, strict=True)]
        box = tuple(zip(starts, ends, strict=True))
        values = tensor[tuple(slice(a, b) for a, b in box)]
        found.append(BoxValues(values, f"w{number}", shape, box))
    return found


@settings(max_examples=80)
@given(_boxes(), st.sampled_from([64, 4096, 1 << 20]), st.integers(1, 3))
def test_one_table_gives_each_box_its_own_checksum(
    boxes: list[BoxValues], row_bytes: int, threads: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checksum_host, "_ROW_BYTES", row_bytes)
        summation = checksum_host.Summation(boxes, threads)
    assert summation.run() == [_alone(box) for box in boxes]
    assert summation.look()[1] == []


@pytest.mark.parametrize("shape", [(50,), (50, 1), (10, 5, 1), (5, 1, 10)])
def test_values_beside_others_in_memory_have_their_own_checksum(shape: tuple[int, ...]) -> None:
    values = torch.randn(*shape, 3)[..., 1]
    box = BoxValues(values, "w", shape, tuple((0, size) for size in shape))
    assert checksum_host.Summation([box]).run() == [_alone(box)]


def test_a_table_is_of_what_the_memory_holds_when_it_is_read() -> None:
    tensor = torch.zeros(40, 50)
    box = BoxValues(tensor, "w", (40, 50), ((0, 40), (0, 50)))
    summation = checksum_host.Summation([box])
    tensor.normal_()
    assert summation.run() == [_alone(box)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan])
@pytest.mark.parametrize("at", [0, 31, 32, CHUNK, 3 * CHUNK + 4])
@pytest.mark.parametrize("threads", [1, 2])
def test_the_box_with_one_weight_that_is_no_number_is_named(
    dtype: torch.dtype, value: float, at: int, threads: int
) -> None:
    tensors = [torch.full((3 * CHUNK + 5,), torch.finfo(dtype).max, dtype=dtype) for _ in range(3)]
    boxes = [BoxValues(t, "w", tuple(t.shape), ((0, len(t)),)) for t in tensors]
    assert checksum_host.Summation(boxes, threads).look()[1] == []
    tensors[1][at] = value
    assert checksum_host.Summation(boxes, threads).look()[1] == [1]


def test_a_nan_beside_a_box_or_in_float8_is_not_looked_at() -> None:
    whole = torch.zeros(20, 70)
    whole[:, 60:] = torch.nan
    codes = torch.full((20,), torch.nan).to(torch.float8_e4m3fn)
    boxes = [
        BoxValues(whole[:, :60], "w", (20, 60), ((0, 20), (0, 60))),
        BoxValues(codes, "v", (20,), ((0, 20),)),
    ]
    assert checksum_host.Summation(boxes).look()[1] == []


def test_values_of_another_shape_than_the_box_are_refused() -> None:
    with pytest.raises(ShapeError, match="exactly the elements of the box"):
        checksum_host.Summation([BoxValues(torch.zeros(3, 4), "w", (8, 4), ((0, 2), (0, 4)))])


def test_live_sums_keep_a_table_of_what_stays_and_look_at_copies_anew() -> None:
    tensors = {"a": torch.randn(30, 40), "b": torch.randn(30, 40)}
    box = ((0, 30), (0, 40))
    pieces = [Piece(name, box, name, (0, 0)) for name in tensors]

    def box_of(piece: Piece) -> BoxValues:
        dtype = {"a": torch.float32, "b": torch.bfloat16}[piece.local]
        return BoxValues(tensors[piece.local].to(dtype), piece.tensor, (30, 40), box)

    sums = LiveSums()
    for _ in range(2):
        tensors["a"].normal_()
        tensors["b"].normal_()
        found = sums.of(pieces, tensors, box_of)
        assert found == live_sums.Sums(tuple(_alone(box_of(piece)) for piece in pieces), ())
    tensors["b"][3, 4] = 3.4e38  # finite, and not in the type in which it travels
    assert sums.of(pieces, tensors, box_of).not_finite == (1,)


def test_live_sums_do_not_say_what_is_finite_where_nothing_was_compiled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(compiled, "find", lambda: None)
    tensor = torch.randn(30, 40)
    piece = Piece("w", ((0, 30), (0, 40)), "w", (0, 0))
    box = BoxValues(tensor, "w", (30, 40), piece.box)
    assert LiveSums().of([piece], {"w": tensor}, lambda _: box) == live_sums.Sums(
        (_alone(box),), None
    )
