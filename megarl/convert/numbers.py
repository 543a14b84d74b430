"""Tensors as their bits, and what numbers they stand for: types of numbers, casts, float8 blocks.

Owns the meaning of a type as safetensors spells it. Bits are numpy arrays of the types in
`reshard.files.STORED`; arithmetic is torch's, and float8's the rule of `float8`.
"""

from __future__ import annotations

import mmap
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megarl import float8
from megarl.float8 import BlockScaling
from megarl.reshard.files import FLOAT8, STORED

TORCH: Mapping[str, torch.dtype] = {
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    FLOAT8: torch.float8_e4m3fn,
}

Bits = np.ndarray[Any, Any]

LARGE_BYTES = 1 << 27  # of a mapped tensor: less may stay resident


def tensor_of(bits: Bits, dtype: str) -> Tensor:
    """The torch tensor that writable bits are, sharing their memory."""
    held = torch.from_numpy(bits)
    return held if held.dtype == TORCH[dtype] else held.view(TORCH[dtype])


def bits_of(tensor: Tensor, dtype: str) -> Bits:
    """The bits of a torch tensor of that type on the host, sharing its memory."""
    same = {2: torch.int16, 1: torch.uint8}
    if dtype in ("BF16", FLOAT8):
        tensor = tensor.view(same[tensor.element_size()])
    return tensor.numpy().view(STORED[dtype])


def cast(bits: Bits, dtype: str, wanted: str) -> Bits:
    """The numbers in another type, rounded to nearest, ties to even; the same array where equal.

    Raises OverflowError where a number is too large for it.
    """
    if dtype == wanted:
        return bits
    numbers = tensor_of(np.array(bits), dtype)
    made = numbers.to(TORCH[wanted])
    if wanted == "F16" and not bool((made.isfinite() == numbers.isfinite()).all()):
        raise OverflowError(
            f"a number of magnitude {float(numbers[~made.isfinite()].abs().max()):.4g} is too "
            "large for float16; use bf16 or fp32"
        )
    return bits_of(made, wanted)


def forget(bits: Any) -> None:
    """Let go of the memory that a mapped tensor has come to, where it is large. It stays usable."""
    mapped = bits.codes if isinstance(bits, Dequantized) else bits
    held = getattr(mapped, "_mmap", None)  # numpy has no other way to it
    if held is not None and mapped.nbytes > LARGE_BYTES:
        held.madvise(mmap.MADV_DONTNEED)


class Cast:
    """Bits that are cast where they are sliced."""

    def __init__(self, bits: Any, dtype: str, wanted: str) -> None:
        self._bits, self._dtype, self._wanted = bits, dtype, wanted
        self.nbytes = bits.nbytes

    def __getitem__(self, index: Any) -> Bits:
        return cast(self._bits[index], self._dtype, self._wanted)


class Dequantized:
    """A float8 tensor [R, C] in scaled blocks, whose numbers are made where they are sliced."""

    def __init__(self, codes: Bits, scales: Bits, scaling: BlockScaling, wanted: str) -> None:
        self.codes, self._scales, self._scaling, self._wanted = codes, scales, scaling, wanted
        self.nbytes = codes.nbytes

    def __getitem__(self, index: tuple[slice, slice]) -> Bits:
        """The numbers of rows and columns, from the whole blocks that they lie in."""
        outer, inner, blocks = [], [], []
        units = (self._scaling.rows, self._scaling.columns)
        for part, size, unit in zip(index, self.codes.shape, units, strict=True):
            start, end, _ = part.indices(size)
            first, last = start // unit, -(-end // unit)
            blocks.append(slice(first, last))
            outer.append(slice(first * unit, min(size, last * unit)))
            inner.append(slice(start - first * unit, end - first * unit))
        codes = tensor_of(np.array(self.codes[tuple(outer)]), FLOAT8)
        scales = tensor_of(np.array(self._scales[tuple(blocks)]), "F32")
        numbers = float8.dequantize(codes, scales, self._scaling, TORCH[self._wanted])
        return bits_of(numbers, self._wanted)[tuple(inner)]
