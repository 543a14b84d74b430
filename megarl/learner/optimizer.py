"""AdamW on Megatron's distributed optimizer: settings, warm-up, clipping, and what it refuses.

Owns the update. Knows nothing of losses, batches or checkpoints. Import it after
`megatron_cpu.install()`.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
from megatron.core.optimizer import get_megatron_optimizer

from megarl.config.schema import OptimizerConfig
from megarl.errors import LearnerError


class WarmUp:
    """The learning rate: linear from lr / warmup_steps at the first step, then constant.

    >>> warm = WarmUp(lr=0.5, warmup_steps=2)
    >>> [warm.next() for _ in range(3)]
    [0.25, 0.5, 0.5]
    """

    def __init__(self, lr: float, warmup_steps: int) -> None:
        self._lr, self._warmup_steps = lr, warmup_steps
        self.num_steps = 0

    def next(self) -> float:
        """The learning rate of the next optimizer step, which is counted."""
        self.num_steps += 1
        return self._lr * min(1.0, self.num_steps / max(1, self._warmup_steps))

    def state_dict(self) -> dict[str, int]:
        """For a checkpoint: the number of optimizer steps taken."""
        return {"num_steps": self.num_steps}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Continue from `state_dict()`."""
        self.num_steps = int(state["num_steps"])


class Optimizer:
    """Megatron's optimizer of one model and its warm-up. `megatron` is the ChainedOptimizer."""

    def __init__(self, model: Any, settings: OptimizerConfig, dtype: torch.dtype) -> None:
        """`model` is Megatron's DistributedDataParallel and holds its starting weights already."""
        self.megatron = get_megatron_optimizer(
            MegatronOptimizerConfig(
                optimizer="adam",
                lr=settings.lr,
                min_lr=settings.lr,
                weight_decay=settings.weight_decay,
                adam_beta1=settings.beta1,
                adam_beta2=settings.beta2,
                adam_eps=settings.eps,
                bf16=dtype is torch.bfloat16,
                params_dtype=dtype,
                use_distributed_optimizer=True,
                clip_grad=settings.clip_grad or math.inf,
            ),
            [model],
        )
        self.warm_up = WarmUp(settings.lr, settings.warmup_steps)
        self._model = model

    def clear(self) -> None:
        """Forget all gradients. Call before the first backward pass of a step."""
        self._model.zero_grad_buffer()
        self.megatron.zero_grad()

    def step(self) -> dict[str, float]:
        """Clip and apply the gradients. Returns grad_norm (before clipping, global) and lr.

        Collective over all ranks. Raises LearnerError, on every rank and with the weights
        unchanged, where the norm is not finite.
        """
        self.megatron.prepare_grads()
        norm = float(self.megatron.get_grad_norm())
        if not math.isfinite(norm):
            raise LearnerError(
                f"the gradient norm is {norm}; the weights were not changed. Look at the loss and "
                "the log-prob mismatch of this step; resume from the last checkpoint with a lower "
                "learner.optimizer.lr"
            )
        lr = self.warm_up.next()
        for group in self.megatron.param_groups:
            group["lr"] = lr
        done, grad_norm, _ = self.megatron.step()
        assert done, "Megatron skipped an update that has a finite gradient norm"
        return {"grad_norm": float(grad_norm), "lr": lr}
