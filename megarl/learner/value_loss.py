"""The critic's loss as sums: the squared error of clipped values.

Owns the formula. As in `loss.py` numerators are summed here, and the one denominator, the loss
tokens of the whole minibatch over all ranks, is given; masked values are selected with `where`,
never multiplied. T packed tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megarl.errors import ShapeError


@dataclass(frozen=True, slots=True, eq=False)
class ValueSums:
    """Sums over the loss tokens of one microbatch. Only `loss` is used for its gradient."""

    loss: Tensor
    clipped: Tensor

    def stacked(self) -> Tensor:
        """The sums as one float64 vector, in the order of the fields."""
        return torch.stack([self.loss.detach().double(), self.clipped.double()])


def value_loss(
    value_T: Tensor, *, old_value_T: Tensor, return_T: Tensor, loss_mask_T: Tensor, clip: float
) -> ValueSums:
    """Half of max((V - R)^2, (V_clipped - R)^2) of each loss token, summed, and how many have the
    clipped branch.

    V_clipped is V within `clip` of the old value; `clip` 0 takes V as it is. Raises ShapeError
    where the inputs differ in shape. Source: Engstrom et al. 2020, "Implementation matters in deep
    policy gradients", section 3, item 1 (value function clipping, as in OpenAI's baselines, with
    their factor of a half).
    """
    given = (value_T, old_value_T, return_T, loss_mask_T)
    if len({tensor.shape for tensor in given}) != 1:
        raise ShapeError(f"inputs of the value loss have shapes {[list(t.shape) for t in given]}")

    def masked(tensor_T: Tensor) -> Tensor:
        return torch.where(loss_mask_T, tensor_T, 0.0)

    value_T, old_value_T, return_T = masked(value_T), masked(old_value_T), masked(return_T)
    error_T = (value_T - return_T).square()
    if clip == 0:
        return ValueSums(0.5 * error_T.sum(), torch.zeros((), device=value_T.device))
    near_T = value_T.clamp(old_value_T - clip, old_value_T + clip)  # exactly the value within
    clipped_T = (near_T - return_T).square()
    return ValueSums(
        loss=0.5 * torch.maximum(error_T, clipped_T).sum(),
        clipped=((clipped_T > error_T) & loss_mask_T).sum(),
    )
