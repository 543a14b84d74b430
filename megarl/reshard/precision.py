"""Which weights are quantized before the wire and which behind it, as arithmetic of blocks.

Owns the layouts to plan between where a policy's weights go to a destination that holds them as
float8 in scaled blocks of [rows, columns]. A block's scale needs the whole block. A weight whose
source shards all hold whole blocks is quantized there, `before` the wire, and travels as float8
with its scales; any other travels in the policy's precision and is quantized by the receiver,
`after`, whose shards must then hold whole blocks. Knows nothing of numbers: only of boxes.

A local tensor is one buffer of one precision, so that weights that share one, on either side, share
their decision.

`with_fp8` is for weight sync and its page; `quantized_source` is for the conversion of checkpoints,
whose destination is whatever the source can hold as float8. No command of megarl converts one yet.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from megarl.actor.parameters import SCALE_SUFFIX, BlockTable, Parameter, check_fp8_block
from megarl.errors import LayoutError
from megarl.reshard.blocks import ScaleBlock, broken, by_tensor, joined, scale_box
from megarl.reshard.layout import BlockLayout, Box, Layout, ShardedTensor, num_elements, overlap
from megarl.reshard.scales import scale_stacks, staged_scales
from megarl.reshard.tiling import shown

When = Literal["before", "after"]
Decisions = Mapping[tuple[str, str], When]
"""By kind of block and kind of weight; a destination's float8 weights that the source has not."""


@dataclass(frozen=True)
class Precisions:
    """What to plan: `make_plan(source, destination)`, and who quantizes which weights.

    In `source` the weights decided `before` are float8 with scales: a local tensor of the source
    that holds them is to be staged as float8, and its scales under its name + `_scale_inv`. In
    `destination` the weights decided `after` have the policy's precision and no scales: they are
    received so and quantized into the tensor of the same name.
    """

    source: Layout
    destination: Layout
    decisions: Decisions


def with_fp8(source: Layout, destination: Layout, block: ScaleBlock) -> Precisions:
    """The layouts to plan between, where `destination` holds float8 weights and `source` does not.

    Raises LayoutError where neither side holds a weight's whole blocks, and where the destination's
    scales are not those of its weights in blocks of this size.
    """
    wanted = _float8(source.table, destination.table, block)
    groups = [*_groups(source), *_groups(destination)]
    before = _settled(_able(source, wanted, block), groups)
    after = wanted.keys() - before
    _check_receiver(source, destination, wanted, after, block)
    return Precisions(
        _with_scales(source, wanted, before, block),
        _without_scales(destination, after),
        _decisions(wanted, before),
    )


def quantized_source(
    layout: Layout, table_fp8: BlockTable, block: ScaleBlock
) -> tuple[Layout, Decisions]:
    """The layout with float8 weights and scales as `table_fp8` has them, where it can hold them.

    A shard can where its pieces of the weight, joined, begin and end at multiples of `block` or at
    the weight's end. Raises LayoutError where the table's scales are of another block size.
    """
    wanted = _float8(layout.table, table_fp8, block)
    before = _settled(_able(layout, wanted, block), _groups(layout))
    return _with_scales(layout, wanted, before, block), _decisions(wanted, before)


def quantized_whole(layout: Layout, table_fp8: BlockTable, block: ScaleBlock) -> Layout:
    """The layout with all float8 weights of `table_fp8` as such: the learner's, when it syncs.

    Raises LayoutError where a rank does not hold whole blocks of one: nobody else quantizes it.
    """
    quantized, decisions = quantized_source(layout, table_fp8, block)
    split = sorted({kind for (_, kind), when in decisions.items() if when == "after"})
    if split:
        raise LayoutError(
            f"learner ranks ({layout.kind}) do not hold whole blocks of {list(block)} of "
            f"{', '.join(split)}, or of what lies in one tensor with them, and scales are of "
            "whole blocks; use a learner.parallel.tp (or etp) that cuts them at multiples of "
            f"{list(block)}"
        )
    return quantized


