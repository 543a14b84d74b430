"""The tensors of a file to write, put together from a source by a plan, part by part."""

from __future__ import annotations

from collections.abc import Sequence

from megarl.convert.numbers import Bits
from megarl.convert.opened import Checkpoint
from megarl.convert.stored import Cast
from megarl.convert.target import Target, Tensors
from megarl.errors import CheckpointError
from megarl.reshard.execute import slices
from megarl.reshard.layout import Box, Padding, local_box, overlap, within
from megarl.reshard.moves import Move
from megarl.reshard.plan import Plan


class Assembled:
    """A tensor of the target, of type `dtype`, whose parts are read from the source by `moves`."""

    def __init__(
        self,
        source: Checkpoint,
        dtype: str,
        shape: tuple[int, ...],
        moves: Sequence[Move],
        paddings: Sequence[Padding],
    ) -> None:
        self.shape = shape
        self._source, self._dtype, self._paddings = source, dtype, paddings
        self._moves = [(local_box(move.box, move.dst_at), move) for move in moves]

    def read(self, box: Box, out: Bits) -> None:
        """See `Stored`. Raises CheckpointError also where a number does not fit the type."""
        for padding in self._paddings:
            shared = overlap(padding.box, box)
            if shared is not None:
                out[slices(within(shared, box))] = 0
        for target, move in self._moves:
            shared = overlap(target, box)
            if shared is not None:
                self._move(move, within(shared, target), out[slices(within(shared, box))])

    def _move(self, move: Move, part: Box, out: Bits) -> None:
        """Read the part of a move's box, counted from where its box begins."""
        held = self._source.tensor(move.src, move.src_local)
        dtype = self._source.dtypes[move.src][move.src_local]
        whole = local_box(move.box, move.src_at)
        fewer = len(part) - len(whole)  # leading dims of one index that only one side has
        own, lead = part[max(0, fewer) :], max(0, -fewer)
        box = whole[:lead] + tuple(
            (start + low, start + high)
            for (start, _), (low, high) in zip(whole[lead:], own, strict=True)
        )
        out = out[(0,) * fewer] if fewer > 0 else out[(None,) * lead]
        try:
            Cast(held, dtype, self._dtype).read(box, out)
        except OverflowError as error:
            raise CheckpointError(f"{move.tensor}: {error}") from error


def assembled(source: Checkpoint, target: Target, plan: Plan, number: int) -> Tensors:
    """(local name, tensor) of each tensor of file `number`, in the file's order."""
    if number >= len(target.layout.rank_ids):
        yield from target.kept(number)
        return
    moves: dict[str, list[Move]] = {}
    for move in plan.receives(number):
        moves.setdefault(move.dst_local, []).append(move)
    paddings: dict[str, list[Padding]] = {}
    for padding in target.layout.rank(number).paddings:
        paddings.setdefault(padding.local, []).append(padding)
    for name, tensor in target.files[number].tensors.items():
        here = moves.get(name, ()), paddings.get(name, ())
        yield name, Assembled(source, tensor.dtype, tensor.shape, *here)
