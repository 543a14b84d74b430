"""Which pieces each side sums up, and whether the sums prove that a policy has arrived.

Both sides work out the pieces from layouts alone. Owns the comparison. Knows of sums only that
those of parts add up; nothing of how they are made or travel.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from megarl.reshard.cover import Cover
from megarl.reshard.layout import Box, Layout, Piece
from megarl.weight_sync.checksum import add

_SHOWN = 3  # tensors named in one error


def held(layout: Layout) -> dict[int, tuple[Piece, ...]]:
    """For each rank all that it holds, cut so that pieces of different ranks are equal or disjoint.

    The order is the same in every process: a rank's sums are listed in it.
    """
    cover = Cover(layout)
    return {rank: cover.held(rank) for rank in layout.rank_ids}


def differences(
    pieces: Mapping[int, Sequence[Piece]],
    sums: Mapping[int, Sequence[int]],
    wanted: Mapping[str, int],
) -> list[str]:
    """What keeps a server's `sums` (by rank, in the order of `pieces`) from proving `wanted`.

    `wanted` is each whole tensor's checksum on the learner. Copies of a piece must be equal one by
    one, and the distinct pieces of a tensor must add up to the tensor. Empty where all is proved.
    """
    found: dict[str, dict[Box, tuple[int, int]]] = {tensor: {} for tensor in wanted}
    wrong: list[str] = []
    for rank, mine in pieces.items():
        if len(sums[rank]) != len(mine):
            return [f"TP rank {rank} sent {len(sums[rank])} checksums for {len(mine)} pieces"]
        for piece, total in zip(mine, sums[rank], strict=True):
            if piece.tensor not in found:
                return [f"the learner has no checksum of {piece.tensor}"]
            first = found[piece.tensor].setdefault(piece.box, (rank, total))
            if first[1] != total:
                wrong.append(
                    f"{piece.tensor} {piece.box}: copies on TP ranks {first[0]} and {rank} differ"
                )
    for tensor, boxes in found.items():
        total = add([box_sum for _, box_sum in boxes.values()])
        if total != wanted[tensor]:
            wrong.append(
                f"{tensor}: {total:016x} on the server, {wanted[tensor]:016x} on the learner"
            )
    return wrong


def describe(wrong: Sequence[str]) -> str:
    """Differences in one line, the first few in full.

    >>> describe(["a", "b", "c", "d"])
    'a; b; c; and 1 more'
    """
    shown = "; ".join(wrong[:_SHOWN])
    return shown if len(wrong) <= _SHOWN else f"{shown}; and {len(wrong) - _SHOWN} more"
