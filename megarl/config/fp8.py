"""What `learner.precision.fp8*` means: Megatron's fields, environments, GPUs, multiples of tokens.

Owns the translation, in one place, and the facts of each recipe. Which settings cannot be combined
is `check_fp8.py`'s. Imports no engine: what the engines do is written down here, with its source.
TE stands for Transformer Engine, 2.20.2; Megatron-Core is 0.19.2.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from megarl.config.precision import PrecisionConfig

Version = tuple[int, int]
RecipeName = Literal["delayed", "tensorwise", "blockwise", "mxfp8"]

BLOCK = 128  # rows and columns of a weight's block, Float8BlockQuantizer.block_len


@dataclass(frozen=True, slots=True)
class Recipe:
    """What a recipe asks for.

    `multiple` is what all sizes of a rank's matrices divide by. GPUs have a compute capability from
    `least` to below `below`; where theirs is below `cuda_from`, CUDA is at least `least_cuda`.
    """

    multiple: int
    least: Version
    below: Version
    gpus: str
    least_cuda: Version
    cuda_from: Version
    te_class: str


# Source: TE pytorch/quantization.py, _compute_{fp8,fp8_block_scaling,mxfp8}_support; multiples:
# pytorch/utils.py, assert_dim_for_fp8_exec (16 of each row, 8 of rows, which are rows of a product
# with gradients elsewhere, hence 16), and tensor/mxfp8_tensor.py (32 of both).
# TE takes `blockwise` on Blackwell too and emulates it by MXFP8, with powers of two as scales:
# another rule than that of servers, at no gain over mxfp8 itself. Refused here.
RECIPES: Mapping[RecipeName, Recipe] = {
    "delayed": Recipe(
        16, (8, 9), (99, 0), "8.9 or higher (Ada)", (12, 1), (9, 0), "DelayedScaling"
    ),
    "tensorwise": Recipe(
        16, (8, 9), (99, 0), "8.9 or higher (Ada)", (12, 1), (9, 0), "Float8CurrentScaling"
    ),
    "blockwise": Recipe(
        16, (9, 0), (10, 0), "9.0 (Hopper)", (12, 9), (10, 0), "Float8BlockScaling"
    ),
    "mxfp8": Recipe(
        32, (10, 0), (12, 0), "10.0 to 11.0 (Blackwell)", (12, 8), (12, 0), "MXFP8BlockScaling"
    ),
}

# Environment that TE reads as `transformer_engine.common.recipe` is imported.
SCALES_VARIABLE = "NVTE_FP8_BLOCK_SCALING_FP32_SCALES"  # "1": scales are not rounded to 2^n
TENSOR_SCALES_VARIABLE = "NVTE_FP8_CURRENT_SCALING_POWER_2_SCALES"
BACKWARD_VARIABLE = "NVTE_BACKWARD_OVERRIDE"  # takes gradients out of FP8


def transformer_fields(precision: PrecisionConfig) -> dict[str, Any]:
    """Fields of Megatron's TransformerConfig; none where FP8 is off.

    >>> transformer_fields(PrecisionConfig())
    {}
    >>> fields = transformer_fields(PrecisionConfig(fp8="e4m3"))
    >>> fields["fp8"], fields["fp8_recipe"], fields["first_last_layers_bf16"]
    ('e4m3', 'blockwise', False)
    """
    if not precision.uses_fp8:
        return {}
    first, last = precision.fp8_first_layers_bf16, precision.fp8_last_layers_bf16
    return {
        "fp8": precision.fp8,
        "fp8_recipe": precision.fp8_recipe,
        "fp8_param": precision.fp8_param,
        "fp8_amax_history_len": precision.fp8_amax_history,
        "fp8_amax_compute_algo": precision.fp8_amax_algorithm,
        "tp_only_amax_red": precision.fp8_amax_group == "tensor",
        "first_last_layers_bf16": bool(first or last),
        "num_layers_at_start_in_bf16": first,
        "num_layers_at_end_in_bf16": last,
    }


def buffer_fields(precision: PrecisionConfig) -> dict[str, Any]:
    """Fields of Megatron's DistributedDataParallelConfig; none where FP8 is off.

    With mxfp8, gathered weights need the gradients' buffer: TE's weights are no views of one.
    """
    if not precision.uses_fp8:
        return {}
    return {
        "fp8_param_gather": precision.fp8_param_gather,
        "reuse_grad_buf_for_mxfp8_param_ag": _reuses_gradients(precision),
    }


def optimizer_fields(precision: PrecisionConfig) -> dict[str, Any]:
    """Fields of Megatron's OptimizerConfig; none where the model's weights are not FP8.

    `fp8_recipe` decides there how main weights become the model's, and whether it warns of memory.
    """
    if not (precision.uses_fp8 and precision.fp8_param):
        return {}
    return {
        "fp8_recipe": precision.fp8_recipe,
        "reuse_grad_buf_for_mxfp8_param_ag": _reuses_gradients(precision),
    }


def token_multiple(precision: PrecisionConfig, tp: int = 1, cp: int = 1) -> int:
    """What the packed tokens of a microbatch are a multiple of, over `tp` x `cp` ranks.

    Each tensor and context rank takes its share, and each share must be whole for the recipe: 16
    tokens, 32 with mxfp8; with `blockwise` and tensor ranks 128, or TE gathers in bf16, with a
    warning (pytorch/distributed.py; Float8BlockQuantizer.is_quantizable).

    >>> token_multiple(PrecisionConfig(), tp=4)
    4
    >>> token_multiple(PrecisionConfig(fp8="e4m3")), token_multiple(PrecisionConfig(fp8="e4m3"), 2)
    (16, 256)
    >>> token_multiple(PrecisionConfig(fp8="e4m3", fp8_recipe="mxfp8"), tp=2, cp=2)
    128
    """
    share = 1
    if precision.uses_fp8:
        share = RECIPES[precision.fp8_recipe].multiple
        if precision.fp8_recipe == "blockwise" and tp > 1:
            share = BLOCK
    return share * tp * cp


def environment(precision: PrecisionConfig) -> dict[str, str]:
    """Variables that learner ranks must have from their start, for the recipe to be what it says.

    The scales of `blockwise` are float32 as servers' are (`megarl/float8.py`); TE's default rounds
    them up to powers of two.
    """
    if not precision.uses_fp8:
        return {}
    names = {"blockwise": (SCALES_VARIABLE, "1"), "tensorwise": (TENSOR_SCALES_VARIABLE, "0")}
    found = names.get(precision.fp8_recipe)
    return dict([found]) if found else {}


def environment_faults(precision: PrecisionConfig, environ: Mapping[str, str]) -> Iterator[str]:
    """What in `environ` makes the recipe another one; variables that are not set are no fault."""
    for name, value in environment(precision).items():
        found = environ.get(name, value)
        if found != value:
            yield (
                f"{name} = {found!r} is set, but learner.precision.fp8_recipe = "
                f"{precision.fp8_recipe} needs {value!r}, which the launcher sets; unset it"
            )
    if precision.uses_fp8 and environ.get(BACKWARD_VARIABLE):
        yield (
            f"{BACKWARD_VARIABLE} = {environ[BACKWARD_VARIABLE]!r} is set: gradients would not be "
            f"computed in learner.precision.fp8 = {precision.fp8}; unset it"
        )


def gpu_faults(
    precision: PrecisionConfig, gpu: str, capability: Version, cuda: Version
) -> list[str]:
    """Why a GPU of this compute capability, with torch's CUDA, cannot run the recipe.

    >>> gpu_faults(PrecisionConfig(fp8="e4m3"), "H200", (9, 0), (13, 0))
    []
    >>> gpu_faults(PrecisionConfig(fp8="e4m3"), "B200", (10, 0), (13, 0))[0].partition("; ")[2]
    'use mxfp8, or tensorwise'
    """
    if not precision.uses_fp8:
        return []
    name, recipe = precision.fp8_recipe, RECIPES[precision.fp8_recipe]
    setting = f"learner.precision.fp8_recipe = {name}"
    if not recipe.least <= capability < recipe.below:
        others = [
            other
            for other in ("blockwise", "mxfp8", "tensorwise")
            if RECIPES[other].least <= capability < RECIPES[other].below
        ]
        use = f"use {', or '.join(others)}" if others else "use learner.precision.fp8 = off"
        return [
            f"{setting}: {gpu} has compute capability {_dotted(capability)}, and the recipe needs "
            f"{recipe.gpus}; {use}"
        ]
    if capability < recipe.cuda_from and cuda < recipe.least_cuda:
        return [
            f"{setting}: torch is built for CUDA {_dotted(cuda)}, and on {gpu} (compute capability "
            f"{_dotted(capability)}) the recipe needs {_dotted(recipe.least_cuda)} or newer; "
            "install a newer torch, or use "
            + ("tensorwise" if name in ("blockwise", "mxfp8") else "learner.precision.fp8 = off")
        ]
    return []


def _reuses_gradients(precision: PrecisionConfig) -> bool:
    return precision.fp8_param_gather and precision.fp8_recipe == "mxfp8"


def _dotted(version: Version) -> str:
    return f"{version[0]}.{version[1]}"
