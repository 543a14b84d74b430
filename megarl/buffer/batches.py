"""Stage e: minibatches and their schedule over data-parallel ranks, made once and centrally.

Owns which samples make one optimizer step and which microbatch of which rank each goes to. Pure:
knows references only; no tokens, files, rewards or collectives.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from megarl.config.schema import Config
from megarl.errors import ConfigError
from megarl.types import Batch, MinibatchPlan, SampleRef

Microbatch = tuple[SampleRef, ...]


@dataclass(frozen=True, slots=True)
class BatchShape:
    """The settings that shape a batch. `max_tokens` bounds one microbatch."""

    num_minibatches: int
    num_epochs: int
    data_parallel: int
    max_tokens: int
    seed: int

    @classmethod
    def of(cls, config: Config) -> BatchShape:
        """The shape that a run's settings ask for."""
        return cls(
            num_minibatches=config.learner.optimizer_steps_per_rollout,
            num_epochs=config.learner.epochs_per_rollout,
            data_parallel=config.data_parallel,
            max_tokens=config.learner.max_tokens_per_microbatch,
            seed=config.run.seed,
        )


def make_batch(groups: Sequence[Sequence[SampleRef]], version: int, shape: BatchShape) -> Batch:
    """The optimizer steps of one rollout batch, in order, for the learner at `version`.

    `groups` holds each group's usable samples; their order does not matter to the result. Every
    epoch uses every sample once, in an order drawn from (seed, version, epoch). There are fewer
    minibatches than asked where there are fewer samples, and none where there are no samples.

    Raises ConfigError for a sample longer than a microbatch.
    """
    kept = sorted((tuple(group) for group in groups if group), key=lambda refs: refs[0].sample_id)
    refs = [ref for group in kept for ref in group]
    minibatches: list[MinibatchPlan] = []
    for epoch in range(shape.num_epochs):
        order = list(kept)
        # A string seed is hashed with SHA-512 by random.Random: the same on every machine.
        random.Random(f"minibatches/{shape.seed}/{version}/{epoch}").shuffle(order)
        for part in split_minibatches(order, shape.num_minibatches):
            minibatches.append(schedule(part, shape.data_parallel, shape.max_tokens))
    return Batch(
        version=version,
        minibatches=tuple(minibatches),
        worst_staleness=max((version - ref.version for ref in refs), default=0),
        num_samples=len(refs),
    )


def split_minibatches(
    groups: Sequence[Sequence[SampleRef]], num_minibatches: int
) -> list[list[SampleRef]]:
    """Split whole samples into at most `num_minibatches` non-empty parts of about equal counts.

    Groups stay whole where there are at least as many groups as parts; else the samples are cut in
    order, into counts that differ by at most one.
    """
    if len(groups) >= num_minibatches:
        parts: list[list[SampleRef]] = [[] for _ in range(num_minibatches)]
        for group in sorted(groups, key=len, reverse=True):  # stable: keeps the shuffled order
            min(parts, key=len).extend(group)
        return [part for part in parts if part]
    refs = [ref for group in groups for ref in group]
    num_parts = min(num_minibatches, len(refs))
    cuts = [len(refs) * part // num_parts for part in range(num_parts + 1)] if refs else []
    return [refs[start:end] for start, end in pairwise(cuts)]


def schedule(refs: Sequence[SampleRef], data_parallel: int, max_tokens: int) -> MinibatchPlan:
    """Place samples in microbatches: the same number on every rank, none above `max_tokens`.

    Takes the smallest number of microbatches that one of two placements fits in (longest sample
    first into the least full microbatch, which balances; or into the first that has room, which is
    tighter), then deals the microbatches to ranks so that their sums are near. Deterministic.

    Raises ConfigError for a sample longer than `max_tokens`. Source: Graham 1969 (LPT), Johnson
    1973 (first fit decreasing).
    """
    ordered = sorted(refs, key=lambda ref: (-ref.num_tokens, ref.sample_id))
    if ordered and ordered[0].num_tokens > max_tokens:
        raise ConfigError(
            f"learner.max_tokens_per_microbatch = {max_tokens}: sample {ordered[0].sample_id} has "
            f"{ordered[0].num_tokens} tokens; raise it to at least that, or lower "
            "rollout.sampling.max_new_tokens or prompts.max_prompt_tokens"
        )
    total = sum(ref.num_tokens for ref in ordered)
    per_rank = max(1, -(-total // (data_parallel * max_tokens)))
    while True:  # ends: with a microbatch for each sample everything fits
        num_bins = per_rank * data_parallel
        bins = _place_balanced(ordered, num_bins, max_tokens)
        bins = bins if bins is not None else _place_tight(ordered, num_bins, max_tokens)
        if bins is not None:
            break
        per_rank += 1
    return MinibatchPlan(
        schedule=_deal(bins, data_parallel, per_rank),
        microbatch_tokens=max(map(_tokens, bins)),
        num_loss_tokens=sum(ref.num_loss_tokens for ref in ordered),
    )


def _place_balanced(
    ordered: Sequence[SampleRef], num_bins: int, max_tokens: int
) -> list[Microbatch] | None:
    """Each sample into the least full bin (LPT), or None where that passes the budget."""
    bins: list[list[SampleRef]] = [[] for _ in range(num_bins)]
    heap = [(0, index) for index in range(num_bins)]
    for ref in ordered:
        tokens, index = heap[0]
        if tokens + ref.num_tokens > max_tokens:
            return None
        bins[index].append(ref)
        heapq.heapreplace(heap, (tokens + ref.num_tokens, index))
    return [tuple(refs) for refs in bins]


def _place_tight(
    ordered: Sequence[SampleRef], num_bins: int, max_tokens: int
) -> list[Microbatch] | None:
    """Each sample into the first bin with room (FFD), or None where there is none."""
    bins: list[list[SampleRef]] = [[] for _ in range(num_bins)]
    room = [max_tokens] * num_bins
    for ref in ordered:
        index = next((i for i, left in enumerate(room) if left >= ref.num_tokens), None)
        if index is None:
            return None
        bins[index].append(ref)
        room[index] -= ref.num_tokens
    return [tuple(refs) for refs in bins]


def _deal(
    bins: Sequence[Microbatch], data_parallel: int, per_rank: int
) -> tuple[tuple[Microbatch, ...], ...]:
    """`per_rank` bins to each rank, fullest first, each to the rank with least so far."""
    ranks: list[list[Microbatch]] = [[] for _ in range(data_parallel)]
    sums = [0] * data_parallel
    for microbatch in sorted(bins, key=_tokens, reverse=True):
        open_ranks = (rank for rank in range(data_parallel) if len(ranks[rank]) < per_rank)
        rank = min(open_ranks, key=lambda candidate: sums[candidate])
        ranks[rank].append(microbatch)
        sums[rank] += _tokens(microbatch)
    return tuple(tuple(rank) for rank in ranks)


def _tokens(microbatch: Microbatch) -> int:
    return sum(ref.num_tokens for ref in microbatch)
