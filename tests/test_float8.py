"""Float8 in blocks, against the rule worked out block by block."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.errors import ShapeError
from megarl.float8 import E4M3_MAX, BlockScaling, dequantize, num_blocks, quantize, relative_error

SIZES = st.integers(1, 9)


def nearest_e4m3(value: float) -> float:
    """Round to 4 significant bits, ties to even; below 2^-6 to multiples of 2^-9."""
    if value == 0:
        return 0.0
    exponent = max(math.floor(math.log2(abs(value))), -6)
    unit = 2.0 ** (exponent - 3)
    return round(value / unit) * unit


@settings(max_examples=60)
@given(
    lead=st.integers(0, 2),
    rows=SIZES,
    columns=SIZES,
    block=st.tuples(st.integers(1, 5), st.integers(1, 5)),
    size=st.sampled_from([1e-6, 1.0, 1e4]),
    power_of_two=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_every_block_has_the_scale_and_the_numbers_of_the_rule(
    lead: int, rows: int, columns: int, block: tuple[int, int], size: float, power_of_two: bool,
    seed: int,
) -> None:  # fmt: skip
    scaling = BlockScaling(*block, "power_of_two" if power_of_two else "float32")
    shape = (*(2,) * lead, rows, columns)
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * size
    float8, scales = quantize(weight, scaling)
    assert float8.dtype == torch.float8_e4m3fn and scales.dtype == torch.float32
    assert scales.shape == (*shape[:-2], *num_blocks(shape, scaling))
    flat, found, codes = weight.view(-1, rows, columns), float8.view(-1, rows, columns), []
    for e, matrix in enumerate(flat):
        for i, row in enumerate(range(0, rows, block[0])):
            for j, column in enumerate(range(0, columns, block[1])):
                at = (slice(row, row + block[0]), slice(column, column + block[1]))
                wanted = float(matrix[at].abs().max() / E4M3_MAX)
                if power_of_two:
                    wanted = 2.0 ** math.ceil(math.log2(wanted))
                scale = float(scales.view(-1, *scales.shape[-2:])[e, i, j])
                assert scale == wanted
                for value, code in zip(
                    (matrix[at] / scale).flatten(), found[e][at].flatten(), strict=True
                ):
                    codes.append((nearest_e4m3(float(value)), float(code)))
    assert all(wanted == code for wanted, code in codes)


def test_numbers_come_back_within_a_sixteenth_of_themselves_or_of_the_blocks_smallest() -> None:
    scaling = BlockScaling(4, 4)
    weight = torch.randn(3, 10, 9)
    float8, scales = quantize(weight, scaling)
    back = dequantize(float8, scales, scaling, torch.float32)
    least = scales.max() * 2.0**-10
    assert bool(((back - weight).abs() <= weight.abs() / 16 + least).all())
    assert 0.01 < relative_error(weight, scaling) < 0.05


def test_zeros_and_numbers_too_small_for_a_scale_become_zeros() -> None:
    weight = torch.zeros(4, 8)
    weight[:, 4:] = 1e-40
    float8, scales = quantize(weight, BlockScaling(4, 4))
    assert scales.tolist() == [[1.0, 1.0]] and not float8.to(torch.float32).any()
    assert relative_error(torch.zeros(2, 2), BlockScaling()) == 0.0


def test_quantized_weights_quantized_again_are_the_same() -> None:
    weight, scaling = torch.randn(9, 12), BlockScaling(4, 4, "power_of_two")
    float8, scales = quantize(weight, scaling)
    again, scales_again = quantize(dequantize(float8, scales, scaling, torch.float32), scaling)
    assert torch.equal(
        dequantize(again, scales_again, scaling, torch.float32),
        dequantize(float8, scales, scaling, torch.float32),
    )


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_weight_that_is_no_number_is_refused(bad: float) -> None:
    weight = torch.ones(4, 4)
    weight[3, 2] = bad
    with pytest.raises(FloatingPointError, match="not finite"):
        quantize(weight, BlockScaling(2, 2))


def test_shapes_without_rows_and_scales_of_other_blocks_are_refused() -> None:
    with pytest.raises(ShapeError, match="rows and columns"):
        quantize(torch.ones(4), BlockScaling())
    with pytest.raises(ShapeError, match=r"have scales \[2, 2\], found \[1, 2\]"):
        dequantize(
            torch.zeros(4, 4).to(torch.float8_e4m3fn), torch.ones(1, 2), BlockScaling(2, 2),
            torch.bfloat16,
        )  # fmt: skip
