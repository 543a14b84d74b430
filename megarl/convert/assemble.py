"""The tensors of a file to write, put together from a source by a plan, one at a time."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from megarl.convert.numbers import Bits, Cast, forget
from megarl.convert.opened import Checkpoint
from megarl.convert.target import Target
from megarl.errors import CheckpointError
from megarl.reshard import execute
from megarl.reshard.files import STORED
from megarl.reshard.layout import Padding
from megarl.reshard.moves import Move
from megarl.reshard.plan import Plan


def assembled(
    source: Checkpoint, target: Target, plan: Plan, number: int
) -> Iterator[tuple[str, Bits]]:
    """(local name, bits) of each tensor of file `number`, in the file's order.

    Raises CheckpointError where a number does not fit the type that is wanted.
    """
    moves: dict[str, list[Move]] = {}
    for move in plan.receives(number):
        moves.setdefault(move.dst_local, []).append(move)
    paddings: dict[str, list[Padding]] = {}
    for padding in target.layout.rank(number).paddings:
        paddings.setdefault(padding.local, []).append(padding)
    for name, tensor in target.files[number].tensors.items():
        bits = np.empty(tensor.shape, STORED[tensor.dtype])
        for padding in paddings.get(name, ()):
            bits[execute.slices(padding.box)] = 0
        for move in moves.get(name, ()):
            held = source.tensor(move.src, move.src_local)
            dtype = source.dtypes[move.src][move.src_local]
            sources = {move.src_local: Cast(held, dtype, tensor.dtype)}
            try:
                execute.run((move,), sources, {name: bits})
            except OverflowError as error:
                raise CheckpointError(f"{move.tensor}: {error}") from error
            forget(held)
        yield name, bits
