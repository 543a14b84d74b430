"""Values that all learner ranks must have: of rank 0, or of every rank. Owns nothing else."""

from __future__ import annotations

from typing import TypeVar

import torch.distributed as dist

Part = TypeVar("Part")


def from_first(group: dist.ProcessGroup | None, value: Part) -> Part:
    """Rank 0's value, on every rank. Collective over `group`; None is one rank alone."""
    box = [value]
    if group is not None:
        dist.broadcast_object_list(box, src=dist.get_global_rank(group, 0), group=group)
    return box[0]


def from_all(group: dist.ProcessGroup | None, mine: Part) -> list[Part]:
    """What every rank has to say, in rank order, on every rank. Collective over `group`."""
    if group is None:
        return [mine]
    parts: list[Part | None] = [None] * dist.get_world_size(group)
    dist.all_gather_object(parts, mine, group=group)
    return [part for part in parts if part is not None]
