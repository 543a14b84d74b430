"""Weight loaders that a server may be asked to use in place of megarl's: each does one wrong.

They run in the server's scheduler process, around the real receiver.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from unittest import mock

import torch

from megarl.reshard.plan import Move
from megarl.weight_sync import receiver
from megarl.weight_sync.control import decode

Named = Sequence[tuple[str, object]]
STALL_S = 5.0


def _with_moves(
    model: torch.nn.Module, named: Named, change: Callable[[list[Move]], list[Move]]
) -> None:
    """The real receiver, on a route whose first source has other moves."""
    kept = receiver._RECEIVER._find_route(decode(named))
    rank, source = next(iter(kept.sources.items()))
    moves = tuple(change(list(source.moves)))
    sources = {**kept.sources, rank: dataclasses.replace(source, moves=moves)}
    receiver._RECEIVER._route = dataclasses.replace(kept, sources=sources)
    receiver.load(model, named)
    receiver._RECEIVER._route = kept


def skip_one(model: torch.nn.Module, named: Named) -> None:
    """One interval is not copied."""
    _with_moves(model, named, lambda moves: moves[:3] + moves[4:])


def swap_two(model: torch.nn.Module, named: Named) -> None:
    """Two intervals of one shape get each other's bytes."""

    def swapped(moves: list[Move]) -> list[Move]:
        sizes = [tuple(end - start for start, end in move.box) for move in moves]
        a, b = next(
            (i, j)
            for i in range(len(moves))
            for j in range(i + 1, len(moves))
            if sizes[i] == sizes[j] and len(sizes[i]) == 2
        )
        first, second = moves[a], moves[b]
        moves[a] = dataclasses.replace(first, src_local=second.src_local, src_at=second.src_at)
        moves[b] = dataclasses.replace(second, src_local=first.src_local, src_at=first.src_at)
        return moves

    _with_moves(model, named, swapped)


def nothing(model: torch.nn.Module, named: Named) -> None:
    """Says nothing and does nothing: SGLang answers "Success" all the same."""


def stall(model: torch.nn.Module, named: Named) -> None:
    """Takes long, then does as it should."""
    time.sleep(STALL_S)
    receiver.load(model, named)


def without_derived(model: torch.nn.Module, named: Named) -> None:
    """All but the last step: what the model derives from its weights stays as it was."""
    with mock.patch.object(receiver, "derive_weights", lambda _: None):
        receiver.load(model, named)


def turn_rotary(model: torch.nn.Module, named: Named) -> None:
    """Does as it should, and turns the sign of every cosine of the rotary cache, which is no
    parameter: no checksum sees it. The second time, it is as it was."""
    receiver.load(model, named)
    caches = {id(b): b for name, b in model.named_buffers() if name.endswith("cos_sin_cache")}
    assert caches, "the model has no rotary cache"
    for cache in caches.values():
        cache[:, : cache.shape[1] // 2].neg_()


LOADERS = [
    f"{__name__}.{f.__name__}"
    for f in (skip_one, swap_two, nothing, stall, without_derived, turn_rotary)
]
WITHOUT_DERIVED, TURN_ROTARY = LOADERS[-2:]
