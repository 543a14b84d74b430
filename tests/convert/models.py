"""Tiny checkpoints of every family in Hugging Face's form, random, and their torch_dist form."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

from megarl.actor.parameters import block_table
from megarl.actor.shape import ModelShape, read_shape
from megarl.float8 import BlockScaling, quantize
from tests.reshard.megatron_cases import FULL_RANK_LATENT, deepseek, glm, qwen
from tests.reshard.models import Arrays, tiny_shape
from tests.reshard.sglang_checkpoints import hf_config

FAMILIES: dict[str, ModelShape] = {
    "llama": tiny_shape("LlamaForCausalLM"),
    "llama-tied": tiny_shape("LlamaForCausalLM", tie_embeddings=True),
    "qwen2": tiny_shape("Qwen2ForCausalLM"),
    "qwen3": tiny_shape("Qwen3ForCausalLM", tie_embeddings=True),
    "qwen3-moe": qwen(),
    "deepseek-v3": deepseek(num_mtp_layers=1),
    "moonlight": deepseek(mla=FULL_RANK_LATENT),
    "glm4-moe": glm(num_mtp_layers=1),
}

TORCH = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
NAMES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}


def write(
    folder: Path,
    shape: ModelShape,
    dtype: str = "BF16",
    num_files: int = 1,
    fp8_block: tuple[int, int] | None = None,
    seed: int = 3,
    values: Arrays | None = None,
) -> dict[str, torch.Tensor]:
    """A checkpoint with a tokenizer of its own; what it stores, by name.

    `values` are by parameter, experts as stacks; random ones without.
    """
    folder.mkdir(parents=True)
    config: dict[str, Any] = hf_config(shape, fp8_block)
    config["torch_dtype"] = NAMES[dtype]
    if shape.mla is not None:
        config["rope_scaling"] = None
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    (folder / "tokenizer.json").write_text('{"of": "a test"}')
    assert len(block_table(read_shape(folder)).parameters) == len(block_table(shape).parameters)
    tensors = stored(shape, values or drawn(shape, seed), dtype, fp8_block)
    parts = [dict(list(tensors.items())[i::num_files]) for i in range(num_files)]
    if num_files == 1:
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        return tensors
    weight_map = {}
    for number, part in enumerate(parts, 1):
        name = f"model-{number:05d}-of-{num_files:05d}.safetensors"
        save_file(part, folder / name, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, name)
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return tensors


def drawn(shape: ModelShape, seed: int) -> Arrays:
    """Random float32 numbers by parameter."""
    random = np.random.default_rng(seed)
    return {
        p.name: random.normal(size=p.shape).astype(np.float32)
        for p in block_table(replace(shape, fp8_block=None)).parameters
    }


def stored(
    shape: ModelShape, values: Arrays, dtype: str, fp8_block: tuple[int, int] | None = None
) -> dict[str, torch.Tensor]:
    """Tensors by their names in a checkpoint, in the types that they have there."""
    tensors: dict[str, torch.Tensor] = {}
    for parameter in block_table(replace(shape, fp8_block=None)).parameters:
        whole = values[parameter.name]
        parts = whole if parameter.stacked else whole[None]
        for name, part in zip(parameter.stored_names(), parts, strict=True):
            numbers = torch.from_numpy(part)
            if parameter.quantized and fp8_block is not None:
                codes, scales = quantize(numbers, BlockScaling(*fp8_block))
                tensors |= {name: codes, f"{name}_scale_inv": scales}
            else:
                fixed = parameter.precision == "float32"
                tensors[name] = numbers.clone() if fixed else numbers.to(TORCH[dtype])
    return tensors
