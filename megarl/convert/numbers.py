"""Tensors as their bits, and what numbers they stand for: types of numbers, and casts.

Owns the meaning of a type as safetensors spells it. Bits are numpy arrays of the types in
`reshard.files.STORED`; arithmetic is torch's.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megarl.reshard.files import FLOAT8, STORED

TORCH: Mapping[str, torch.dtype] = {
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    FLOAT8: torch.float8_e4m3fn,
}

Bits = np.ndarray[Any, Any]

_TOO_SMALL = {"F16": "float16; use bf16 or fp32", "BF16": "bfloat16; use fp32"}
"""Types that not every number fits, with what to do."""


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
    """The numbers of writable bits in another type, rounded to nearest, ties to even.

    Raises OverflowError where a number is too large for it.
    """
    if dtype == wanted:
        return bits
    numbers = tensor_of(bits, dtype)
    made = numbers.to(TORCH[wanted])
    if wanted in _TOO_SMALL and bool((lost := made.isinf()).any()):
        lost &= numbers.isfinite()
        if bool(lost.any()):
            raise OverflowError(
                f"a number of magnitude {float(numbers[lost].abs().max()):.4g} is too large for "
                f"{_TOO_SMALL[wanted]}"
            )
    return bits_of(made, wanted)
