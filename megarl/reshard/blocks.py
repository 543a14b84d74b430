"""Blocks of [rows, columns] that share one scale: which boxes hold whole ones, and of which scales.

Owns the arithmetic of blocks. They are counted from the start of the Hugging Face tensor, wherever
its pieces lie in a local tensor: two pieces that join in the Hugging Face tensor may hold a block
together. Knows nothing of the tensors that scales lie in (`scales.py`), nor of which weights are
quantized.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from megarl.reshard.layout import Box, Piece, Shard

ScaleBlock = tuple[int, int]
"""Rows and columns that share one scale."""


def scale_box(box: Box, block: ScaleBlock) -> Box:
    """The scales of the blocks that a box touches; leading dims stay.

    >>> scale_box(((3, 4), (0, 256), (128, 200)), (128, 128))
    ((3, 4), (0, 2), (1, 2))
    """
    spans = tuple(
        (start // unit, -(-end // unit)) for (start, end), unit in zip(box[-2:], block, strict=True)
    )
    return (*box[:-2], *spans)


def holds_whole_blocks(box: Box, shape: tuple[int, ...], block: ScaleBlock) -> bool:
    """Whether a box begins and ends at multiples of the block, or at the tensor's end.

    >>> holds_whole_blocks(((128, 200), (0, 256)), (200, 512), (128, 128))
    True
    >>> holds_whole_blocks(((0, 64), (0, 256)), (200, 512), (128, 128))
    False
    """
    return all(
        start % unit == 0 and (end % unit == 0 or end == size)
        for (start, end), size, unit in zip(box[-2:], shape[-2:], block, strict=True)
    )


def joined(boxes: Iterable[Box]) -> tuple[Box, ...]:
    """Disjoint boxes with neighbours joined, along the last dim but one and then along the last.

    >>> joined([((4, 8), (0, 2)), ((0, 4), (0, 2)), ((0, 8), (2, 6))])
    (((0, 8), (0, 6)),)
    """
    found = list(boxes)
    for dim in (-2, -1):
        lines: dict[Box, list[tuple[int, int]]] = {}
        for box in found:
            lines.setdefault(_without(box, dim), []).append(box[dim])
        found = []
        for others, spans in lines.items():
            for span in joined_spans(spans):
                found.append((*others, span) if dim == -1 else (*others[:-1], span, others[-1]))
    return tuple(sorted(found))


def _without(box: Box, dim: int) -> Box:
    index = len(box) + dim
    return box[:index] + box[index + 1 :]


def joined_spans(spans: Iterable[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """Disjoint intervals in order, those that touch joined.

    >>> list(joined_spans([(4, 6), (0, 2), (2, 3)]))
    [(0, 3), (4, 6)]
    """
    ordered = sorted(spans)
    start, end = ordered[0]
    for low, high in ordered[1:]:
        if low != end:
            yield start, end
            start = low
        end = high
    yield start, end


def by_tensor(shard: Shard) -> dict[str, list[Piece]]:
    """A shard's pieces by parameter."""
    found: dict[str, list[Piece]] = {}
    for piece in shard.pieces:
        found.setdefault(piece.tensor, []).append(piece)
    return found


def broken(pieces: Iterable[Piece], shape: tuple[int, ...], block: ScaleBlock) -> list[Box]:
    """The parts of a shard that begin or end within a block."""
    boxes = joined(piece.box for piece in pieces)
    return [box for box in boxes if not holds_whole_blocks(box, shape, block)]
