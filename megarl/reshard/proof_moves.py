"""The proof of moves written out: every destination element once, from who holds it.

Looks only at the moves and the two layouts, never at how the moves were made. For plans of a few
thousand moves; `proof.py` proves a plan without writing it out.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from megarl.errors import LayoutError
from megarl.reshard.layout import (
    Box,
    Layout,
    LocalTensor,
    Piece,
    RankLayout,
    local_box,
    offset_in,
    whole,
)
from megarl.reshard.moves import Move
from megarl.reshard.tiling import first_defect, inside, shown


def prove_moves(moves: Sequence[Move], source: Layout, destination: Layout) -> None:
    """Raise LayoutError naming tensor, interval and ranks unless `moves` are exactly-once.

    Shown: both layouts tile their local tensors with pieces and paddings; every move reads elements
    that its source rank holds at that place, and writes them where its destination rank wants them;
    the moves into each local tensor, with its paddings, tile it, so nothing is left out, written
    twice, or written into padding.
    """
    sources, destinations = _Places(source), _Places(destination)
    written: dict[tuple[int, str], list[tuple[Box, str]]] = {}
    for move in moves:
        given = destinations if move.link == "fanout" else sources
        given.check(move.src, move.tensor, move.box, move.src_local, move.src_at, move, "reads")
        destinations.check(
            move.dst, move.tensor, move.box, move.dst_local, move.dst_at, move, "writes"
        )
        box = local_box(move.box, move.dst_at)
        sender = f"{move.tensor} from rank {move.src}"
        written.setdefault((move.dst, move.dst_local), []).append((box, sender))
    for rank in destination.ranks:
        for tensor, fixed in _tensors(rank):
            paddings = [(box, "padding") for box, piece in fixed if piece is None]
            boxes = written.get((rank.rank, tensor.name), []) + paddings
            _check_tiling(tensor, boxes, f"destination rank {rank.rank}", fixed)


class _Places:
    """Where each rank of a layout holds what."""

    def __init__(self, layout: Layout) -> None:
        self.kind = layout.kind
        shapes = {parameter.name: parameter.shape for parameter in layout.parameters}
        self.pieces: dict[tuple[int, str, str], list[Piece]] = {}
        seen: set[tuple[int, int, int]] = set()  # replicas share their tuples
        for rank in layout.ranks:
            for piece in rank.pieces:
                key = (rank.rank, piece.local, piece.tensor)
                self.pieces.setdefault(key, []).append(piece)
            parts = (id(rank.tensors), id(rank.pieces), id(rank.paddings))
            if parts not in seen:
                seen.add(parts)
                self._check_rank(rank, shapes)

    def _check_rank(self, rank: RankLayout, shapes: dict[str, tuple[int, ...]]) -> None:
        for piece in rank.pieces:
            if piece.tensor not in shapes or not inside(piece.box, whole(shapes[piece.tensor])):
                raise LayoutError(
                    f"{self.kind}: rank {rank.rank} holds {shown(piece.box)} of {piece.tensor}, "
                    f"which is not within that parameter ({shapes.get(piece.tensor, 'unknown')})"
                )
        for tensor, fixed in _tensors(rank):
            boxes = [(box, piece.tensor if piece else "padding") for box, piece in fixed]
            _check_tiling(tensor, boxes, f"{self.kind}: rank {rank.rank}", fixed)

    def check(
        self,
        rank: int,
        tensor: str,
        box: Box,
        local: str,
        at: tuple[int, ...],
        move: Move,
        verb: str,
    ) -> None:
        """Raise unless `box` of `tensor` lies in tensor `local` of `rank` at offset `at`."""
        for piece in self.pieces.get((rank, local, tensor), ()):
            if inside(box, piece.box) and offset_in(piece, box) == at:
                return
        raise LayoutError(
            f"plan: {tensor} {shown(box)}, rank {move.src} to rank {move.dst}: it {verb} {local} "
            f"at {list(at)} of rank {rank}, where {self.kind} does not have these elements"
        )


def _tensors(rank: RankLayout) -> Iterable[tuple[LocalTensor, list[tuple[Box, Piece | None]]]]:
    """Each local tensor of a rank with the local boxes of its pieces, and paddings (None)."""
    fixed: dict[str, list[tuple[Box, Piece | None]]] = {t.name: [] for t in rank.tensors}
    for piece in rank.pieces:
        fixed.setdefault(piece.local, []).append((local_box(piece.box, piece.at), piece))
    for padding in rank.paddings:
        fixed.setdefault(padding.local, []).append((padding.box, None))
    known = {tensor.name: tensor for tensor in rank.tensors}
    for name, boxes in fixed.items():
        if name not in known:
            raise LayoutError(f"rank {rank.rank} holds pieces in {name}, which it does not have")
        yield known[name], boxes


def _check_tiling(
    tensor: LocalTensor,
    boxes: Sequence[tuple[Box, str]],
    where: str,
    fixed: Sequence[tuple[Box, Piece | None]],
) -> None:
    """Raise unless the named boxes tile the local tensor exactly."""
    target = whole(tensor.shape)
    defect = first_defect(boxes, target)
    if defect is None:
        return
    box, names = defect
    if names:
        found = f"is written {len(names)} times ({'; '.join(names)})"
    else:
        owners = [piece.tensor for held, piece in fixed if piece is not None and inside(box, held)]
        found = f"({', '.join(owners) or 'no parameter'}) is written by nothing"
    raise LayoutError(f"{where}: {tensor.name} {shown(box)} {found}")
