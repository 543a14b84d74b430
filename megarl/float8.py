"""Weights as float8 in scaled blocks: the one rule that learner, weight sync and checkpoints share.

Owns the arithmetic from numbers to (float8, scales) and back. Which boxes are whole blocks, and who
quantizes what, is `reshard/`'s. Imports torch, no engine.

The rule (DeepSeek-V3 technical report, section 3.3, and its checkpoints): a block's scale is its
largest magnitude / 448 in float32; an element is its value / scale, rounded to the nearest
float8_e4m3fn, ties to even. The stored scale, `weight_scale_inv`, is what float8 is multiplied by.
"""

# E experts or any other leading dims, R rows, C columns, P and Q blocks of rows and columns

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from megarl.errors import ShapeError

E4M3_MAX = 448.0  # largest finite float8_e4m3fn, OCP 8-bit floating point spec 1.0
LEAST_SCALE = 2.0**-126  # the smallest normal float32: a block whose scale were less becomes zeros

ScaleFormat = Literal["float32", "power_of_two"]


@dataclass(frozen=True, slots=True)
class BlockScaling:
    """Blocks of [rows, columns], and what a scale may be.

    "float32" is DeepSeek-V3's own; "power_of_two" rounds a scale up to one, as Blackwell's kernels
    (UE8M0) want it: nothing overflows, up to one bit of the range is lost.
    """

    rows: int = 128
    columns: int = 128
    scale: ScaleFormat = "float32"


def quantize(weight_ERC: Tensor, scaling: BlockScaling) -> tuple[Tensor, Tensor]:
    """(float8_e4m3fn [E, R, C], float32 scales [E, P, Q]) of float32 or bfloat16 [E, R, C].

    Any number of leading dims, also none. The last blocks may be partial. A block of zeros has
    scale 1. Raises ShapeError for fewer than two dims, FloatingPointError where a number is not
    finite.
    """
    blocks = _blocks(weight_ERC.to(torch.float32), scaling)
    amax = blocks.abs().amax(dim=(-3, -1))
    if not bool(torch.isfinite(amax).all()):
        raise FloatingPointError("a weight that is to be quantized is not finite")
    scales = amax / E4M3_MAX
    if scaling.scale == "power_of_two":
        mantissa, exponent = torch.frexp(scales)  # scale = mantissa x 2^exponent, mantissa < 1
        scales = torch.ldexp(torch.ones_like(scales), exponent - (mantissa == 0.5).to(exponent))
    tiny = scales < LEAST_SCALE
    scales = torch.where(tiny, torch.ones_like(scales), scales)
    scaled = blocks / scales[..., :, None, :, None]
    scaled = torch.where(tiny[..., :, None, :, None], torch.zeros_like(scaled), scaled)
    rows, columns = weight_ERC.shape[-2:]
    return _whole(scaled, rows, columns).to(torch.float8_e4m3fn), scales


def dequantize(
    float8_ERC: Tensor, scales_EPQ: Tensor, scaling: BlockScaling, dtype: torch.dtype
) -> Tensor:
    """The numbers [E, R, C] that float8 in blocks stands for, computed in float32, as `dtype`.

    Raises ShapeError where the scales are not those of such blocks.
    """
    wanted = (*float8_ERC.shape[:-2], *num_blocks(tuple(float8_ERC.shape), scaling))
    if tuple(scales_EPQ.shape) != wanted:
        raise ShapeError(
            f"weights {list(float8_ERC.shape)} in blocks of {[scaling.rows, scaling.columns]} have "
            f"scales {list(wanted)}, found {list(scales_EPQ.shape)}"
        )
    blocks = _blocks(float8_ERC.to(torch.float32), scaling) * scales_EPQ[..., :, None, :, None]
    rows, columns = float8_ERC.shape[-2:]
    return _whole(blocks, rows, columns).to(dtype)


def relative_error(weight_ERC: Tensor, scaling: BlockScaling) -> float:
    """|quantized - weight| / |weight|, in the L2 norm over the whole tensor; 0 for zeros."""
    weight = weight_ERC.to(torch.float32)
    error = dequantize(*quantize(weight, scaling), scaling, torch.float32) - weight
    norm = float(torch.linalg.vector_norm(weight))
    return float(torch.linalg.vector_norm(error)) / norm if norm else 0.0


def num_blocks(shape: tuple[int, ...], scaling: BlockScaling) -> tuple[int, int]:
    """Blocks of rows and of columns.

    >>> num_blocks((8, 200, 256), BlockScaling())
    (2, 2)
    """
    return -(-shape[-2] // scaling.rows), -(-shape[-1] // scaling.columns)


def _blocks(values_ERC: Tensor, scaling: BlockScaling) -> Tensor:
    """[E, R, C] as [E, P, rows, Q, columns], zeros where blocks are partial."""
    if values_ERC.dim() < 2:
        raise ShapeError(f"weights in blocks have rows and columns, found {list(values_ERC.shape)}")
    rows, columns = values_ERC.shape[-2:]
    high, wide = num_blocks(tuple(values_ERC.shape), scaling)
    missing = (0, wide * scaling.columns - columns, 0, high * scaling.rows - rows)
    padded = torch.nn.functional.pad(values_ERC, missing) if any(missing) else values_ERC
    return padded.reshape(*values_ERC.shape[:-2], high, scaling.rows, wide, scaling.columns)


def _whole(blocks: Tensor, rows: int, columns: int) -> Tensor:
    """The inverse of `_blocks`."""
    flat = blocks.flatten(-2).flatten(-3, -2)
    return flat[..., :rows, :columns]
