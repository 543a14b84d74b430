"""Where a source rank stages its tensors in its one shared memory file.

Pure, so that sender and receiver work out the same offsets without telling each other.
"""

from __future__ import annotations

import math

from megarl.reshard.layout import RankLayout
from megarl.reshard.plan import Plan

ALIGNMENT_BYTES = 64  # a cache line, and enough for any element type


def arena_layout(rank: RankLayout, plan: Plan, itemsize: int) -> tuple[dict[str, int], int]:
    """(byte offset of each local tensor that the plan reads on its own node, total bytes).

    Tensors lie whole and contiguous, sorted by name; `itemsize` is bytes per element as staged.
    """
    read = {move.src_local for move in plan.sends(rank.rank) if move.link in ("local", "node")}
    offsets: dict[str, int] = {}
    total = 0
    for tensor in sorted(rank.tensors, key=lambda tensor: tensor.name):
        if tensor.name in read:
            offsets[tensor.name] = total
            size = math.prod(tensor.shape) * itemsize
            total += (size + ALIGNMENT_BYTES - 1) // ALIGNMENT_BYTES * ALIGNMENT_BYTES
    return offsets, total
