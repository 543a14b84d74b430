"""Run a plan on one CPU with a number for every element, and show that each came to its place.

Owns what a layout holds in terms of the elements' numbers. Works from moves and pieces alone: it
knows nothing of how a plan is made, and shares nothing with the proof but the way a box is written.
No run needs it: it is the second opinion that plans of small models are tested by.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from megarl.actor.parameters import BlockTable
from megarl.errors import LayoutError
from megarl.reshard.execute import slices
from megarl.reshard.layout import Layout, local_box, num_elements
from megarl.reshard.numbering import PADDING, UNWRITTEN, Numbering, Numbers
from megarl.reshard.plan import Move, Plan
from megarl.reshard.tiling import shown

Arrays = Mapping[int, Mapping[str, Numbers]]
"""Rank -> local name -> the number of the element in each place."""

GIVEN_PADDING = -2  # in a source's padding, instead of PADDING: so padding that is sent shows
LIMIT_BYTES = 4 * 2**30  # of memory; above it a plan is refused instead of swapping


@dataclass(frozen=True, slots=True)
class Report:
    """What a plan that is right did: how much it wrote, and by how many moves over which links.

    `num_elements` counts what moves wrote, over all destination ranks; `num_padding` what had to be
    zeroed.
    """

    num_ranks: int
    num_tensors: int
    num_elements: int
    num_padding: int
    num_moves: Mapping[str, int]


def numbering_of(table: BlockTable) -> Numbering:
    """The numbers of a table's parameters, in their order."""
    return Numbering({parameter.name: parameter.shape for parameter in table.parameters})


def number(
    layout: Layout, numbering: Numbering | None = None, limit_bytes: int = LIMIT_BYTES
) -> Arrays:
    """Every rank's local tensors, full of the numbers of the elements that they hold; paddings -2.

    Ranks that are replicas share their arrays, which cannot be written to. Raises LayoutError where
    the arrays would not fit in `limit_bytes`.
    """
    _check_memory(layout.kind, 8 * _count(layout)[0], limit_bytes)
    return _filled(layout, numbering or numbering_of(layout.table), GIVEN_PADDING)


def expected(
    layout: Layout, numbering: Numbering | None = None, limit_bytes: int = LIMIT_BYTES
) -> Arrays:
    """What the ranks of a destination must hold in the end; paddings 0. Else as `number`."""
    _check_memory(layout.kind, 8 * _count(layout)[0], limit_bytes)
    return _filled(layout, numbering or numbering_of(layout.table), PADDING)


def simulate(plan: Plan, limit_bytes: int = LIMIT_BYTES) -> Arrays:
    """What every destination rank holds after all moves of the plan.

    Raises LayoutError where the arrays would not fit in `limit_bytes`.
    """
    _check_memory(_shown(plan), needed_bytes(plan), limit_bytes)
    return _run(plan, _filled(plan.source, numbering_of(plan.source.table), GIVEN_PADDING))[0]


def check(plan: Plan, limit_bytes: int = LIMIT_BYTES) -> Report:
    """Raise LayoutError unless the plan writes every destination element once, and the right one.

    The error names the first tensor that is wrong, where in it, and the ranks that wrote there.
    """
    _check_memory(_shown(plan), needed_bytes(plan), limit_bytes)
    numbering = numbering_of(plan.source.table)
    found, writes = _run(plan, _filled(plan.source, numbering, GIVEN_PADDING))
    num_tensors = num_written = num_padding = 0
    for rank, tensors in _filled(plan.destination, numbering, PADDING).items():
        for name, wanted in tensors.items():
            wrong = (found[rank][name] != wanted) | (writes[rank][name] != 1)
            if wrong.any():
                raise _error(plan, numbering, rank, name, wrong, found[rank][name], wanted, writes)
            num_tensors += 1
            num_padding += int(np.count_nonzero(wanted == PADDING))
            num_written += wanted.size
    links: dict[str, int] = {}
    for move in plan.moves:
        links[move.link] = links.get(move.link, 0) + 1
    return Report(len(found), num_tensors, num_written - num_padding, num_padding, links)


def needed_bytes(plan: Plan) -> int:
    """Memory that `simulate` and `check` need, found without making any array."""
    distinct, _ = _count(plan.source)
    wanted, held = _count(plan.destination)
    return 8 * distinct + 8 * wanted + 9 * held  # numbers of 8 bytes, counters of 1


def _shown(plan: Plan) -> str:
    return f"{plan.source.kind} -> {plan.destination.kind}"


def _check_memory(what: str, needed: int, limit_bytes: int) -> None:
    if needed > limit_bytes:
        raise LayoutError(
            f"simulating {what} needs {needed:,} bytes of memory, more than the limit of "
            f"{limit_bytes:,}; simulate fewer layers or smaller sizes on the same meshes (plans "
            "are proved at any size), or raise limit_bytes"
        )


