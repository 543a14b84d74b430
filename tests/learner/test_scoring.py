"""Which minibatches are scored, and what is kept."""

from __future__ import annotations

import pytest
import torch

from megarl.errors import LearnerError
from megarl.learner.packing import Multiples, pack_sequences
from megarl.learner.scoring import KeptLogProbs, passes_needed
from megarl.types import Batch, MinibatchPlan, SampleRef


def plan(*ranks: tuple[str, ...]) -> MinibatchPlan:
    """One microbatch a rank, of samples with these names."""
    schedule = tuple((tuple(SampleRef(n, "", 0, 2, 1, 0.0, 0) for n in names),) for names in ranks)
    return MinibatchPlan(schedule, 8, sum(map(len, ranks)))


def batch(*plans: MinibatchPlan) -> Batch:
    return Batch(0, plans, 0, 4)


def test_a_second_epoch_needs_no_pass_where_nothing_is_kept() -> None:
    first, second, again = plan(("a",), ("b",)), plan(("c",), ("d",)), plan(("c", "a"), ("b", "d"))
    found = passes_needed(batch(first, second, again), keep=False)
    assert found == [(first, frozenset()), (second, frozenset())]


def test_a_second_epoch_is_scored_again_where_a_kept_sample_moves_to_another_rank() -> None:
    first, moved, same = plan(("a",), ("b",)), plan(("b",), ("a",)), plan(("a",), ("b",))
    found = passes_needed(batch(first, same, moved, same), keep=True)
    assert found == [(first, frozenset()), (moved, frozenset("ab"))]


def test_kept_logprobs_come_back_at_their_places_in_another_packing() -> None:
    sequences = [((1, 2), (3, 4, 5)), ((6,), (7,)), ((8,), (9, 10))]
    (one,), length = pack_sequences(sequences, 32, 1, 0, Multiples(microbatch=16))
    kept = KeptLogProbs()
    kept.keep(one, torch.arange(float(length)))
    spread = kept.spread(one)
    for segment in one.segments:
        assert spread[segment.response].tolist() == list(range(length))[segment.response]
    outside = torch.ones(length, dtype=torch.bool)
    for segment in one.segments:
        outside[segment.response] = False
    assert not spread[outside].any()


def test_a_sample_that_was_not_scored_is_refused() -> None:
    (one,), _ = pack_sequences([((1,), (2,))], 8, 1, 0, Multiples())
    with pytest.raises(LearnerError, match="score the batch"):
        KeptLogProbs().spread(one)
