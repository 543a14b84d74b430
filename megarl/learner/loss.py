"""The policy loss as sums: PPO's clipped surrogate, k3 KL to the reference, entropy bonus.

Owns the formulas. Knows nothing of models, microbatches or ranks: numerators are summed here, and
the one denominator, the loss tokens of the whole minibatch over all ranks, is given. So the
gradient is the same for every split into microbatches and ranks. Masked values are selected with
`where`, never multiplied. T packed tokens; log-probs in nats.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megarl.config.schema import Config
from megarl.errors import ShapeError


@dataclass(frozen=True, slots=True)
class LossWeights:
    """The constants of the loss; see `loss.*` and `kl.*` of the configuration."""

    clip_low: float
    clip_high: float
    entropy_coef: float = 0.0
    kl_coef: float = 0.0

    @classmethod
    def of(cls, config: Config) -> LossWeights:
        """Those of a run. A KL term that is a part of the reward is none of the loss."""
        loss, kl = config.loss, config.kl
        kl_coef = kl.coef if kl.where == "loss" else 0.0
        return cls(loss.clip_low, loss.clip_high, loss.entropy_coef, kl_coef)


@dataclass(frozen=True, slots=True, eq=False)
class LossSums:
    """Sums over the loss tokens of one microbatch. Only `total` is used for its gradient."""

    total: Tensor
    policy: Tensor
    clipped: Tensor
    kl: Tensor
    entropy: Tensor

    def stacked(self) -> Tensor:
        """The sums as one float64 vector, in the order of the fields."""
        sums = (self.total, self.policy, self.clipped, self.kl, self.entropy)
        return torch.stack([each.detach().double() for each in sums])


def clipped_surrogate(
    log_ratio_T: Tensor, advantage_T: Tensor, clip_low: float, clip_high: float
) -> tuple[Tensor, Tensor]:
    """PPO's clipped objective, negated, [T], and where its clipped branch is taken, bool [T].

    Source: Schulman et al. 2017, eq. 7, with one bound for each side.
    """
    ratio_T = log_ratio_T.exp()
    free_T = ratio_T * advantage_T
    clipped_T = ratio_T.clamp(1 - clip_low, 1 + clip_high) * advantage_T
    return -torch.minimum(free_T, clipped_T), clipped_T < free_T


def k3_kl(logp_T: Tensor, reference_logp_T: Tensor) -> Tensor:
    """KL(policy || reference) per token, [T]: exp(d) - d - 1 with d = reference - policy.

    Source: Schulman 2020, "Approximating KL divergence", k3: unbiased under the policy, never
    negative.
    """
    difference_T = reference_logp_T - logp_T
    return difference_T.exp() - difference_T - 1


def policy_loss(
    logp_T: Tensor,
    entropy_T: Tensor,
    *,
    old_logp_T: Tensor,
    advantage_T: Tensor,
    loss_mask_T: Tensor,
    reference_logp_T: Tensor | None,
    weights: LossWeights,
) -> LossSums:
    """Sums over the loss tokens; divide `total` by the minibatch's number of them to get the loss.

    Raises ShapeError where the inputs differ in shape, or where the KL has a weight and no
    reference.
    """
    given = [logp_T, entropy_T, old_logp_T, advantage_T, loss_mask_T]
    given += [] if reference_logp_T is None else [reference_logp_T]
    if len({tensor.shape for tensor in given}) != 1:
        raise ShapeError(f"inputs of the loss have shapes {[list(t.shape) for t in given]}")
    if weights.kl_coef > 0 and reference_logp_T is None:
        raise ShapeError("kl.coef is above 0, but there are no reference log-probs; score first")

    def masked(value_T: Tensor) -> Tensor:
        return torch.where(loss_mask_T, value_T, 0.0)

    # Selected before exp as well: an infinite ratio off the mask would make its zero gradient NaN.
    log_ratio_T = masked(logp_T - old_logp_T)
    surrogate_T, clipped_T = clipped_surrogate(
        log_ratio_T, masked(advantage_T), weights.clip_low, weights.clip_high
    )
    policy = masked(surrogate_T).sum()
    total = policy
    kl = torch.zeros_like(policy)
    if reference_logp_T is not None:
        kl = k3_kl(masked(logp_T), masked(reference_logp_T)).sum()
        total = total + weights.kl_coef * kl if weights.kl_coef > 0 else total
    if weights.entropy_coef > 0:
        entropy = masked(entropy_T).sum()
        total = total - weights.entropy_coef * entropy
    else:
        entropy = masked(entropy_T.detach()).sum()
    clipped = (clipped_T & loss_mask_T).sum()
    return LossSums(total=total, policy=policy, clipped=clipped, kl=kl, entropy=entropy)
