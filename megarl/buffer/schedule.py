"""Stage e: the samples of one optimizer step, placed in microbatches of data-parallel ranks.

Owns the placement: equal counts on every rank, a token budget, and ranks of near equal work. Pure:
knows references only; no tokens, files or collectives.

Work is estimated in floating-point operations. A pipeline sends one shape, so there every
microbatch is filled up to the longest of the minibatch, and filling is work too; without a pipeline
each has its own length.
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from megarl.actor.flops import SequenceFlops
from megarl.errors import ConfigError
from megarl.types import MinibatchPlan, SampleRef

Microbatch = tuple[SampleRef, ...]
Bin = list[SampleRef]
Rank = list[Bin]
Weigh = Callable[[SampleRef], float]

NEAR_ENOUGH = 1e-3  # of the mean: ranks that differ by less are not evened out further
MAX_SWAPS_PER_RANK = 16


@dataclass(frozen=True, slots=True)
class ScheduleShape:
    """What shapes a schedule. `max_tokens` bounds one microbatch, `is_pipelined` gives all of a
    minibatch one length, and each rank has a multiple of `count` of them.

    The learner pads each sequence to a multiple of `sequence_multiple` tokens and each microbatch
    to one of `token_multiple`, which counts to the budget; a sample that its padding takes over it
    is a microbatch alone.
    """

    data_parallel: int
    max_tokens: int
    flops: SequenceFlops
    is_pipelined: bool = False
    count: int = 1
    sequence_multiple: int = 1
    token_multiple: int = 1

    @property
    def room(self) -> int:
        """Tokens of a microbatch's padded samples, at most, with which it is within the budget.

        >>> ScheduleShape(1, 100, SequenceFlops(1, 1, 1), sequence_multiple=8).room
        96
        """
        unit = math.lcm(self.sequence_multiple, self.token_multiple)
        return self.max_tokens // unit * unit

    def size(self, ref: SampleRef) -> int:
        """Tokens that a sample takes."""
        return -(-ref.num_tokens // self.sequence_multiple) * self.sequence_multiple

    def tokens(self, microbatch: Sequence[SampleRef]) -> int:
        """Those of all its samples."""
        return sum(map(self.size, microbatch))

    def work(self, ref: SampleRef) -> float:
        """Operations of a sample in one optimizer step."""
        return self.flops.training(ref.num_tokens, ref.num_loss_tokens)


def make_schedule(refs: Sequence[SampleRef], shape: ScheduleShape) -> MinibatchPlan:
    """Place samples in microbatches: the same number on every rank, none above the budget.

    Takes the smallest number of microbatches that a placement fits in. Placements balance work, or
    tokens, or, where neither fits, pack tightly; it takes the one whose busiest rank has the least
    work. Within a rank the largest microbatch comes first: ranks that meet in each microbatch, as
    with experts over data-parallel ranks, wait least, and memory is seen to suffice at once.
    Deterministic.

    Raises ConfigError for a sample longer than the budget. Source: Graham 1969 (LPT), Johnson 1973
    (first fit decreasing).
    """
    ordered = sorted(refs, key=lambda ref: (-ref.num_tokens, ref.sample_id))
    if ordered and ordered[0].num_tokens > shape.max_tokens:
        raise ConfigError(
            f"learner.max_tokens_per_microbatch = {shape.max_tokens}: sample "
            f"{ordered[0].sample_id} has {ordered[0].num_tokens} tokens; raise it to at least "
            "that, lower rollout.sampling.max_new_tokens or prompts.max_prompt_tokens, or let "
            "learner.overlong_samples cut or leave out such samples"
        )
    total = shape.tokens(ordered)
    least = max(1, -(-total // (shape.data_parallel * max(1, shape.room))))
    per_rank = -(-least // shape.count) * shape.count
    placed: list[list[Rank]] = []
    while not placed:  # ends: with a microbatch for each sample everything fits
        placed = _placements(ordered, per_rank, shape)
        per_rank += shape.count
    best = min(placed, key=lambda ranks: _busiest(ranks, shape))
    return MinibatchPlan(
        schedule=tuple(_largest_first(rank, shape) for rank in best),
        microbatch_tokens=max(sum(r.num_tokens for r in each) for rank in best for each in rank),
        num_loss_tokens=sum(ref.num_loss_tokens for ref in ordered),
    )


def dp_imbalance(plans: Sequence[MinibatchPlan], shape: ScheduleShape) -> float:
    """Work of the busiest data-parallel rank over the mean, minus 1, summed over optimizer steps.

    In every step ranks wait for its busiest. 0 is perfect, and of no work at all.
    """
    busiest = mean = 0.0
    for plan in plans:
        works = [
            sum(shape.work(ref) for microbatch in rank for ref in microbatch)
            for rank in plan.schedule
        ]
        busiest += max(works)
        mean += sum(works) / len(works)
    return busiest / mean - 1.0 if mean else 0.0


def _placements(
    ordered: Sequence[SampleRef], per_rank: int, shape: ScheduleShape
) -> list[list[Rank]]:
    """The placements into `per_rank` microbatches a rank that keep to the budget."""
    num_bins = per_rank * shape.data_parallel
    weighs: tuple[Weigh, ...] = (shape.work, shape.size)
    tried = [_place_balanced(ordered, num_bins, shape, weigh) for weigh in weighs]
    found = [bins for bins in tried if bins is not None]
    if not found:
        tight = _place_tight(ordered, num_bins, shape)
        found = [] if tight is None else [tight]
    for bins in found if shape.is_pipelined else ():
        _even_out([[each] for each in bins], shape.size, shape.room, shape)
    return [_deal(bins, per_rank, shape) for bins in found]


class _Bins:
    """Microbatches being filled, and the room that is left in each."""

    def __init__(self, num_bins: int, shape: ScheduleShape) -> None:
        self.bins: list[Bin] = [[] for _ in range(num_bins)]
        self._room, self._shape = [shape.room] * num_bins, shape

    def takes(self, index: int, ref: SampleRef) -> bool:
        """Whether there is room; an empty one takes any sample."""
        return not self.bins[index] or self._shape.size(ref) <= self._room[index]

    def put(self, index: int, ref: SampleRef) -> None:
        self.bins[index].append(ref)
        self._room[index] -= self._shape.size(ref)


def _place_balanced(
    ordered: Sequence[SampleRef], num_bins: int, shape: ScheduleShape, weigh: Weigh
) -> list[Bin] | None:
    """Each sample into the lightest bin that has room (LPT); None where none has."""
    found = _Bins(num_bins, shape)
    heap = [(0.0, index) for index in range(num_bins)]
    for ref in ordered:
        full = []
        while heap and not found.takes(heap[0][1], ref):
            full.append(heapq.heappop(heap))
        if not heap:
            return None
        weight, index = heap[0]
        found.put(index, ref)
        heapq.heapreplace(heap, (weight + weigh(ref), index))
        for each in full:
            heapq.heappush(heap, each)
    return found.bins


def _place_tight(
    ordered: Sequence[SampleRef], num_bins: int, shape: ScheduleShape
) -> list[Bin] | None:
    """Each sample into the first bin with room (FFD), or None where there is none."""
    found = _Bins(num_bins, shape)
    for ref in ordered:
        index = next((i for i in range(num_bins) if found.takes(i, ref)), None)
        if index is None:
            return None
        found.put(index, ref)
    return found.bins


def _deal(bins: Sequence[Bin], per_rank: int, shape: ScheduleShape) -> list[Rank]:
    """`per_rank` bins to each rank, heaviest first, each to the rank with least; then evened."""
    ranks: list[Rank] = [[] for _ in range(shape.data_parallel)]
    sums = [0.0] * shape.data_parallel
    works = {id(each): sum(map(shape.work, each)) for each in bins}
    for each in sorted(bins, key=lambda one: works[id(one)], reverse=True):
        open_ranks = (rank for rank in range(len(ranks)) if len(ranks[rank]) < per_rank)
        rank = min(open_ranks, key=lambda candidate: sums[candidate])
        ranks[rank].append(each)
        sums[rank] += works[id(each)]
    limit = max(map(shape.tokens, bins)) if shape.is_pipelined else shape.room
    _even_out(ranks, shape.work, limit, shape)
    return ranks


def _even_out(ranks: Sequence[Rank], weigh: Weigh, limit: int, shape: ScheduleShape) -> None:
    """Trade samples between the heaviest rank and others until trading no longer helps, in place.

    No bin comes to hold more than `limit` tokens.
    """
    sums = [sum(weigh(ref) for each in rank for ref in each) for rank in ranks]
    enough = NEAR_ENOUGH * sum(sums) / len(sums)
    for _ in range(MAX_SWAPS_PER_RANK * len(ranks)):
        by_weight = sorted(range(len(ranks)), key=lambda rank: (sums[rank], rank))
        heaviest = by_weight[-1]
        for other in by_weight[:-1]:
            gap = sums[heaviest] - sums[other]
            if gap <= enough:
                return
            moved = _trade(ranks[heaviest], ranks[other], gap, weigh, limit, shape)
            if moved:
                sums[heaviest] -= moved
                sums[other] += moved
                break
        else:
            return


def _trade(
    heavy: Rank, light: Rank, gap: float, weigh: Weigh, limit: int, shape: ScheduleShape
) -> float:
    """Exchange the two samples, or move the one, that halve `gap` best; the weight moved, or 0."""
    offers: list[tuple[float, int, int]] = sorted(
        [(0.0, at, -1) for at in range(len(light))]
        + [(weigh(ref), at, i) for at, each in enumerate(light) for i, ref in enumerate(each)]
    )
    weights = [offer[0] for offer in offers]
    room = [[limit - shape.tokens(each) for each in rank] for rank in (heavy, light)]
    best, chosen = gap / 2, None  # how far the weight moved is from half of the gap
    for from_bin, each in enumerate(heavy):
        for index, ref in enumerate(each):
            weight = weigh(ref)
            near = bisect_left(weights, weight - gap / 2)
            for other_weight, to_bin, other_index in offers[max(0, near - 2) : near + 2]:
                grows = shape.size(ref)
                grows -= shape.size(light[to_bin][other_index]) if other_index >= 0 else 0
                if -grows > room[0][from_bin] or grows > room[1][to_bin]:
                    continue
                distance = abs(weight - other_weight - gap / 2)
                if distance < best:
                    best, chosen = distance, (from_bin, index, to_bin, other_index)
    if chosen is None:
        return 0.0
    from_bin, index, to_bin, other_index = chosen
    given = heavy[from_bin].pop(index)
    moved = weigh(given)
    if other_index >= 0:
        taken = light[to_bin].pop(other_index)
        heavy[from_bin].append(taken)
        moved -= weigh(taken)
    light[to_bin].append(given)
    return moved


def _busiest(ranks: Sequence[Rank], shape: ScheduleShape) -> float:
    """Work of the rank that has most, filling included where there is any."""
    longest = max(shape.tokens(each) for rank in ranks for each in rank)
    works = []
    for rank in ranks:
        filling = sum(longest - shape.tokens(each) for each in rank) if shape.is_pipelined else 0
        samples = sum(shape.work(ref) for each in rank for ref in each)
        works.append(samples + shape.flops.filling(filling))
    return max(works)


def _largest_first(rank: Rank, shape: ScheduleShape) -> tuple[Microbatch, ...]:
    def work(microbatch: Bin) -> float:
        return sum(map(shape.work, microbatch))

    return tuple(tuple(each) for each in sorted(rank, key=work, reverse=True))