_Key = tuple[str, str]  # kind of block, the weight's name in it
_Wanted = Mapping[_Key, tuple[Parameter, Parameter]]  # the float8 weight and its scales


def _float8(source: BlockTable, destination: BlockTable, block: ScaleBlock) -> _Wanted:
    """The weights that the destination holds as float8 and the source does not, with scales."""
    check_fp8_block(block)
    wanted = {}
    for kind, parameters in destination.kinds.items():
        theirs = {p.name: p for p in parameters}
        ours = {p.name: p for p in source.kinds.get(kind, ())}
        for weight in parameters:
            if weight.precision != "float8" or (
                weight.name in ours and ours[weight.name].precision == "float8"
            ):
                continue
            scales = theirs.get(weight.name + SCALE_SUFFIX)
            needed = tuple(end for _, end in scale_box(tuple((0, n) for n in weight.shape), block))
            if scales is None or scales.shape != needed:
                found = "none" if scales is None else f"scales of shape {list(scales.shape)}"
                raise LayoutError(
                    f"{weight.name}: shape {list(weight.shape)} in blocks of {list(block)} needs "
                    f"scales of shape {list(needed)}, the destination has {found}; give the block "
                    "size of its quantization_config"
                )
            wanted[kind, weight.name] = (weight, scales)
    return wanted


def _decisions(wanted: _Wanted, before: set[_Key]) -> dict[_Key, When]:
    return {
        (kind, weight.kind): "before" if (kind, name) in before else "after"
        for (kind, name), (weight, _) in wanted.items()
    }


def _keys(kind: str, tensor: ShardedTensor) -> set[_Key]:
    """The parameters that a local tensor holds; scales stand for their weights."""
    names = {piece.tensor for shard in tensor.shards for piece in shard.pieces}
    return {(kind, name.removesuffix(SCALE_SUFFIX)) for name in names}


def _able(layout: Layout, wanted: _Wanted, block: ScaleBlock) -> set[_Key]:
    """The weights that every shard of this layout holds in whole blocks and can lay out scales of.

    A weight that the layout does not hold at all is none of them.
    """
    able: set[_Key] = set()
    unable: set[_Key] = set()
    for template in layout.templates:
        for tensor in template.tensors:
            for shard in tensor.shards:
                for name, pieces in by_tensor(shard).items():
                    key = (template.kind, name)
                    if key in wanted:
                        whole = not broken(pieces, wanted[key][0].shape, block)
                        (able if whole else unable).add(key)
                if scale_stacks(tensor, shard, block) is None:
                    unable |= _keys(template.kind, tensor)
    return able - unable


def _groups(layout: Layout) -> list[set[_Key]]:
    """Sets of parameters that share a local tensor."""
    return [
        _keys(template.kind, tensor) for template in layout.templates for tensor in template.tensors
    ]


def _settled(able: set[_Key], groups: Sequence[set[_Key]]) -> set[_Key]:
    """The largest part of `able` that holds all or nothing of each group."""
    before = set(able)
    changed = True
    while changed:
        changed = False
        for group in groups:
            if not group <= before and not before.isdisjoint(group):
                before -= group
                changed = True
    return before


def _with_scales(layout: Layout, wanted: _Wanted, before: set[_Key], block: ScaleBlock) -> Layout:
    """The layout with the weights `before` as float8, and their scales beside them."""
    kinds = {}
    for kind, parameters in layout.table.kinds.items():
        table: list[Parameter] = []
        for parameter in parameters:
            key = (kind, parameter.name)
            table += wanted[key] if key in before else (parameter,)
        kinds[kind] = tuple(table)
    templates = []
    for template in layout.templates:
        tensors: list[ShardedTensor] = []
        for tensor in template.tensors:
            tensors.append(tensor)
            if not before.isdisjoint(_keys(template.kind, tensor)):
                tensors.append(staged_scales(tensor, block))
        templates.append(BlockLayout(template.kind, tuple(tensors)))
    return _changed(layout, "quantized before the wire", kinds, templates)


