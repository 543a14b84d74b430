"""Where a source rank stages its tensors in its one shared memory file.

Pure, so that sender and receiver work out the same slots without telling each other.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from megarl.actor.parameters import Precision, precision_bytes
from megarl.reshard.layout import RankLayout
from megarl.reshard.plan import Plan

ALIGNMENT_BYTES = 64  # a cache line, and enough for any element type


@dataclass(frozen=True, slots=True)
class Slot:
    """A local tensor's place: it lies whole and contiguous from byte `offset` on, in `precision`.

    A local tensor is one buffer, and all that it holds has one precision.
    """

    offset: int
    shape: tuple[int, ...]
    precision: Precision


def arena_layout(rank: RankLayout, plan: Plan) -> tuple[dict[str, Slot], int]:
    """(slot of each local tensor of a source rank that the plan reads on its node, total bytes).

    Tensors are sorted by name. Elements in the policy's precision have `plan.policy_bytes`.
    """
    operations = plan.operations_from(rank.rank)
    read = operations.source_tensors(plan, operations.near)
    precisions = local_precisions(rank, plan)
    slots: dict[str, Slot] = {}
    total = 0
    for tensor in sorted(rank.tensors, key=lambda tensor: tensor.name):
        if tensor.name in read:
            precision = precisions[tensor.name]
            slots[tensor.name] = Slot(total, tensor.shape, precision)
            size = math.prod(tensor.shape) * precision_bytes(precision, plan.policy_bytes)
            total += (size + ALIGNMENT_BYTES - 1) // ALIGNMENT_BYTES * ALIGNMENT_BYTES
    return slots, total


def local_precisions(rank: RankLayout, plan: Plan) -> dict[str, Precision]:
    """The precision of each local tensor of a source rank: that of the parameters it holds."""
    known = {parameter.name: parameter.precision for parameter in plan.source.parameters}
    return {piece.local: known[piece.tensor] for piece in rank.pieces}
