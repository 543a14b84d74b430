"""The local tensor beside a block-quantized one that its scales lie in.

Owns both ways to fill it. `engine_scales` is an engine's own cut, in blocks: a shard must be made
of whole ones, and each must begin where a block of the local tensor begins; only a tensor's last
block may be partial. `staged_scales` is packed by megarl where a source is staged as float8: pieces
of whole blocks may lie anywhere, and join. Knows nothing of which engine it is.
"""

from __future__ import annotations

from collections.abc import Mapping

from megarl.actor.parameters import SCALE_SUFFIX, Parameter
from megarl.errors import LayoutError
from megarl.reshard.blocks import ScaleBlock, joined, joined_spans, scale_box
from megarl.reshard.layout import Box, Padding, Piece, Shard, ShardedTensor, local_box

Stacks = dict[Box, list[tuple[str, Box]]]
"""By place along a local tensor's leading dims: the scales' names and boxes, from above down."""


def engine_scales(
    tensor: ShardedTensor, parameters: Mapping[str, Parameter], block: ScaleBlock
) -> ShardedTensor:
    """The tensor of scales beside `tensor`, cut as that is.

    `parameters` are those of its pieces by name. Its name and theirs get the ending `_scale_inv`.
    Raises LayoutError where a shard is not made of whole blocks, or not of them alone: no engine is
    known to keep scales of padding.

    >>> weight = Parameter("up", (6, 8), "up")
    >>> piece = Piece("up", ((4, 6), (0, 8)), "fc1", (0, 0))
    >>> tensor = ShardedTensor("fc1", (2, 8), (Shard((0,), (piece,)),))
    >>> made = engine_scales(tensor, {"up": weight}, (4, 4))
    >>> made.shape, made.shards[0].pieces[0].box
    ((1, 2), ((1, 2), (0, 2)))
    """
    padded = next((shard for shard in tensor.shards if shard.paddings), None)
    if padded is not None:
        raise LayoutError(
            f"{tensor.name}: positions {list(padded.holders)} of a stage hold padding in a tensor "
            "with scales, and which scales padding has is not known; use fewer shards, so that "
            "nothing is padded"
        )
    shards = tuple(
        Shard(
            shard.holders,
            tuple(_in_blocks(piece, parameters[piece.tensor], block) for piece in shard.pieces),
        )
        for shard in tensor.shards
    )
    shape = (
        *tensor.shape[:-2],
        *(-(-size // unit) for size, unit in zip(tensor.shape[-2:], block, strict=True)),
    )
    return ShardedTensor(tensor.name + SCALE_SUFFIX, shape, shards)


def _in_blocks(piece: Piece, parameter: Parameter, block: ScaleBlock) -> Piece:
    """The piece of scales that belongs to a piece of its tensor."""
    at: list[int] = []
    spans = zip(piece.box[-2:], piece.at[-2:], parameter.shape[-2:], block, strict=True)
    for which, ((start, end), offset, size, unit) in zip(("rows", "columns"), spans, strict=True):
        for edge, number in (("begin", start), ("end", end)):
            if number % unit and number != size:
                raise LayoutError(
                    f"{piece.local}: {which} [{start}, {end}) of {parameter.name} {edge} within a "
                    f"block: {number} = {number // unit} x {unit} + {number % unit}, so two shards "
                    f"would share its scale; use fewer shards, so that each has a multiple of "
                    f"{unit} {which}"
                )
        if offset % unit:
            raise LayoutError(
                f"{piece.local}: {which} of {parameter.name} lie from {offset} on, within a block: "
                f"{offset} = {offset // unit} x {unit} + {offset % unit}; what lies before them "
                f"must have a multiple of {unit} {which}: use fewer shards"
            )
        at.append(offset // unit)
    return Piece(
        piece.tensor + SCALE_SUFFIX,
        scale_box(piece.box, block),
        piece.local + SCALE_SUFFIX,
        (*piece.at[:-2], *at),
    )


def scale_stacks(tensor: ShardedTensor, shard: Shard, block: ScaleBlock) -> Stacks | None:
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
        spans = list(joined_spans(lead[0] for lead in stacks))
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


def staged_scales(tensor: ShardedTensor, block: ScaleBlock) -> ShardedTensor:
    """The tensor that megarl packs the scales of `tensor` into, one box below another.

    For tensors whose shards all have `scale_stacks`. Shards of fewer or narrower scales are padded.
    """
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
