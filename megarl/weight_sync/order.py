"""What learner ranks tell each other of one publish: the order of rank 0, and each rank's part.

Owns nothing but these values, which are pickled between ranks. Knows nothing of how they are used.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

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
    sums: Mapping[str, int] = field(default_factory=dict)
    arenas: Mapping[ServerKind, ArenaRef] = field(default_factory=dict)
    lost: Mapping[str, tuple[float, float]] = field(default_factory=dict)  # to float8, by weight
