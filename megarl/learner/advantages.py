"""Advantages of a rollout batch's tokens, from values that were there before its first step.

Owns which tokens are actions, what each is rewarded with, the batch's statistics over all ranks,
and the table of what was made, by sample. The estimate itself is `advantage/gae.py`'s. Knows
nothing of models. T packed tokens.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor

from megarl.advantage.gae import generalized_advantages
from megarl.config.advantage import AdvantageConfig
from megarl.learner.packing import PackedMicrobatch
from megarl.learner.scoring import KeptLogProbs
from megarl.learner.token_numbers import loss_positions
from megarl.types import SampleRef

STD_EPS = 1e-6  # as in `advantage/group.py`


class TokenAdvantages:
    """Values, returns and advantages of this rank's samples until the next batch.

    Only the last pipeline stage has any. Sums are float64 on `device`.
    """

    def __init__(self, config: AdvantageConfig, device: torch.device) -> None:
        self._config, self._device = config, device
        self._values, self._returns, self._advantages = (KeptLogProbs() for _ in range(3))
        self.clear()

    def clear(self) -> None:
        """Forget all; a new batch begins."""
        for kept in (self._values, self._returns, self._advantages):
            kept.clear()
        self._sums = torch.zeros(6, dtype=torch.float64, device=self._device)
        self._mean, self._std = 0.0, 1.0

    def add(
        self,
        microbatch: PackedMicrobatch,
        value_T: Tensor,
        reward_T: Tensor | None,
        samples: Mapping[str, SampleRef],
        skip: Collection[str],
        counts: bool,
    ) -> None:
        """Make those of a microbatch's samples, which `samples` describes by their ids.

        `value_T` are its values, `reward_T` what tokens are rewarded with besides the sample's
        reward, which its last action gets: with `overlong_samples` = truncate the last that is
        kept. The batch's statistics have them unless they are in `skip`, and where this rank
        `counts`.
        """
        value_T = value_T.detach().double().cpu()
        advantage_T = torch.zeros_like(value_T)
        for segment in microbatch.segments:
            actions = loss_positions(microbatch, segment)
            if not len(actions):
                continue
            values = value_T[actions].tolist()
            rewards = [0.0] * len(values) if reward_T is None else reward_T[actions].tolist()
            sample = samples[segment.key]
            rewards[-1] += sample.advantage
            is_continued = sample.is_cut and self._config.cut_responses == "continued"
            last = segment.start + segment.length - 1
            found = generalized_advantages(
                rewards,
                values,
                last_value=float(value_T[last]) if is_continued else 0.0,
                gamma=self._config.gamma,
                gae_lambda=self._config.gae_lambda,
            )
            advantage_T[actions] = torch.tensor(found, dtype=torch.float64)
            if counts and segment.key not in skip:
                self._count(value_T[actions], advantage_T[actions])
        self._values.keep(microbatch, value_T.float())
        self._returns.keep(microbatch, (value_T + advantage_T).float())
        self._advantages.keep(microbatch, advantage_T.float())

    def finish(self) -> dict[str, float]:
        """The batch's statistics: `value/*`, `returns/*`, `advantage/*`. Collective over all ranks.

        Without a sample there are none.
        """
        dist.all_reduce(self._sums)
        num_tokens, *sums = self._sums.tolist()
        if not num_tokens:
            return {}
        value, mean, square, return_mean, return_square = (each / num_tokens for each in sums)
        variance = max(0.0, square - mean**2)
        if self._config.whiten:
            self._mean, self._std = mean, math.sqrt(variance) + STD_EPS
        metrics = {
            "value/mean": value,
            "returns/mean": return_mean,
            "advantage/mean": mean,
            "advantage/std": math.sqrt(variance),
        }
        of_returns = return_square - return_mean**2
        if of_returns > 0:  # what values leave open of it is the variance of return - value
            metrics["value/explained_variance"] = 1 - variance / of_returns
        return metrics

    def advantages(self, microbatch: PackedMicrobatch) -> PackedMicrobatch:
        """The microbatch with its tokens' advantages, whitened where `advantage.whiten`.

        Raises LearnerError where a sample was not scored.
        """
        advantage_T = (self._advantages.spread(microbatch) - self._mean) / self._std
        return replace(microbatch, advantage_T=advantage_T)

    def values(self, microbatch: PackedMicrobatch) -> tuple[Tensor, Tensor]:
        """(value_T, return_T), on the CPU. Raises LearnerError where a sample was not scored."""
        return self._values.spread(microbatch), self._returns.spread(microbatch)

    def _count(self, value_A: Tensor, advantage_A: Tensor) -> None:
        return_A = value_A + advantage_A
        parts = (value_A, advantage_A, advantage_A**2, return_A, return_A**2)
        sums = torch.stack([part.sum() for part in (torch.ones_like(value_A), *parts)])
        self._sums += sums.to(self._device)
