"""Where the scales of a block-quantized tensor lie: the tensor's own cut, in blocks.

Owns the arithmetic of blocks. A tensor in float8 has one scale for each block of so many rows and
columns; a shard holds the scales of its blocks, so a shard must be made of whole blocks. Only a
tensor's last block may be partial. Knows nothing of engines.
"""

from __future__ import annotations

from collections.abc import Mapping

from megarl.actor.parameters import SCALE_SUFFIX, Parameter
from megarl.errors import LayoutError
from megarl.reshard.layout import Box, Piece, Shard, ShardedTensor

FP8Block = tuple[int, int]
"""Rows and columns that share a scale."""


def scales_of(
    tensor: ShardedTensor, parameters: Mapping[str, Parameter], block: FP8Block
) -> ShardedTensor:
    """The tensor of scales beside `tensor`, cut as that is.

    `parameters` are those of its pieces by name. Its name and theirs get the ending `_scale_inv`.
    Raises LayoutError where a shard is not made of whole blocks.

    >>> weight = Parameter("up", (6, 8), "up")
    >>> piece = Piece("up", ((4, 6), (0, 8)), "fc1", (0, 0))
    >>> tensor = ShardedTensor("fc1", (2, 8), (Shard((0,), (piece,)),))
    >>> made = scales_of(tensor, {"up": weight}, (4, 4))
    >>> made.shape, made.shards[0].pieces[0].box
    ((1, 2), ((1, 2), (0, 2)))
    """
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


def _in_blocks(piece: Piece, parameter: Parameter, block: FP8Block) -> Piece:
    """The piece of scales that belongs to a piece of its tensor."""
    box: list[tuple[int, int]] = []
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
        box.append((start // unit, -(-end // unit)))
        at.append(offset // unit)
    scaled: Box = (*piece.box[:-2], *box)
    return Piece(
        piece.tensor + SCALE_SUFFIX, scaled, piece.local + SCALE_SUFFIX, (*piece.at[:-2], *at)
    )
