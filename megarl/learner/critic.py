"""The critic on one rank: a value model with an optimizer of its own, on the learner's ranks.

Owns the order of its work: values before the first optimizer step on a batch, the advantages made
of them, and its own steps. Mathematics is in `advantages`, `value_loss` and `passes`. Knows nothing
of the policy. Import it after `megatron_cpu.install()`. T packed tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megarl.actor.shape import ModelShape
from megarl.config.fp8 import optimizer_fields
from megarl.config.layouts import critic_layout, critic_shape
from megarl.config.schema import Config
from megarl.learner.advantages import TokenAdvantages
from megarl.learner.checkpoint import Training
from megarl.learner.chunks import Chunks
from megarl.learner.distant_critic import DistantCritic
from megarl.learner.distributed import Ranks
from megarl.learner.model import build_model, load_checkpoint, named_weights
from megarl.learner.optimizer import Optimizer
from megarl.learner.packing import PackedMicrobatch
from megarl.learner.passes import (
    ValueModel,
    ValueTargets,
    accumulate_value_gradients,
    forward_values,
)
from megarl.learner.transformer import DTYPES
from megarl.learner.value_head import ValueHead
from megarl.types import Batch, MinibatchPlan


@dataclass(eq=False)
class Critic:
    """One rank of the critic. Methods are collective over all ranks unless they say otherwise.

    `learns_alone` says whether the policy waits while the critic learns from the present batch.
    """

    model: ValueModel
    optimizer: Optimizer
    shape: ModelShape
    config: Config
    advantages: TokenAdvantages
    learns_alone: bool = field(default=False, init=False)

    @classmethod
    def build(cls, config: Config, ranks: Ranks) -> Critic:
        """The critic with the layers of `critic.model`, and every value zero.

        Raises as `build_model` and `load_checkpoint` do.
        """
        shape = critic_shape(config)
        layout = critic_layout(config, shape)
        module = build_model(shape, config.learner, ranks, layout, head=ValueHead)
        weights = named_weights(module, shape, layout, ranks.rank)
        load_checkpoint(config.critic_model, layout, ranks.rank, weights)
        dtype = DTYPES[config.learner.precision.params]
        optimizer = Optimizer(
            module,
            config.critic.optimizer,
            dtype,
            config.critic_decay_steps,
            optimizer_fields(config.learner.precision),
            "critic.optimizer",
        )
        advantages = TokenAdvantages(config.advantage, ranks.device)
        return cls(ValueModel(module, ranks), optimizer, shape, config, advantages)

    @property
    def trainings(self) -> list[Training]:
        """What a checkpoint of it is of."""
        return [Training(self.model.model, self.optimizer, self.model.ranks, self.shape)]

    @property
    def tensors(self) -> tuple[Chunks, Any]:
        """What it keeps on the device: model and optimizer as `offload.LearnerState` has them."""
        return self.model.model, self.optimizer.megatron

    def clear(self) -> None:
        """Forget the batch before. Not collective."""
        self.advantages.clear()

    def begin(self, batch: Batch) -> None:
        """Forget the batch before; `batch` is scored next. Not collective."""
        self.clear()
        self.learns_alone = batch.version < self.config.critic.warmup_versions

    def score(
        self,
        plan: MinibatchPlan,
        microbatches: Sequence[PackedMicrobatch],
        length: int,
        counted: Collection[str],
        rewards: Callable[[PackedMicrobatch], Tensor | None],
    ) -> None:
        """Values and advantages of this rank's microbatches of `plan`.

        Samples in `counted` are in the batch's statistics already. `rewards` gives what tokens of a
        microbatch are rewarded with besides the sample's reward, [T] on the CPU.
        """
        ranks = self.model.ranks
        samples = {ref.sample_id: ref for refs in plan.schedule[ranks.dp_rank] for ref in refs}
        found = forward_values(self.model, microbatches, length)
        for microbatch, value_T in zip(microbatches, found, strict=False):
            self.advantages.add(
                microbatch, value_T, rewards(microbatch), samples, counted, ranks.reports
            )

    def finish(self) -> dict[str, float]:
        """The numbers of the batch, once all of it is scored. Collective over all ranks."""
        return self.advantages.finish()

    def prepared(self, microbatches: Sequence[PackedMicrobatch]) -> list[PackedMicrobatch]:
        """The microbatches with their tokens' advantages, where this rank has a loss.

        Not collective. Raises LearnerError where a sample was not scored.
        """
        if not self.model.ranks.is_last_stage:
            return list(microbatches)
        return [self.advantages.advantages(microbatch) for microbatch in microbatches]

    def step(
        self, microbatches: Sequence[PackedMicrobatch], length: int, num_loss_tokens: int
    ) -> dict[str, float]:
        """One optimizer step of the critic on a minibatch; returns its `value/*`.

        Where the step was skipped, those that are not finite are left out. Raises LearnerError as
        `Optimizer.step` does.
        """
        self.optimizer.clear()
        sums = accumulate_value_gradients(
            self.model,
            microbatches,
            length,
            [self._targets(microbatch) for microbatch in microbatches],
            self.config.critic.clip,
            num_loss_tokens,
        )
        if not self.model.ranks.reports:
            sums.zero_()
        dist.all_reduce(sums)
        loss, clipped = (sums / num_loss_tokens).tolist()
        done = self.optimizer.step()
        metrics = {
            "value/loss": loss,
            "value/clip_fraction": clipped,
            **{f"value/{name.rpartition('/')[2]}": number for name, number in done.items()},
        }
        return {name: number for name, number in metrics.items() if math.isfinite(number)}

    def _targets(self, microbatch: PackedMicrobatch) -> ValueTargets:
        device = self.model.ranks.device
        if not self.model.ranks.is_last_stage:
            empty = torch.empty(0, device=device)
            return ValueTargets(empty, empty)
        value_T, return_T = self.advantages.values(microbatch)
        return ValueTargets(value_T.to(device), return_T.to(device))


def make_critic(config: Config, ranks: Ranks) -> Critic | DistantCritic | None:
    """What the learner's ranks have for a critic. Raises as `Critic.build` does."""
    if not config.has_critic:
        return None
    return DistantCritic(config, ranks) if config.critic_is_apart else Critic.build(config, ranks)