def _count(layout: Layout) -> tuple[int, int]:
    """Elements of all distinct local tensors, and of all local tensors of all ranks."""
    templates = []
    for template in layout.templates:
        sizes = [(math.prod(t.shape), t.shards) for t in template.tensors]
        distinct = sum(size * len(shards) for size, shards in sizes)
        held = sum(size * sum(len(s.holders) for s in shards) for size, shards in sizes)
        templates.append((distinct, held))
    used = [templates[site.template] for site in layout.sites]
    return sum(distinct for distinct, _ in used), sum(held for _, held in used)


def _filled(layout: Layout, numbering: Numbering, padding: int) -> dict[int, dict[str, Numbers]]:
    """Each shard's array is made once, for all of its holders."""
    arrays: dict[int, dict[str, Numbers]] = {rank: {} for rank in layout.rank_ids}
    for site in layout.sites:
        block, stage = layout.table.blocks[site.block], layout.stages[site.stage]
        for tensor in layout.templates[site.template].tensors:
            name = site.name(tensor.name)
            for shard in tensor.shards:
                array = np.full(tensor.shape, UNWRITTEN, np.int64)
                for piece in shard.pieces:
                    place = array[slices(local_box(piece.box, piece.at))]
                    ids = numbering.of(block.name(piece.tensor), piece.box)
                    place[...] = ids.reshape(place.shape)
                for empty in shard.paddings:
                    array[slices(empty.box)] = padding
                array.setflags(write=False)
                for position in shard.holders:
                    arrays[stage[position]][name] = array
    return arrays


def _run(plan: Plan, sources: Arrays) -> tuple[Arrays, Arrays]:
    """(what the destination ranks hold, how often each place was written), paddings zeroed."""
    shapes = {
        rank.rank: {tensor.name: tensor.shape for tensor in rank.tensors}
        for rank in plan.destination.ranks
    }
    found = {
        rank: {name: np.full(shape, UNWRITTEN, np.int64) for name, shape in mine.items()}
        for rank, mine in shapes.items()
    }
    writes = {
        rank: {name: np.zeros(shape, np.uint8) for name, shape in mine.items()}
        for rank, mine in shapes.items()
    }
    ordered = (  # what is fanned out has come to the node before
        (sources, (move for move in plan.moves if move.link != "fanout")),
        (found, (move for move in plan.moves if move.link == "fanout")),
    )
    for senders, moves in ordered:
        for move in moves:
            place = slices(local_box(move.box, move.dst_at))
            taken = senders[move.src][move.src_local][slices(local_box(move.box, move.src_at))]
            into = found[move.dst][move.dst_local][place]
            if taken.size != num_elements(move.box) or into.size != taken.size:
                raise LayoutError(f"plan: {_move(move)} reaches beyond a local tensor")
            into[...] = taken.reshape(into.shape)
            writes[move.dst][move.dst_local][place] += 1
    for rank in plan.destination.ranks:
        for padding in rank.paddings:
            found[rank.rank][padding.local][slices(padding.box)] = PADDING
            writes[rank.rank][padding.local][slices(padding.box)] += 1
    return found, writes  # type: ignore[return-value]


def _error(
    plan: Plan,
    numbering: Numbering,
    rank: int,
    name: str,
    wrong: npt.NDArray[np.bool_],
    found: Numbers,
    wanted: Numbers,
    writes: Arrays,
) -> LayoutError:
    """What is wrong in one local tensor: the interval around it, and its first element."""
    places = np.argwhere(wrong)
    low, high = places.min(axis=0), places.max(axis=0) + 1
    interval = shown(tuple(zip(low.tolist(), high.tolist(), strict=True)))
    first = tuple(int(i) for i in places[0])
    held, right = (_element(numbering, int(array[first])) for array in (found, wanted))
    times = int(writes[rank][name][first])
    writers = "; ".join(_writers(plan.receives(rank), name, first)) or "nobody"
    return LayoutError(
        f"plan: rank {rank}: {name} {interval} is wrong in {len(places)} elements. The first, "
        f"{list(first)}, holds {held} and must hold {right}; it was written {times} times, by "
        f"{writers}"
    )


def _element(numbering: Numbering, number: int) -> str:
    """Which element has this number."""
    found = numbering.find(number)
    if found is None:
        words = {GIVEN_PADDING: "padding", UNWRITTEN: "nothing", PADDING: "zero"}
        return words.get(number, "no element")
    name, index = found
    return f"{name}{list(index)}"


def _writers(moves: Iterable[Move], name: str, place: tuple[int, ...]) -> list[str]:
    """The moves that wrote to one place of a local tensor."""
    return [
        _move(move)
        for move in moves
        if move.dst_local == name
        and all(
            start <= i < end
            for i, (start, end) in zip(place, local_box(move.box, move.dst_at), strict=True)
        )
    ]


def _move(move: Move) -> str:
    side = "destination rank" if move.link == "fanout" else "rank"
    return (
        f"{move.tensor} {shown(move.box)} from {side} {move.src} to rank {move.dst} ({move.link})"
    )
