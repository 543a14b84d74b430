"""Run a plan on one CPU with a number for every element, and show that each came to its place.

Owns the elements' numbers, and what a layout holds in terms of them. Works from moves and pieces
alone: it knows nothing of how a plan is made, and shares nothing with the proof.
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
from megarl.reshard.layout import Box, Layout, local_box, num_elements
from megarl.reshard.plan import Move, Plan

Ids = npt.NDArray[np.int64]
Arrays = Mapping[int, Mapping[str, Ids]]
"""Rank -> local name -> the number of the element in each place."""

PADDING = -1  # in a source's padding: no element has it, so padding that is sent shows
POISON = -2  # in a destination before anything was written
LIMIT_BYTES = 4 * 2**30  # of memory; above it a plan is refused instead of swapping


class Numbers:
    """A number from 1 up for every element of a table's parameters, in their order.

    An element's number is its parameter's first number plus its flat index.
    """

    def __init__(self, table: BlockTable) -> None:
        self.shapes = {parameter.name: parameter.shape for parameter in table.parameters}
        self.first: dict[str, int] = {}
        self.end = 1
        for name, shape in self.shapes.items():
            self.first[name] = self.end
            self.end += math.prod(shape)

    def of(self, tensor: str, box: Box) -> Ids:
        """The numbers of the elements in `box` of a parameter, in the box's shape."""
        total = np.array(self.first[tensor], np.int64)
        stride = math.prod(self.shapes[tensor])
        for (start, end), size in zip(box, self.shapes[tensor], strict=True):
            stride //= size
            total = np.add.outer(total, np.arange(start, end, dtype=np.int64) * stride)
        return total

    def shown(self, number: int) -> str:
        """Which element has this number.

        >>> from megarl.actor.parameters import Parameter
        >>> from megarl.reshard.explicit import one_block
        >>> table = one_block((Parameter("a", (2, 3), "gate"), Parameter("b", (4,), "up")))
        >>> Numbers(table).shown(5), Numbers(table).shown(9)
        ('a[1, 1]', 'b[2]')
        """
        if not 1 <= number < self.end:
            return {PADDING: "padding", POISON: "nothing", 0: "zero"}.get(number, "no element")
        name = max((n for n, first in self.first.items() if first <= number), key=self.first.get)  # type: ignore[arg-type]
        index = np.unravel_index(number - self.first[name], self.shapes[name])
        return f"{name}[{', '.join(str(int(i)) for i in index)}]"


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


def number(
    layout: Layout, numbers: Numbers | None = None, limit_bytes: int = LIMIT_BYTES
) -> Arrays:
    """Every rank's local tensors, full of the numbers of the elements that they hold; paddings -1.

    Ranks that are replicas share their arrays, which cannot be written to. Raises LayoutError where
    the arrays would not fit in `limit_bytes`.
    """
    _check_memory(layout.kind, 8 * _count(layout)[0], limit_bytes)
    return _filled(layout, numbers or Numbers(layout.table), PADDING)


def expected(
    layout: Layout, numbers: Numbers | None = None, limit_bytes: int = LIMIT_BYTES
) -> Arrays:
    """What the ranks of a destination must hold in the end; paddings 0. Else as `number`."""
    _check_memory(layout.kind, 8 * _count(layout)[0], limit_bytes)
    return _filled(layout, numbers or Numbers(layout.table), 0)


def simulate(plan: Plan, limit_bytes: int = LIMIT_BYTES) -> Arrays:
    """What every destination rank holds after all moves of the plan.

    Raises LayoutError where the arrays would not fit in `limit_bytes`.
    """
    _check_memory(_shown(plan), needed_bytes(plan), limit_bytes)
    return _run(plan, _filled(plan.source, Numbers(plan.source.table), PADDING))[0]


def check(plan: Plan, limit_bytes: int = LIMIT_BYTES) -> Report:
    """Raise LayoutError unless the plan writes every destination element once, and the right one.

    The error names the first tensor that is wrong, where in it, and the ranks that wrote there.
    """
    _check_memory(_shown(plan), needed_bytes(plan), limit_bytes)
    numbers = Numbers(plan.source.table)
    found, writes = _run(plan, _filled(plan.source, numbers, PADDING))
    num_tensors = num_written = num_padding = 0
    for rank, tensors in _filled(plan.destination, numbers, 0).items():
        for name, wanted in tensors.items():
            wrong = (found[rank][name] != wanted) | (writes[rank][name] != 1)
            if wrong.any():
                raise _error(plan, numbers, rank, name, wrong, found[rank][name], wanted, writes)
            num_tensors += 1
            num_padding += int(np.count_nonzero(wanted == 0))
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


def _filled(layout: Layout, numbers: Numbers, padding: int) -> dict[int, dict[str, Ids]]:
    """Each shard's array is made once, for all of its holders."""
    arrays: dict[int, dict[str, Ids]] = {rank: {} for rank in layout.rank_ids}
    for site in layout.sites:
        block, stage = layout.table.blocks[site.block], layout.stages[site.stage]
        for tensor in layout.templates[site.template].tensors:
            name = site.name(tensor.name)
            for shard in tensor.shards:
                array = np.full(tensor.shape, POISON, np.int64)
                for piece in shard.pieces:
                    place = array[slices(local_box(piece.box, piece.at))]
                    ids = numbers.of(block.name(piece.tensor), piece.box)
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
        rank: {name: np.full(shape, POISON, np.int64) for name, shape in mine.items()}
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
            found[rank.rank][padding.local][slices(padding.box)] = 0
            writes[rank.rank][padding.local][slices(padding.box)] += 1
    return found, writes  # type: ignore[return-value]


def _error(
    plan: Plan,
    numbers: Numbers,
    rank: int,
    name: str,
    wrong: npt.NDArray[np.bool_],
    found: Ids,
    wanted: Ids,
    writes: Arrays,
) -> LayoutError:
    """What is wrong in one local tensor: the interval around it, and its first element."""
    places = np.argwhere(wrong)
    low, high = places.min(axis=0), places.max(axis=0) + 1
    interval = ", ".join(f"{start}:{end}" for start, end in zip(low, high, strict=True))
    first = tuple(int(i) for i in places[0])
    writers = _writers(plan.receives(rank), name, first)
    return LayoutError(
        f"plan: rank {rank}: {name} [{interval}] is wrong in {len(places)} elements. The first, "
        f"{list(first)}, holds {numbers.shown(int(found[first]))} and must hold "
        f"{numbers.shown(int(wanted[first]))}; it was written {int(writes[rank][name][first])} "
        f"times, by {'; '.join(writers) or 'nobody'}"
    )


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
    box = ", ".join(f"{start}:{end}" for start, end in move.box)
    side = "destination rank" if move.link == "fanout" else "rank"
    return f"{move.tensor} [{box}] from {side} {move.src} to rank {move.dst} ({move.link})"
