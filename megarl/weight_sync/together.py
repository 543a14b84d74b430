"""Values that all learner ranks must have: of rank 0, or of every rank. Owns nothing else.

Both raise WeightSyncError where a rank has ended, or does not come within the group's timeout.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch.distributed as dist

from megarl.errors import WeightSyncError

Part = TypeVar("Part")


def from_first(group: dist.ProcessGroup | None, value: Part) -> Part:
    """Rank 0's value, on every rank. Collective over `group`; None is one rank alone."""
    box = [value]
    if group is not None:
        with _in_words():
            dist.broadcast_object_list(box, src=dist.get_global_rank(group, 0), group=group)
    return box[0]


def from_all(group: dist.ProcessGroup | None, mine: Part) -> list[Part]:
    """What every rank has to say, in rank order, on every rank. Collective over `group`."""
    if group is None:
        return [mine]
    parts: list[Part | None] = [None] * dist.get_world_size(group)
    with _in_words():
        dist.all_gather_object(parts, mine, group=group)
    return [part for part in parts if part is not None]


@contextmanager
def _in_words() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        cause = str(error).splitlines()[0][:200]
        raise WeightSyncError(
            "a learner rank has ended or does not answer, so that the ranks cannot go on together "
            f"({cause}); see the logs of the learner's ranks, and restart the learner"
        ) from error
