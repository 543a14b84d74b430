"""A learner rank's weights as they travel to float8 servers: quantized before the wire.

Owns the staging copies of what is float8, and their scales. Which weights those are, and that this
rank holds whole blocks of them, is the layout's; the rule is `megarl.float8`'s.
"""

from __future__ import annotations

import logging
import math
import re
from collections import ChainMap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from megarl.actor.parameters import SCALE_SUFFIX, Parameter
from megarl.errors import WeightSyncError
from megarl.float8 import BlockScaling, dequantize, quantize
from megarl.reshard.execute import held
from megarl.reshard.layout import Box, Piece, RankLayout, offset_in, overlap

log = logging.getLogger(__name__)

_LAYER = re.compile(r".*?\.\d+(?=\.)")


@dataclass(frozen=True, slots=True)
class _Blocks:
    """Whole blocks of one weight: their scales' piece, and where the weight's numbers lie."""

    scales: Piece
    box: Box
    parts: tuple[Piece, ...]


class QuantizedWeights:
    """`parameters` of one rank, where what travels as float8 has a float8 copy and its scales.

    `mine` is the rank's layout with float8 weights and scales (`SourceSpec.layout`), `known` the
    layout's parameters by name. Raises WeightSyncError where the rank does not hold the numbers of
    blocks whose scales it is to send.
    """

    def __init__(
        self,
        parameters: Mapping[str, torch.Tensor],
        mine: RankLayout,
        known: Mapping[str, Parameter],
        scaling: BlockScaling,
    ) -> None:
        self._parameters, self._scaling = parameters, scaling
        self._blocks = _blocks_of(mine, known, scaling)
        self._shapes = {tensor.name: tensor.shape for tensor in mine.tensors}
        self._quantized = {part.local for blocks in self._blocks for part in blocks.parts}
        self._copies: dict[str, torch.Tensor] = {}
        self.sent: Mapping[str, torch.Tensor] = ChainMap(self._copies, parameters)  # type: ignore[arg-type]
        """All tensors that travel, by local name, after a `refresh`."""
        self.errors: Mapping[str, tuple[float, float]] = {}
        """By weight, sums over this rank's elements of (quantized - weight)^2 and of weight^2, of
        the last `refresh`; nothing before the first."""

    @property
    def added(self) -> frozenset[str]:
        """Local tensors of the layout that are no parameters: the scales."""
        return frozenset(blocks.scales.local for blocks in self._blocks)

    def refresh(self) -> None:
        """Quantize the weights as they are now.

        Copies are made once and written again. Raises FloatingPointError, naming the weight, where
        a number is not finite.
        """
        if not self._copies:
            self._copies.update(self._empty())
        squares = []
        for blocks in self._blocks:
            weight = self._gathered(blocks)
            try:
                float8, scales = quantize(weight, self._scaling)
            except FloatingPointError as error:
                name = blocks.scales.tensor.removesuffix(SCALE_SUFFIX)
                raise FloatingPointError(f"{name} {blocks.box}: {error}") from error
            held(blocks.scales, self._copies)[...] = scales.view(_shape(blocks.scales.box))
            for part in blocks.parts:
                held(part, self._copies)[...] = float8[_inside(part.box, blocks.box)]
            squares.append(_squares(weight, float8, scales, self._scaling))
        self.errors = self._summed(torch.stack(squares).tolist() if squares else [])

    def drop(self) -> None:
        """Let go of the copies; the next `refresh` makes them anew."""
        self._copies.clear()

    def _summed(self, squares: Sequence[Sequence[float]]) -> dict[str, tuple[float, float]]:
        """What each of the blocks has lost, by weight."""
        found: dict[str, tuple[float, float]] = {}
        for blocks, (error, whole) in zip(self._blocks, squares, strict=True):
            name = blocks.scales.tensor.removesuffix(SCALE_SUFFIX)
            before = found.get(name, (0.0, 0.0))
            found[name] = (before[0] + error, before[1] + whole)
        return found

    def _empty(self) -> dict[str, torch.Tensor]:
        device = next(iter(self._parameters.values())).device
        copies = {}
        for name in self._quantized:
            shape = self._shapes[name]
            copies[name] = torch.zeros(shape, dtype=torch.float8_e4m3fn, device=device)
        for name in self.added:
            copies[name] = torch.zeros(self._shapes[name], dtype=torch.float32, device=device)
        return copies

    def _gathered(self, blocks: _Blocks) -> torch.Tensor:
        """The numbers of whole blocks: where one piece holds them, without a copy."""
        first = held(blocks.parts[0], self._parameters).detach()
        if len(blocks.parts) == 1:
            return first
        numbers = torch.empty(_shape(blocks.box), dtype=first.dtype, device=first.device)
        for part in blocks.parts:
            numbers[_inside(part.box, blocks.box)] = held(part, self._parameters).detach()
        return numbers


