"""Blocks of [rows, columns] that share one scale: which boxes hold whole ones, and their scales.

Owns the arithmetic of blocks and the local tensors that scales lie in. Blocks are counted from the
start of the Hugging Face tensor, wherever its pieces lie in a local tensor: two pieces that join in
the Hugging Face tensor may hold a block together. Knows nothing of which weights are quantized.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from megarl.actor.parameters import SCALE_SUFFIX
from megarl.reshard.layout import Box, Padding, Piece, Shard, ShardedTensor, local_box

Blocks = tuple[int, int]
"""Rows and columns that share one scale."""

Stacks = dict[Box, list[tuple[str, Box]]]
"""By place along a local tensor's leading dims: the scales' names and boxes, from above down."""


def scale_box(box: Box, block: Blocks) -> Box:
    """The scales of the blocks that a box touches; leading dims stay.

    >>> scale_box(((3, 4), (0, 256), (128, 200)), (128, 128))
    ((3, 4), (0, 2), (1, 2))
    """
    spans = tuple(
        (start // unit, -(-end // unit)) for (start, end), unit in zip(box[-2:], block, strict=True)
    )
    return (*box[:-2], *spans)


def holds_whole_blocks(box: Box, shape: tuple[int, ...], block: Blocks) -> bool:
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
            for span in _joined_spans(spans):
                found.append((*others, span) if dim == -1 else (*others[:-1], span, others[-1]))
    return tuple(sorted(found))


def _without(box: Box, dim: int) -> Box:
    index = len(box) + dim
    return box[:index] + box[index + 1 :]


def _joined_spans(spans: Iterable[tuple[int, int]]) -> Iterator[tuple[int, int]]:
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


def broken(pieces: Iterable[Piece], shape: tuple[int, ...], block: Blocks) -> list[Box]:
    """The parts of a shard that begin or end within a block."""
    boxes = joined(piece.box for piece in pieces)
    return [box for box in boxes if not holds_whole_blocks(box, shape, block)]


def scale_stacks(tensor: ShardedTensor, shard: Shard, block: Blocks) -> Stacks | None:
    """The scales of a shard, one box below another; None where no one order can hold them.

    A tensor with a leading dim of experts must hold each expert in a range of its own, or all in
    one.
    """
    stacks: dict[Box, dict[str, list[Box]]] = {}
    for piece in sorted(shard.pieces, key=lambda piece: piece.at):
        lead = local_box(piece.box, piece.at)[:-2]
        stacks.setdefault(lead, {}).setdefault(piece.tensor, []).append(piece.box)
    dims = len(tensor.shape) - 2
    if dims < 0 or dims > 1:
        return None
    if dims == 1 and stacks:
        spans = list(_joined_spans(lead[0] for lead in stacks))
        if spans != [(0, tensor.shape[0])]:
            return None
    return {
        lead: [
            (name + SCALE_SUFFIX, scale_box(box, block))
            for name, boxes in by_name.items()
            for box in joined(boxes)
        ]
        for lead, by_name in stacks.items()
    }


def scale_tensor(tensor: ShardedTensor, block: Blocks) -> ShardedTensor:
    """The scales of a local tensor whose shards all hold whole blocks."""
    local = tensor.name + SCALE_SUFFIX
    stacked = [scale_stacks(tensor, shard, block) or {} for shard in tensor.shards]
    heights = [
        sum(_size(box, -2) for _, box in boxes) for stacks in stacked for boxes in stacks.values()
    ]
    widths = [_size(box, -1) for stacks in stacked for boxes in stacks.values() for _, box in boxes]
    height, width = max(heights), max(widths)
    whole_lead = tuple((0, size) for size in tensor.shape[:-2])
    shards = []
    for shard, stacks in zip(tensor.shards, stacked, strict=True):
        pieces, paddings = [], []
        for lead, boxes in (stacks or {whole_lead: []}).items():
            row = 0
            for name, box in boxes:
                rows, columns = _size(box, -2), _size(box, -1)
                at = (*(start for start, _ in lead), row, 0)
                pieces.append(Piece(name, box, local, at))
                if columns < width:
                    paddings.append(Padding(local, (*lead, (row, row + rows), (columns, width))))
                row += rows
            if row < height:
                paddings.append(Padding(local, (*lead, (row, height), (0, width))))
        shards.append(Shard(shard.holders, tuple(pieces), tuple(paddings)))
    return ShardedTensor(local, (*tensor.shape[:-2], height, width), tuple(shards))


def _size(box: Box, dim: int) -> int:
    return box[dim][1] - box[dim][0]
