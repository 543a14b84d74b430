"""Where an engine keeps the scales of a block-quantized tensor: its own cut, in blocks.

Owns the refusal of cuts that do not fall on blocks. A shard holds the scales of its blocks, so it
must be made of whole ones, and each must begin where a block of the local tensor begins. Only a
tensor's last block may be partial. Knows nothing of which engine it is.
"""

from __future__ import annotations

from collections.abc import Mapping

from megarl.actor.parameters import SCALE_SUFFIX, Parameter
from megarl.errors import LayoutError
from megarl.reshard.blocks import Blocks, scale_box
from megarl.reshard.layout import Piece, Shard, ShardedTensor


def scales_of(
    tensor: ShardedTensor, parameters: Mapping[str, Parameter], block: Blocks
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


def _in_blocks(piece: Piece, parameter: Parameter, block: Blocks) -> Piece:
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
