"""Float8 in blocks by numpy alone, and checkpoints made of it: what megarl's is compared with."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file

from megarl.actor.parameters import SCALE_SUFFIX, block_table
from megarl.actor.shape import ModelShape
from tests.reshard.sglang_checkpoints import YARN, hf_config
from tests.weight_sync import tiny

BLOCK = 128
CODES = np.arange(0x7F, dtype=np.int64)  # 0x7F is NaN; the sign is bit 7
VALUES = np.where(  # OCP 8-bit floating point spec 1.0: 4 bits of exponent, 3 of mantissa
    CODES < 8, CODES * 2.0**-9, (1 + CODES % 8 / 8) * 2.0 ** (CODES // 8 - 7.0)
)
MIDDLES = (VALUES[:-1] + VALUES[1:]) / 2


def codes_of(numbers: np.ndarray) -> np.ndarray:
    """The nearest e4m3 codes (uint8) of float32 numbers, ties to the even code."""
    size = np.abs(numbers.astype(np.float64))
    code = np.searchsorted(MIDDLES, size, side="left")
    at = np.minimum(code, len(MIDDLES) - 1)
    code += (size == MIDDLES[at]) & (code % 2 == 1)
    return (code + 128 * np.signbit(numbers)).astype(np.uint8)


def quantized(weight: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(codes [R, C], scales [P, Q], the numbers that they stand for [R, C]) of float32 [R, C]."""
    rows, columns = weight.shape
    codes, stands_for = np.zeros(weight.shape, np.uint8), np.zeros(weight.shape, np.float32)
    scales = np.ones((-(-rows // BLOCK), -(-columns // BLOCK)), np.float32)
    for p, q in np.ndindex(*scales.shape):
        at = np.s_[p * BLOCK : (p + 1) * BLOCK, q * BLOCK : (q + 1) * BLOCK]
        scales[p, q] = np.abs(weight[at]).max() / np.float32(448)
        codes[at] = codes_of(weight[at] / scales[p, q])
        sign = np.where(codes[at] < 128, 1, -1)
        stands_for[at] = sign * VALUES[codes[at] % 128] * scales[p, q]
    return codes, scales, stands_for


def tensors(shape: ModelShape, seed: int) -> tuple[tiny.Tensors, tiny.Tensors]:
    """The weights of `seed` under their names in a checkpoint: as DeepSeek stores float8, and the
    numbers that this stands for."""
    weights = tiny.weights(shape, seed)
    stored: tiny.Tensors = {}
    meant: tiny.Tensors = {}
    for parameter in block_table(shape).parameters:
        whole = weights[parameter.name]
        parts = whole if parameter.stacked else (whole,)
        for name, part in zip(parameter.stored_names(), parts, strict=True):
            if parameter.quantized:
                codes, scales, numbers = quantized(part.numpy())
                stored[name] = torch.from_numpy(codes).view(torch.float8_e4m3fn)
                stored[name + SCALE_SUFFIX] = torch.from_numpy(scales)
                meant[name] = torch.from_numpy(numbers)
            else:
                keeps = parameter.precision == "float32"
                stored[name] = part.clone() if keeps else part.to(torch.bfloat16)
                meant[name] = stored[name].to(torch.float32)
    return stored, meant


def save(folder: Path, shape: ModelShape, seed: int) -> Path:
    """Checkpoints of both, for SGLang and transformers: `quantized` and `meant`."""
    stored, meant = tensors(shape, seed)
    for kind, weights in (("quantized", stored), ("meant", meant)):
        made = folder / kind
        made.mkdir(parents=True)
        config = hf_config(shape, (BLOCK, BLOCK) if kind == "quantized" else None)
        if shape.mla is not None:
            config["rope_scaling"] = {**YARN, "rope_type": "yarn"}
        (made / "config.json").write_text(json.dumps(config))
        save_file(weights, made / "model.safetensors", metadata={"format": "pt"})
    return folder
