"""AdamW on Megatron's distributed optimizer: settings, learning rate, clipping, and what it skips.

Owns the update. Knows nothing of losses, batches or checkpoints. Import it after
`megatron_cpu.install()`.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
from megatron.core.optimizer import get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from megarl.config.optimizer import OptimizerConfig, offload_fields
from megarl.errors import LearnerError

log = logging.getLogger(__name__)


class Optimizer:
    """Megatron's optimizer of one model and its schedule. `megatron` is the ChainedOptimizer.

    Megatron's scheduler sets the learning rate and, of each parameter group, its weight decay:
    without it the groups of norms and biases would have that of matrices.
    """

    def __init__(
        self,
        model: Any,
        settings: OptimizerConfig,
        dtype: torch.dtype,
        decay_steps: int,
        fp8: Mapping[str, Any] | None = None,
        name: str = "learner.optimizer",
    ) -> None:
        """`model` is the `Chunks` of this rank and holds its starting weights already.

        `decay_steps` is the optimizer step at which a schedule that falls has come down.
        `fp8` are Megatron's fields for weights in FP8 (`config.fp8.optimizer_fields`). `name` is
        that of the settings.
        """
        self._name = name
        self.megatron = get_megatron_optimizer(
            MegatronOptimizerConfig(
                optimizer="adam",
                lr=settings.lr,
                min_lr=settings.min_lr,
                weight_decay=settings.weight_decay,
                adam_beta1=settings.beta1,
                adam_beta2=settings.beta2,
                adam_eps=settings.eps,
                bf16=dtype is torch.bfloat16,
                params_dtype=dtype,
                use_distributed_optimizer=True,
                overlap_param_gather=model.parts[0].ddp_config.overlap_param_gather,
                clip_grad=settings.clip_grad or math.inf,
                **(fp8 or {}),
                **offload_fields(settings),
            ),
            model.parts,
        )
        self._scheduler = OptimizerParamScheduler(
            self.megatron,
            init_lr=0.0,
            max_lr=settings.lr,
            min_lr=min(settings.min_lr, settings.lr),
            lr_warmup_steps=settings.warmup_steps,
            lr_decay_steps=max(decay_steps, settings.warmup_steps + 1),
            lr_decay_style=settings.schedule,
            start_wd=settings.weight_decay,
            end_wd=settings.weight_decay,
            wd_incr_steps=0,
            wd_incr_style="constant",
        )
        self._max_skipped = settings.max_skipped_steps
        self._num_skipped = 0  # in a row
        self._model = model
        if dist.get_rank() == 0:
            inner = type(self.megatron.chained_optimizers[0].optimizer)
            log.info("optimizer of=%s class=%s.%s", name, inner.__module__, inner.__name__)

    def clear(self) -> None:
        """Forget all gradients. Call before the first backward pass of a step."""
        self._model.zero_grad_buffer()
        self.megatron.zero_grad()

    def step(self) -> dict[str, float]:
        """Clip and apply the gradients. Returns grad_norm (before clipping, global) and lr.

        Where the norm is not finite the step is skipped, on every rank: weights, moments and
        schedule stay as they are, and the norm and lr are left out. `optimizer/skipped_steps` is 1
        then, else 0. Collective over all ranks. Raises LearnerError, on every rank and with the
        weights unchanged, where more steps in a row than `max_skipped_steps` would be skipped.
        """
        self.megatron.prepare_grads()
        norm = float(self.megatron.get_grad_norm())
        if not math.isfinite(norm):
            self._skip(norm)
            return {"optimizer/skipped_steps": 1.0}
        self._num_skipped = 0
        self._scheduler.step(1)
        done, grad_norm, _ = self.megatron.step()
        assert done, "Megatron skipped an update that has a finite gradient norm"
        lr = float(self.megatron.param_groups[0]["lr"])
        return {"grad_norm": float(grad_norm), "lr": lr, "optimizer/skipped_steps": 0.0}

    def _skip(self, norm: float) -> None:
        self._num_skipped += 1
        if self._num_skipped > self._max_skipped:
            raise LearnerError(
                f"the gradient norm is {norm}, for optimizer step {self._num_skipped} in a row, "
                f"and {self._name}.max_skipped_steps = {self._max_skipped}; the weights were "
                "not changed. Look at the loss and the log-prob mismatch of these steps; resume "
                f"from the last checkpoint with a lower {self._name}.lr"
            )
        if dist.get_rank() == 0:
            log.warning(
                "optimizer step skipped of=%s grad_norm=%s in_a_row=%d of_at_most=%d",
                self._name,
                norm,
                self._num_skipped,
                self._max_skipped,
            )

    def state_dict(self) -> dict[str, int]:
        """For a checkpoint, beside Megatron's own: steps taken, and those skipped in a row."""
        return {"num_steps": self._scheduler.num_steps, "num_skipped": self._num_skipped}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Continue from `state_dict()`, with the settings of this run. Call it after Megatron's."""
        self._num_skipped = state["num_skipped"]
        self._scheduler.num_steps = state["num_steps"]
        self._scheduler.step(0)
