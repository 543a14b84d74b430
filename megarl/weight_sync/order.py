"""What learner ranks tell each other of one publish: the order of rank 0, and each rank's part.

Owns nothing but these values, which are pickled between ranks. Knows nothing of how they are used.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from megarl.weight_sync.checksum import add
from megarl.weight_sync.places import ServerKind
from megarl.weight_sync.transport.shared import ArenaRef


@dataclass(frozen=True, slots=True)
class Target:
    """One server of a publish, as every learner rank knows it."""

    server: str
    incarnation: int
    kind: ServerKind
    token: str


@dataclass(frozen=True, slots=True)
class Order:
    """What rank 0 tells the others: what to stage for each kind of server, and whom to send to."""

    version: int
    attempt: str
    generations: tuple[tuple[ServerKind, int], ...]
    targets: tuple[Target, ...]
    store: tuple[str, int]


@dataclass(frozen=True, slots=True)
class Staged:
    """What one learner rank has to say after staging. An `error` is for all ranks to raise."""

    rank: int
    error: str = ""
    arenas: Mapping[ServerKind, ArenaRef] = field(default_factory=dict)
    lost: Mapping[str, tuple[float, float]] = field(default_factory=dict)  # to float8, by weight
    took_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Summed:
    """One learner rank's share of every tensor's checksum, or of all ranks together.

    `took_s` is the slowest rank's. An `error` is for all ranks to raise.
    """

    sums: Mapping[str, int] = field(default_factory=dict)
    took_s: float = 0.0
    error: str = ""


def added_up(parts: Sequence[Summed]) -> Summed:
    """The checksums of whole tensors, from the shares of all ranks.

    >>> added_up([Summed({"w": 3}, 0.5), Summed({"w": 4, "v": 1}, 0.25)])
    Summed(sums={'w': 7, 'v': 1}, took_s=0.5, error='')
    """
    totals: dict[str, int] = {}
    for part in parts:
        for tensor, share in part.sums.items():
            totals[tensor] = add([totals.get(tensor, 0), share])
    errors = "; ".join(part.error for part in parts if part.error)
    return Summed(totals, max(part.took_s for part in parts), errors)
