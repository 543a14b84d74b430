"""FP8 in one learner process: whether this GPU, this Transformer Engine and this environment do it.

Owns the questions that only a process can answer. What settings mean is `config/fp8.py`'s. Without
Transformer Engine, Megatron takes `fp8` for a wish and computes without it, so every answer is
asked for before a model is built, and none is taken for granted.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Mapping
from typing import Any

import torch

from megarl.config.fp8 import RECIPES, environment, environment_faults, gpu_faults
from megarl.config.precision import PrecisionConfig
from megarl.errors import ConfigError
from megarl.learner.accelerators import ENGINE

RECIPES_MODULE = f"{ENGINE}.common.recipe"


def check_process(precision: PrecisionConfig, accelerators: Mapping[str, str]) -> None:
    """Raise ConfigError, with all reasons, where this process cannot compute in FP8 as asked.

    `accelerators` are those that `find_accelerators` found. To be called on the rank's own device,
    before Megatron builds a model.
    """
    if not precision.uses_fp8:
        return
    faults = []
    if not torch.cuda.is_available():
        faults.append(
            f"learner.precision.fp8 = {precision.fp8}: torch sees no GPU, and Megatron would "
            "silently compute without FP8; use off, or a machine with a GPU"
        )
    else:
        major, minor = torch.cuda.get_device_capability()
        faults += gpu_faults(
            precision, torch.cuda.get_device_name(), (major, minor), _cuda_version()
        )
    if ENGINE not in accelerators:
        faults.append(
            f"learner.precision.fp8 = {precision.fp8}: Transformer Engine is not installed, and "
            "Megatron would silently compute without FP8; install megarl[gpu], or use off"
        )
    elif not faults:
        faults += _engine_faults(precision, importlib.import_module(RECIPES_MODULE))
    faults += environment_faults(precision, os.environ)
    faults += [
        f"{name} is not set, but learner.precision.fp8_recipe = {precision.fp8_recipe} needs "
        f"{value!r}: start learner ranks by megarl's launcher, which sets it"
        for name, value in environment(precision).items()
        if name not in os.environ
    ]
    if faults:
        raise ConfigError(faults)


def _engine_faults(precision: PrecisionConfig, recipes: Any) -> list[str]:
    """What Transformer Engine itself says of the recipe, and read from the environment for it."""
    name = precision.fp8_recipe
    kind = getattr(recipes, RECIPES[name].te_class, None)
    if kind is None:
        return [
            f"learner.precision.fp8_recipe = {name}: this Transformer Engine has no "
            f"{RECIPES[name].te_class}; megarl is written for 2.20"
        ]
    recipe = kind()
    if name == "blockwise" and recipe.fp8_quant_fwd_weight.power_2_scale:
        return [
            "Transformer Engine was imported before the launcher's variables were set: its "
            "blockwise scales are powers of two, and not those of servers"
        ]
    quantization = importlib.import_module(f"{ENGINE}.pytorch.quantization")
    try:
        quantization.check_recipe_support(recipe)
    except RuntimeError as error:
        return [f"learner.precision.fp8_recipe = {name}: Transformer Engine refuses it: {error}"]
    return []


def _cuda_version() -> tuple[int, int]:
    major, _, minor = (torch.version.cuda or "0.0").partition(".")
    return int(major), int(minor or 0)
