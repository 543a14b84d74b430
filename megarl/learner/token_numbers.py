"""Numbers of loss tokens, by sample, on their way between ranks that hold a sample and others.

Owns the table of them and how all ranks come to hold what some have. Knows nothing of models or of
what a number means. T packed tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from megarl.errors import LearnerError, ShapeError
from megarl.learner.distributed import Ranks
from megarl.learner.packing import PackedMicrobatch, Segment
from megarl.types import Batch, SampleRef, TokenNumbers

FORM = np.dtype("<f4")


class LossTokenNumbers:
    """Of this rank's samples, or of all; held on the CPU until `clear`. `what` names them."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._by_sample: dict[str, Tensor] = {}

    def clear(self) -> None:
        """Forget all; a new batch begins."""
        self._by_sample.clear()

    def keep(self, microbatch: PackedMicrobatch, numbers_T: Tensor) -> None:
        """Remember each sample's loss tokens out of `numbers_T`, which is on the CPU."""
        for segment in microbatch.segments:
            found = numbers_T[loss_positions(microbatch, segment)]
            self._by_sample[segment.key] = found.float().clone()

    def spread(self, microbatch: PackedMicrobatch) -> Tensor:
        """The numbers at their predicting positions, float32 [T] on the CPU, 0 elsewhere.

        Raises LearnerError where a sample has none, or not one for each loss token.
        """
        numbers_T = torch.zeros(len(microbatch.tokens_T), dtype=torch.float32)
        for segment in microbatch.segments:
            places = loss_positions(microbatch, segment)
            found = self._by_sample.get(segment.key)
            if found is None or len(found) != len(places):
                has = "none" if found is None else f"{len(found)} for {len(places)} loss tokens"
                raise LearnerError(
                    f"sample {segment.key} has no {self._what} from before the first optimizer "
                    f"step: {has}; score the batch before its first step"
                )
            numbers_T[places] = found
        return numbers_T

    def take(self, given: Sequence[TokenNumbers]) -> None:
        """Hold what was `given` instead. Raises ShapeError where it is no row of numbers."""
        self.clear()
        for each in given:
            if len(each.data) % FORM.itemsize:
                raise ShapeError(f"{each.sample_id}: {len(each.data)} bytes are no float32 numbers")
            numbers = np.frombuffer(each.data, FORM).astype(np.float32)
            self._by_sample[each.sample_id] = torch.from_numpy(numbers)

    def gathered(self, batch: Batch, ranks: Ranks) -> tuple[TokenNumbers, ...]:
        """Those of all samples of `batch`, from the ranks that scored them first, on every rank.

        Collective over all ranks. Raises LearnerError where a rank lacks those of its sample.
        """
        owners = _owners(batch)
        ends = np.cumsum([0, *(ref.num_loss_tokens for ref, _ in owners)])
        found = torch.zeros(int(ends[-1]), dtype=torch.float32)
        for at, (ref, dp_rank) in enumerate(owners):
            if ranks.reports and dp_rank == ranks.dp_rank:
                found[ends[at] : ends[at + 1]] = self._by_sample[ref.sample_id]
        found = found.to(ranks.device)
        dist.all_reduce(found)  # zeros but from one rank, so that no number changes
        numbers = found.cpu().numpy().astype(FORM)
        return tuple(
            TokenNumbers(ref.sample_id, numbers[ends[at] : ends[at + 1]].tobytes())
            for at, (ref, _) in enumerate(owners)
        )


def loss_positions(microbatch: PackedMicrobatch, segment: Segment) -> Tensor:
    """Where a sample's loss tokens were predicted; what others inserted is none."""
    within = microbatch.loss_mask_T[segment.response].nonzero().squeeze(1)
    return within + segment.response.start


def _owners(batch: Batch) -> list[tuple[SampleRef, int]]:
    """Every sample once, and the data-parallel rank that scores it first."""
    found: dict[str, tuple[SampleRef, int]] = {}
    for plan in batch.minibatches:
        for dp_rank, microbatches in enumerate(plan.schedule):
            for ref in (ref for microbatch in microbatches for ref in microbatch):
                found.setdefault(ref.sample_id, (ref, dp_rank))
    return list(found.values())
