"""Settings of the optimizer: AdamW, its learning rate over time, steps that are skipped, and where
its state is."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from megarl.config.group import Group, NonNegative, NonNegativeFloat, PositiveFloat


class OptimizerConfig(Group):
    """AdamW."""

    lr: NonNegativeFloat = 1e-6
    """Learning rate after warm-up. 0 runs the loop without learning."""
    warmup_steps: NonNegative = 0
    """Optimizer steps over which the learning rate rises linearly from 0."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """The learning rate after warm-up stays (`constant`), or falls to `min_lr` along a line
    (`linear`) or half a wave (`cosine`)."""
    min_lr: NonNegativeFloat = 0.0
    """Where `linear` and `cosine` end, and stay."""
    decay_steps: NonNegative = 0
    """Optimizer step, warm-up counted, at which `min_lr` is reached. 0 is the run's last one, as
    `loop.versions` is now: a run that is continued with more of them falls slower from there."""
    weight_decay: NonNegativeFloat = 0.0
    """Decoupled weight decay of matrices. Norms, biases and other vectors have none."""
    beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    """Decay of the first moment."""
    beta2: Annotated[float, Field(ge=0, lt=1)] = 0.95
    """Decay of the second moment."""
    eps: PositiveFloat = 1e-8
    """Added to the root of the second moment."""
    clip_grad: NonNegativeFloat = 1.0
    """Largest global gradient norm. 0 does not clip."""
    max_skipped_steps: NonNegative = 3
    """Optimizer steps in a row that are skipped where the gradient is not finite: weights, moments
    and learning rate stay as they are. One more ends the run. 0 ends it at the first."""
    offload_fraction: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Share of the state (fp32 masters and moments) that is in host memory always, where the CPU
    updates it; gradients go there and weights come back in each step (Megatron's
    HybridDeviceOptimizer). At least so much, in whole tensors of a rank. 0 keeps all on the GPU. A
    run cannot do it yet (docs/memory.md)."""


def offload_fields(settings: OptimizerConfig) -> dict[str, Any]:
    """Fields of Megatron's OptimizerConfig; none where nothing is offloaded.

    Without use_precision_aware_optimizer gradients would be looked for elsewhere than Megatron puts
    them (megatron/training/arguments.py refuses that). Copies overlap with updates, one tensor's
    with another's.

    >>> offload_fields(OptimizerConfig())
    {}
    >>> offload_fields(OptimizerConfig(offload_fraction=0.5))["optimizer_offload_fraction"]
    0.5
    """
    if settings.offload_fraction == 0:
        return {}
    return {
        "optimizer_cpu_offload": True,
        "optimizer_offload_fraction": settings.offload_fraction,
        "use_precision_aware_optimizer": True,
        "overlap_cpu_optimizer_d2h_h2d": True,
    }