def _blocks_of(
    mine: RankLayout, known: Mapping[str, Parameter], scaling: BlockScaling
) -> tuple[_Blocks, ...]:
    pieces: dict[str, list[Piece]] = {}
    for piece in mine.pieces:
        pieces.setdefault(piece.tensor, []).append(piece)
    found = []
    for piece in mine.pieces:
        weight = piece.tensor.removesuffix(SCALE_SUFFIX)
        if weight == piece.tensor or weight not in known:
            continue
        box = _weight_box(piece.box, known[weight].shape, scaling)
        parts = []
        for own in pieces.get(weight, ()):
            shared = overlap(own.box, box)
            if shared is not None:
                parts.append(Piece(weight, shared, own.local, offset_in(own, shared)))
        covered = sum(math.prod(_shape(part.box)) for part in parts)
        if covered != math.prod(_shape(box)):
            raise WeightSyncError(
                f"learner rank {mine.rank} is to send scales {piece.box} of {weight} and holds "
                f"{covered} of the {math.prod(_shape(box))} numbers that they are of"
            )
        found.append(_Blocks(piece, box, tuple(parts)))
    return tuple(found)


def _weight_box(scales: Box, shape: tuple[int, ...], scaling: BlockScaling) -> Box:
    """The box of a weight that a box of its scales is of."""
    units = (scaling.rows, scaling.columns)
    spans = tuple(
        (start * unit, min(end * unit, size))
        for (start, end), unit, size in zip(scales[-2:], units, shape[-2:], strict=True)
    )
    return (*scales[:-2], *spans)


def _squares(
    weight: torch.Tensor, float8: torch.Tensor, scales: torch.Tensor, scaling: BlockScaling
) -> torch.Tensor:
    """[2]: the sum of squared errors, and of squared numbers."""
    wide = weight.to(torch.float32)
    error = dequantize(float8, scales, scaling, torch.float32) - wide
    return torch.stack([error.square().sum(), wide.square().sum()])


def by_layer(errors: Iterable[Mapping[str, tuple[float, float]]]) -> dict[str, float]:
    """The relative error (L2) of each layer from what all ranks say; other weights are their own.

    >>> sums = {"model.layers.3.mlp.up_proj.weight": (1.0, 100.0)}
    >>> by_layer([sums, {"model.layers.3.mlp.down_proj.weight": (0.0, 300.0)}])
    {'model.layers.3': 0.05}
    """
    sums: dict[str, tuple[float, float]] = {}
    for said in errors:
        for name, (error, whole) in said.items():
            found = _LAYER.match(name)
            layer = found.group() if found else name
            before = sums.get(layer, (0.0, 0.0))
            sums[layer] = (before[0] + error, before[1] + whole)
    return {
        layer: math.sqrt(error / whole) if whole else 0.0 for layer, (error, whole) in sums.items()
    }


def tell(layers: Mapping[str, float]) -> None:
    """One line of the log for each layer's relative error."""
    for layer, error in layers.items():
        log.info("weights quantized layer=%s relative_error=%.2e", layer, error)


def _shape(box: Box) -> tuple[int, ...]:
    return tuple(end - start for start, end in box)


def _inside(part: Box, whole: Box) -> tuple[slice, ...]:
    """Where a part lies in an array of the whole."""
    return tuple(
        slice(start - origin, end - origin)
        for (start, end), (origin, _) in zip(part, whole, strict=True)
    )
