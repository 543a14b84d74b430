"""The plan that takes one layout to another: which rank copies which box to which rank.

Owns the choice of senders among replicas. The same two layouts give the same plan in every process,
and no plan leaves `make_plan` without its proof. Knows nothing of bytes, transports or engines.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from megarl.errors import LayoutError
from megarl.reshard.layout import (
    Atom,
    Box,
    Layout,
    Piece,
    atoms,
    num_elements,
    offset_in,
    overlap,
)
from megarl.reshard.proof import Move, prove

__all__ = ["Move", "Plan", "make_plan", "minimum_elements", "prove"]

PLANNER = b"megarl planner 1"  # raise it when the same layouts would give another plan


@dataclass(frozen=True)
class Plan:
    """All moves, ordered by destination rank and tensor, with the digests of both layouts."""

    moves: tuple[Move, ...]
    source_digest: str
    destination_digest: str

    @cached_property
    def digest(self) -> str:
        """SHA-256 over layouts and moves: two processes that agree on it have the same plan."""
        total = hashlib.sha256(PLANNER)
        total.update(f"{self.source_digest} {self.destination_digest}".encode())
        for move in self.moves:
            total.update(repr(move).encode())
        return total.hexdigest()

    def sends(self, rank: int) -> tuple[Move, ...]:
        """The moves out of source rank `rank`."""
        return self._by_source.get(rank, ())

    def receives(self, rank: int) -> tuple[Move, ...]:
        """The moves into destination rank `rank`."""
        return self._by_destination.get(rank, ())

    def between(self, src: int, dst: int) -> tuple[Move, ...]:
        """The moves from source rank `src` to destination rank `dst`."""
        return tuple(move for move in self.receives(dst) if move.src == src)

    def num_elements(self) -> int:
        """Elements moved, over all destinations."""
        return sum(num_elements(move.box) for move in self.moves)

    @cached_property
    def _by_source(self) -> dict[int, tuple[Move, ...]]:
        found: dict[int, list[Move]] = {}
        for move in self.moves:
            found.setdefault(move.src, []).append(move)
        return {rank: tuple(moves) for rank, moves in found.items()}

    @cached_property
    def _by_destination(self) -> dict[int, tuple[Move, ...]]:
        found: dict[int, list[Move]] = {}
        for move in self.moves:
            found.setdefault(move.dst, []).append(move)
        return {rank: tuple(moves) for rank, moves in found.items()}


@dataclass(frozen=True, slots=True)
class _Need:
    """A part of a destination piece that is one atom's, or a part of it: any holder can send it."""

    dst: int
    piece: Piece
    box: Box
    atom: Atom

    @property
    def unit(self) -> tuple[tuple[int, str], ...]:
        """The replicas to choose from. One choice is made for all needs of a unit, so that a source
        tensor is read from (and staged by) one rank only."""
        return tuple((holder.rank, holder.local) for holder in self.atom.holders)


def make_plan(source: Layout, destination: Layout) -> Plan:
    """The proved plan from one layout to another, with senders balanced over replicas by elements.

    Raises LayoutError where the layouts are of different parameters, where nobody holds what is
    needed, and where the proof fails.
    """
    if source.parameters != destination.parameters:
        raise LayoutError(
            f"{source.kind} and {destination.kind} lay out different parameters; build both from "
            "one model shape"
        )
    needs = list(_needs(source, destination))
    sender = _balance(needs)
    moves = []
    for need in needs:
        holder = need.atom.holders[sender[need.unit]]
        start = zip(holder.at, need.box, need.atom.box, strict=True)
        moves.append(
            Move(
                src=holder.rank,
                dst=need.dst,
                tensor=need.atom.tensor,
                box=need.box,
                src_local=holder.local,
                src_at=tuple(at + low - origin for at, (low, _), (origin, _) in start),
                dst_local=need.piece.local,
                dst_at=offset_in(need.piece, need.box),
            )
        )
    plan = Plan(tuple(moves), source.digest, destination.digest)
    prove(plan.moves, source, destination)
    return plan


def minimum_elements(destination: Layout) -> int:
    """Elements that any plan must move: each destination element once."""
    return sum(num_elements(piece.box) for rank in destination.ranks for piece in rank.pieces)


def _needs(source: Layout, destination: Layout) -> Iterator[_Need]:
    """All intersections of destination pieces with source atoms."""
    index = {tensor: _AtomIndex(found) for tensor, found in atoms(source).items()}
    for rank in destination.ranks:
        for piece in rank.pieces:
            for atom in index[piece.tensor].near(piece.box):
                box = overlap(piece.box, atom.box)
                if box is not None:
                    yield _Need(rank.rank, piece, box, atom)


class _AtomIndex:
    """One tensor's atoms, findable by the first dim along which they differ."""

    def __init__(self, found: tuple[Atom, ...]) -> None:
        dims = range(len(found[0].box) if found else 0)
        self.dim = next((d for d in dims if len({atom.box[d] for atom in found}) > 1), 0)
        self.atoms = sorted(found, key=lambda atom: (atom.box[self.dim], atom.box))
        self.starts = [atom.box[self.dim][0] for atom in self.atoms]
        self.ends = [atom.box[self.dim][1] for atom in self.atoms]

    def near(self, box: Box) -> list[Atom]:
        """Every atom that may overlap `box`: atoms are disjoint or aligned along the dim."""
        start, end = box[self.dim]
        return self.atoms[bisect_right(self.ends, start) : bisect_left(self.starts, end)]


def _balance(needs: list[_Need]) -> dict[tuple[tuple[int, str], ...], int]:
    """For each unit the index of its sender: largest first, to the rank with the least so far."""
    sizes: dict[tuple[tuple[int, str], ...], int] = {}
    for need in needs:
        sizes[need.unit] = sizes.get(need.unit, 0) + num_elements(need.box)
    load: dict[int, int] = {}
    sender = {}
    for unit in sorted(sizes, key=lambda unit: (len(unit) > 1, -sizes[unit], unit)):
        ranks = [rank for rank, _ in unit]
        chosen = min(range(len(unit)), key=lambda i: (load.get(ranks[i], 0), ranks[i]))
        sender[unit] = chosen
        load[ranks[chosen]] = load.get(ranks[chosen], 0) + sizes[unit]
    return sender
