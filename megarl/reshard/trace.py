"""One tensor's way through a plan: who holds which part, who wants which, and every copy of it.

Owns finding the tensor by its name in a checkpoint, and its intervals, small enough to be checked
by hand. Knows nothing of bytes, seconds or settings.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace

from megarl.actor.parameters import HEAD_NAME, STACKED, Block, BlockTable, Parameter
from megarl.errors import LayoutError
from megarl.reshard.layout import Box, Layout
from megarl.reshard.moves import LINKS, Link, Move, operations_of
from megarl.reshard.plan import Plan

_EXPERT = re.compile(r"(?<=\.experts\.)(?:0|[1-9][0-9]{0,8})(?=\.)")
_LAYER = re.compile(r"(?<=\.layers\.)(?:0|[1-9][0-9]{0,8})(?=\.)")

MAX_SHOWN = 160  # characters of a name in an error


@dataclass(frozen=True, slots=True)
class HeldPart:
    """Global `box` lies in tensor `local` from `at` on, on each of `ranks`."""

    box: Box
    local: str
    at: tuple[int, ...]
    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Copy:
    """Global `box` goes from rank `src` to `ranks`, all over one kind of link.

    With link "fanout" `src` is a rank of the destination. The box lies at the same place in the
    local tensors of all `ranks`.
    """

    box: Box
    link: Link
    src: int
    src_local: str
    src_at: tuple[int, ...]
    ranks: tuple[int, ...]
    dst_local: str
    dst_at: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Way:
    """One tensor's way. `expert` is the one that was asked for, of a stack."""

    name: str
    parameter: Parameter
    expert: int | None
    held: tuple[HeldPart, ...]
    wanted: tuple[HeldPart, ...]
    copies: tuple[Copy, ...]


def trace(plan: Plan, name: str) -> Way:
    """The way of the tensor with that name in a Hugging Face checkpoint.

    The number of an expert may be `*`, for all of them. Raises LayoutError naming the nearest, if
    there is any, where there is no such tensor.
    """
    block, parameter, expert = _find(plan.source, name)
    held = _parts(plan.source, block, parameter, expert)
    wanted: tuple[HeldPart, ...] = ()
    copies: tuple[Copy, ...] = ()
    table = plan.destination.table
    names = [p.name for p in table.kinds.get(block.kind, ())]
    template = parameter.name
    if block in table.blocks and template in names:
        wanted = _parts(plan.destination, block, parameter, expert)
        rows = operations_of(plan, table.blocks.index(block), names.index(template))
        copies = _copies(rows.moves(plan), expert)
    shown = replace(parameter, name=block.name(template), layer=block.layer)
    return Way(name, shown, expert, held, wanted, copies)


def _find(layout: Layout, name: str) -> tuple[Block, Parameter, int | None]:
    """The block and the parameter of its kind, and which of the stacked experts is meant."""
    table = layout.table
    number = _EXPERT.search(name)
    wanted = name if number is None else _EXPERT.sub(STACKED, name, count=1)
    known: dict[str, tuple[Block, Parameter]] = {
        block.name(parameter.name): (block, parameter)
        for block in table.blocks
        for parameter in table.kinds[block.kind]
    }
    if wanted == HEAD_NAME and wanted not in known and "embedding" in table.kinds:
        embedding = table.kinds["embedding"][0].name
        raise LayoutError(
            f"{name}: the policy's head is tied to its embedding; ask for {embedding}"
        )
    if wanted not in known:
        nearest = _nearest(table, wanted[:MAX_SHOWN])
        advice = f"the nearest is {nearest}" if nearest else "its table is empty"
        shown = name if len(name) <= MAX_SHOWN else name[:MAX_SHOWN] + "..."
        raise LayoutError(f"{shown}: the policy has no such tensor; {advice}")
    block, parameter = known[wanted]
    if number is None:
        return block, parameter, None
    expert = int(number[0])
    if expert >= parameter.shape[0]:
        raise LayoutError(
            f"{name}: the policy has experts 0 to {parameter.shape[0] - 1}; ask for one of them, "
            f"or for all with {wanted}"
        )
    return block, parameter, expert


def _nearest(table: BlockTable, name: str) -> str | None:
    """The name most like it, of the layer that it names and of the first block of each kind."""
    blocks = {block.kind: block for block in reversed(table.blocks)}
    number = _LAYER.search(name)
    if number is not None:
        blocks |= {block.kind: block for block in table.blocks if block.layer == int(number[0])}
    names = [block.name(p.name) for block in blocks.values() for p in table.kinds[block.kind]]
    return next(iter(difflib.get_close_matches(name, names, n=1, cutoff=0.0)), None)


def _parts(
    layout: Layout, block: Block, parameter: Parameter, expert: int | None
) -> tuple[HeldPart, ...]:
    ranks: dict[tuple[Box, str, tuple[int, ...]], set[int]] = {}
    for site in layout.sites:
        if layout.table.blocks[site.block] != block:
            continue
        stage = layout.stages[site.stage]
        for tensor in layout.templates[site.template].tensors:
            for shard in tensor.shards:
                for piece in shard.pieces:
                    if piece.tensor == parameter.name:
                        part = _of_expert(piece.box, piece.at, expert)
                        if part is not None:
                            key = (part[0], site.name(tensor.name), part[1])
                            holders = (stage[position] for position in shard.holders)
                            ranks.setdefault(key, set()).update(holders)
    return tuple(
        HeldPart(box, local, at, tuple(sorted(ranks[box, local, at])))
        for box, local, at in sorted(ranks)
    )


def _of_expert(
    box: Box, at: tuple[int, ...], expert: int | None
) -> tuple[Box, tuple[int, ...]] | None:
    """The part of a box that one expert of the stack is, and where it lies; None outside of it."""
    if expert is None:
        return box, at
    first, end = box[0]
    if not first <= expert < end:
        return None
    moved = at if len(at) < len(box) else (at[0] + expert - first, *at[1:])
    return ((expert, expert + 1), *box[1:]), moved


def _copies(moves: Iterable[Move], expert: int | None) -> tuple[Copy, ...]:
    """Moves of the same part from the same place over the same link, as one."""
    ranks: dict[Copy, list[int]] = {}
    for move in moves:
        taken = _of_expert(move.box, move.dst_at, expert)
        given = _of_expert(move.box, move.src_at, expert)
        if taken is None or given is None:
            continue
        key = Copy(
            taken[0],
            move.link,
            move.src,
            move.src_local,
            given[1],
            (),
            move.dst_local,
            taken[1],
        )
        ranks.setdefault(key, []).append(move.dst)
    copies = [replace(copy, ranks=tuple(sorted(found))) for copy, found in ranks.items()]
    return tuple(
        sorted(copies, key=lambda c: (c.box, LINKS.index(c.link), c.ranks, c.src, c.dst_at))
    )