def _without_scales(layout: Layout, after: Collection[_Key]) -> Layout:
    """The layout with the weights `after` in the policy's precision, without their scales."""
    scales = {(kind, name + SCALE_SUFFIX) for kind, name in after}
    kinds = {}
    for kind, parameters in layout.table.kinds.items():
        kinds[kind] = tuple(
            replace(p, precision="policy") if (kind, p.name) in after else p
            for p in parameters
            if (kind, p.name) not in scales
        )
    templates = []
    for template in layout.templates:
        kept = tuple(
            tensor
            for tensor in template.tensors
            if not any(
                (template.kind, piece.tensor) in scales
                for shard in tensor.shards
                for piece in shard.pieces
            )
        )
        templates.append(BlockLayout(template.kind, kept))
    return _changed(layout, "quantized after the wire", kinds, templates)


def _changed(
    layout: Layout,
    how: str,
    kinds: Mapping[str, tuple[Parameter, ...]],
    templates: Sequence[BlockLayout],
) -> Layout:
    if kinds == dict(layout.table.kinds):
        return layout
    table = replace(layout.table, kinds=kinds)
    return replace(layout, kind=f"{layout.kind}, {how}", table=table, templates=tuple(templates))


def _check_receiver(
    source: Layout, destination: Layout, wanted: _Wanted, after: Collection[_Key], block: ScaleBlock
) -> None:
    """Raise LayoutError unless the destination can quantize the weights `after` by itself."""
    for template in destination.templates:
        scales: dict[tuple[str, int], list[Box]] = {}
        for tensor in template.tensors:
            keys = _keys(template.kind, tensor)
            if keys.isdisjoint(after):
                continue
            if not keys <= set(after):
                raise LayoutError(
                    f"{destination.kind}: {tensor.name} holds float8 weights and others "
                    f"({', '.join(sorted(name for _, name in keys))}); a tensor has one precision"
                )
            for shard in tensor.shards:
                for name, pieces in by_tensor(shard).items():
                    if (template.kind, name) in wanted:
                        weight = wanted[template.kind, name][0]
                        bad = broken(pieces, weight.shape, block)
                        if bad:
                            raise _nobody(source, destination, tensor, weight, bad[0], block)
                        boxes = [scale_box(box, block) for box in joined(p.box for p in pieces)]
                        for position in shard.holders:
                            scales.setdefault((name + SCALE_SUFFIX, position), []).extend(boxes)
        for tensor in template.tensors:
            if not _keys(template.kind, tensor).isdisjoint(after):
                _check_derived(destination, tensor, scales)


def _check_derived(
    destination: Layout, tensor: ShardedTensor, scales: Mapping[tuple[str, int], list[Box]]
) -> None:
    """Raise LayoutError where a rank holds scales of blocks that it does not hold."""
    for shard in tensor.shards:
        for piece in shard.pieces:
            if not piece.tensor.endswith(SCALE_SUFFIX):
                continue
            for position in shard.holders:
                own = set(scales.get((piece.tensor, position), ()))
                parts = (overlap(piece.box, box) for box in own)
                if sum(num_elements(p) for p in parts if p) < num_elements(piece.box):
                    raise LayoutError(
                        f"{destination.kind}: position {position} of a stage holds scales "
                        f"{shown(piece.box)} of {piece.tensor} in {tensor.name} without all "
                        "blocks that they are of, so it cannot compute them; use a layout whose "
                        "shards of weight and scales belong together"
                    )


def _nobody(
    source: Layout,
    destination: Layout,
    tensor: ShardedTensor,
    weight: Parameter,
    box: Box,
    block: ScaleBlock,
) -> LayoutError:
    """The error for a weight that neither side can quantize: with the box that breaks a block."""
    return LayoutError(
        f"{weight.name} of shape {list(weight.shape)} is quantized in blocks of {list(block)}. "
        f"{destination.kind} holds {shown(box)} of it in {tensor.name}, and {source.kind} does "
        "not hold whole blocks of it and of what shares its tensors either; on one side, use a "
        f"tp that cuts it at multiples of {list(block)}"
    )
