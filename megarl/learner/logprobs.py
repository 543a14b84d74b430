"""Log-probs and entropy of packed tokens from vocab-parallel logits, at the sampling temperature.

Owns what a log-prob means in the learner: log softmax(logits / temperature) over the true
vocabulary. Columns at and beyond the vocabulary size are minus infinity before the softmax: they
are left out of every sum. Knows nothing of models, losses or samples. Computes in fp32 whatever the
logits are, of which there are two chunks at a time.

T packed tokens, V columns of this tensor-parallel rank, W of them within the vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megarl.planning.logits import MAX_FP32_ELEMENTS


class _VocabParallelLogProbs(torch.autograd.Function):
    """(logp_T, entropy_T) of targets; backward recomputes the softmax chunk by chunk."""

    @staticmethod
    def forward(
        ctx: Any,
        logits_TV: Tensor,
        targets_T: Tensor,
        temperature: float,
        num_columns: int,
        first_column: int,
        group: Any,
    ) -> tuple[Tensor, Tensor]:
        local_T = targets_T - first_column
        here_T = (local_T >= 0) & (local_T < num_columns)
        local_T = torch.where(here_T, local_T, 0)
        logits_TW = logits_TV[:, :num_columns]
        if num_columns:
            top_T = logits_TW.amax(dim=1).float() / temperature
        else:  # this rank holds padding only
            top_T = torch.full_like(targets_T, float("-inf"), dtype=torch.float32)
        _all_reduce(top_T, dist.ReduceOp.MAX, group)
        sums_3T = torch.zeros(3, len(targets_T), dtype=torch.float32, device=logits_TV.device)
        if num_columns:
            for rows in _chunks(logits_TW):
                z = _scaled(logits_TW[rows], temperature).sub_(top_T[rows, None])
                at_target = z.gather(1, local_T[rows, None]).squeeze(1)
                sums_3T[2, rows] = torch.where(here_T[rows], at_target, 0.0)
                weight = z.exp()
                sums_3T[0, rows] = weight.sum(dim=1)
                sums_3T[1, rows] = z.masked_fill_(weight == 0, 0.0).mul_(weight).sum(dim=1)
        _all_reduce(sums_3T, dist.ReduceOp.SUM, group)
        log_sum_T = sums_3T[0].log()
        logp_T = sums_3T[2] - log_sum_T
        entropy_T = log_sum_T - sums_3T[1] / sums_3T[0]
        ctx.save_for_backward(logits_TV, local_T, here_T, top_T + log_sum_T, entropy_T)
        ctx.temperature, ctx.num_columns = temperature, num_columns
        ctx.set_materialize_grads(False)
        return logp_T, entropy_T

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        grad_logp_T, grad_entropy_T = grads
        logits_TV, local_T, here_T, log_norm_T, entropy_T = ctx.saved_tensors
        if grad_logp_T is None and grad_entropy_T is None:
            return (None,) * 6
        if grad_logp_T is None:
            grad_logp_T = torch.zeros_like(entropy_T)
        active_T = grad_logp_T != 0
        if grad_entropy_T is not None:
            active_T = active_T | (grad_entropy_T != 0)
        grad_TV = torch.zeros_like(logits_TV)
        logits_TW = logits_TV[:, : ctx.num_columns]
        for rows in _chunks(logits_TW) if ctx.num_columns else ():
            logp = _scaled(logits_TW[rows], ctx.temperature).sub_(log_norm_T[rows, None])
            prob = logp.exp()
            if grad_entropy_T is None:
                grad = prob.mul_(-grad_logp_T[rows, None])
            else:  # -prob * (grad_logp + grad_entropy * (logp + entropy)), in the place of logp
                logp.masked_fill_(prob == 0, 0.0).add_(entropy_T[rows, None])
                logp.mul_(grad_entropy_T[rows, None]).add_(grad_logp_T[rows, None])
                grad = logp.mul_(prob.neg_())
            at_target = torch.where(here_T[rows], grad_logp_T[rows], 0.0)
            grad.scatter_add_(1, local_T[rows, None], at_target[:, None])
            grad.div_(ctx.temperature).masked_fill_(~active_T[rows, None], 0.0)
            grad_TV[rows, : ctx.num_columns].copy_(grad)
        return grad_TV, None, None, None, None, None


def vocab_parallel_logprobs(
    logits_TV: Tensor,
    targets_T: Tensor,
    *,
    temperature: float,
    vocab_size: int,
    tp_rank: int = 0,
    tp_group: Any = None,
) -> tuple[Tensor, Tensor]:
    """Log-probs of `targets_T` and the entropy of each row, both fp32 [T], in nats.

    `logits_TV` are columns [tp_rank * V, (tp_rank + 1) * V) of the padded vocabulary; fp32 or bf16,
    never changed. Collective over `tp_group` (None: one rank). The gradient is that of this rank's
    columns; rows without a gradient get exact zeros, whatever their logits are.
    """
    first = tp_rank * logits_TV.shape[1]
    num_columns = min(max(vocab_size - first, 0), logits_TV.shape[1])
    logp_T, entropy_T = _VocabParallelLogProbs.apply(  # type: ignore[no-untyped-call]
        logits_TV, targets_T, temperature, num_columns, first, tp_group
    )
    return logp_T, entropy_T


def _scaled(logits_TW: Tensor, temperature: float) -> Tensor:
    """logits / temperature in fp32, a new tensor."""
    return logits_TW.to(torch.float32, copy=True).div_(temperature)


def _chunks(logits_TW: Tensor) -> list[slice]:
    """Runs of rows whose fp32 copy stays within MAX_FP32_ELEMENTS."""
    num_rows, num_columns = logits_TW.shape
    step = max(1, MAX_FP32_ELEMENTS // num_columns)
    return [slice(at, min(at + step, num_rows)) for at in range(0, num_rows, step)]


def _all_reduce(tensor: Tensor, op: Any, group: Any) -> None:
    if group is not None and dist.get_world_size(group) > 1:
        dist.all_reduce(tensor, op=op, group=group)
