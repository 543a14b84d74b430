"""What a batch is compared with: log-probs kept from before its first optimizer step.

Owns the table of kept log-probs and the mismatch between learner and rollout engine. Knows nothing
of models or files. T packed tokens; log-probs in nats.
"""

from __future__ import annotations

from collections.abc import Collection
from contextlib import AbstractContextManager
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from megarl.config.schema import KLConfig
from megarl.errors import LearnerError
from megarl.learner.packing import PackedMicrobatch
from megarl.types import Batch, MinibatchPlan


class ReferencePolicy(Protocol):
    """The frozen policy. Made from the learner's live weights, by local name, at the start."""

    def applied(self) -> AbstractContextManager[None]:
        """While open, the live weights hold the reference's numbers; then the policy's again.

        Bit for bit; the tensors' storage stays where it is.
        """
        ...


class Compared(Protocol):
    """Old and reference log-probs of a microbatch: `passes.Scores`."""

    @property
    def old_logp_T(self) -> Tensor: ...  # noqa: N802, D102

    @property
    def reference_logp_T(self) -> Tensor | None: ...  # noqa: N802, D102


class KeptLogProbs:
    """Log-probs of this rank's samples, by sample, held on the CPU until the next batch.

    Only the last pipeline stage has any. Samples are named, not counted: epochs place them in other
    microbatches.
    """

    def __init__(self) -> None:
        self._by_sample: dict[str, Tensor] = {}

    def clear(self) -> None:
        """Forget all; a new batch begins."""
        self._by_sample.clear()

    def keep(self, microbatch: PackedMicrobatch, logp_T: Tensor) -> None:
        """Remember each sample's response values out of `logp_T`."""
        values_T = logp_T.detach().cpu()
        for segment in microbatch.segments:
            self._by_sample[segment.key] = values_T[segment.response].clone()

    def spread(self, microbatch: PackedMicrobatch) -> Tensor:
        """The kept values at their predicting positions, float32 [T] on the CPU, 0 elsewhere.

        Raises LearnerError where a sample was not scored.
        """
        values_T = torch.zeros(len(microbatch.tokens_T), dtype=torch.float32)
        for segment in microbatch.segments:
            if segment.key not in self._by_sample:
                raise LearnerError(
                    f"sample {segment.key} has no log-probs from before the first optimizer step; "
                    "score the batch before its first step"
                )
            values_T[segment.response] = self._by_sample[segment.key]
        return values_T


class Mismatch:
    """How far the learner's log-probs are from the rollout engine's, over the loss tokens counted.

    Sums are float64 on `device`, so that all ranks' parts can be added.
    """

    def __init__(self, device: torch.device) -> None:
        self._sums = torch.zeros(4, dtype=torch.float64, device=device)
        self._largest = torch.zeros(1, dtype=torch.float64, device=device)

    def count(self, microbatch: PackedMicrobatch, logp_T: Tensor, skip: Collection[str]) -> None:
        """Add this microbatch's loss tokens, but for those of samples in `skip`."""
        mask_T = microbatch.loss_mask_T.to(logp_T.device).clone()
        for segment in microbatch.segments:
            if segment.key in skip:
                mask_T[segment.start : segment.start + segment.length] = False
        behavior_T = microbatch.behavior_logp_T.to(logp_T.device)
        difference = (logp_T.double() - behavior_T.double())[mask_T]
        if difference.numel() == 0:
            return
        ratio = difference.exp()
        k3 = ratio - 1 - difference  # of KL(behavior || learner), Schulman 2020
        parts = (torch.ones_like(ratio), difference.abs(), ratio, k3)
        self._sums += torch.stack([part.sum() for part in parts])
        self._largest = torch.maximum(self._largest, difference.abs().max())

    def metrics(self) -> dict[str, float]:
        """The means and the largest difference over all ranks. Collective over all ranks."""
        dist.all_reduce(self._sums)
        dist.all_reduce(self._largest, op=dist.ReduceOp.MAX)
        num_tokens, absolute, ratio, k3 = self._sums.tolist()
        num_tokens = max(num_tokens, 1.0)
        return {
            "mismatch/mean_abs_logprob": absolute / num_tokens,
            "mismatch/max_abs_logprob": float(self._largest),
            "mismatch/mean_ratio": ratio / num_tokens,
            "mismatch/k3_kl": k3 / num_tokens,
        }


def kl_rewards(kl: KLConfig, scores: Compared) -> Tensor | None:
    """What each token is rewarded with besides the sample's reward, [T] on the CPU: its KL.

    None where that is in the loss. Source: Ouyang et al. 2022 (InstructGPT), eq. 2, by token as in
    Ziegler et al. 2019.
    """
    if kl.where == "loss" or scores.reference_logp_T is None:
        return None
    return -kl.coef * (scores.old_logp_T - scores.reference_logp_T).cpu()


def passes_needed(batch: Batch, keep: bool) -> list[tuple[MinibatchPlan, frozenset[str]]]:
    """The minibatches to score, each with the samples in it that were counted before.

    Later epochs repeat samples: without `keep` they need no pass; with it, a minibatch needs one
    where a sample of it has moved to a data-parallel rank that does not hold its log-probs yet.
    """
    counted: set[str] = set()
    held: set[tuple[int, str]] = set()
    needed = []
    for plan in batch.minibatches:
        here = {
            (dp_rank, ref.sample_id)
            for dp_rank, microbatches in enumerate(plan.schedule)
            for microbatch in microbatches
            for ref in microbatch
        }
        samples = {sample_id for _, sample_id in here}
        if not samples <= counted or (keep and not here <= held):
            needed.append((plan, frozenset(samples & counted)))
            counted |= samples
            held |= here
    return needed
