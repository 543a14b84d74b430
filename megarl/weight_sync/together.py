"""What all learner ranks must have in common: one rank's value, every rank's, sums, or one probe.

Owns nothing else. All raise WeightSyncError where a rank has ended, or does not come within the
group's timeout. Each is collective over its group; None is one rank alone.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TypeVar

import torch.distributed as dist

from megarl.errors import WeightSyncError, in_words
from megarl.weight_sync.order import Summed, added_up
from megarl.weight_sync.pending import Pending
from megarl.weight_sync.probe import PendingProbe, Probe

Part = TypeVar("Part")


def from_first(group: dist.ProcessGroup | None, value: Part) -> Part:
    """Rank 0's value, on every rank."""
    box = [value]
    if group is not None:
        with answering():
            dist.broadcast_object_list(box, src=dist.get_global_rank(group, 0), group=group)
    return box[0]


def from_all(group: dist.ProcessGroup | None, mine: Part) -> list[Part]:
    """What every rank has to say, in rank order, on every rank."""
    if group is None:
        return [mine]
    parts: list[Part | None] = [None] * dist.get_world_size(group)
    with answering():
        dist.all_gather_object(parts, mine, group=group)
    return [part for part in parts if part is not None]


def settle_sums(
    group: dist.ProcessGroup | None,
    rank: int,
    work: Callable[[], Mapping[str, int]],
    pending: Pending[Summed] | None,
) -> None:
    """Sum the weights on all ranks, and give the sums to those who wait for them on rank 0."""
    total = Summed(error="the learner's ranks did not sum their weights together")
    try:
        total = added_up(from_all(group, _summed(work, rank)))
    finally:
        if pending is not None:
            pending.settle(total, total.error)


def _summed(work: Callable[[], Mapping[str, int]], rank: int) -> Summed:
    """This rank's sums, or why it has none."""
    start = time.monotonic()
    try:
        return Summed(work(), time.monotonic() - start)
    except Exception as error:  # noqa: BLE001 - the other ranks wait for this one's word
        return Summed(error=f"learner rank {rank}: {in_words(error)}")


def settle_probe(
    group: dist.ProcessGroup | None,
    rank: int,
    score: Callable[[], Probe] | None,
    pending: PendingProbe | None,
) -> str:
    """Score the probe on all ranks, and give it to those who wait for it on rank 0.

    Returns what kept a rank from scoring it, "" where nothing did.
    """
    probe, wrong = None, "the learner's ranks did not score the probe together"
    try:
        if score is None:
            wrong = ""
        else:
            probe, mine = _scored(score, rank)
            wrong = "; ".join(text for text in from_all(group, mine) if text)
    finally:
        if pending is not None:
            pending.settle(probe, wrong)
    return wrong


def _scored(score: Callable[[], Probe], rank: int) -> tuple[Probe | None, str]:
    """The probe, or why this rank has none."""
    try:
        return score(), ""
    except Exception as error:  # noqa: BLE001 - the other ranks wait for this one's word
        return None, f"learner rank {rank} could not score the probe: {in_words(error)}"


@contextmanager
def answering() -> Iterator[None]:
    """Turns the error of a collective that a rank does not take part in into WeightSyncError."""
    try:
        yield
    except RuntimeError as error:
        cause = str(error).splitlines()[0][:200]
        raise WeightSyncError(
            "a learner rank has ended or does not answer, so that the ranks cannot go on together "
            f"({cause}); see the logs of the learner's ranks, and restart the learner"
        ) from error
