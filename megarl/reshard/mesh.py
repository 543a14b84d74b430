"""How many ranks there are on each axis, and which rank stands where. Knows nothing of tensors."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from megarl.errors import LayoutError


@dataclass(frozen=True, slots=True)
class LearnerMesh:
    """Megatron's dense ranks in its order tp-cp-ep-dp-pp: rank = t + tp * (d + dp * p).

    >>> LearnerMesh(tp=2, pp=2, dp=2).coordinates(5)
    (1, 1, 0)
    >>> LearnerMesh(tp=2, pp=2, dp=2).rank(t=1, p=1, d=0)
    5
    """

    tp: int = 1
    pp: int = 1
    dp: int = 1

    def __post_init__(self) -> None:
        for axis in ("tp", "pp", "dp"):
            _check_positive(f"learner mesh: {axis}", getattr(self, axis))

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self.tp * self.pp * self.dp

    def rank(self, t: int, p: int, d: int) -> int:
        """The rank at tensor position t, pipeline stage p, data-parallel position d."""
        return t + self.tp * (d + self.dp * p)

    def coordinates(self, rank: int) -> tuple[int, int, int]:
        """(t, p, d) of a rank."""
        if not 0 <= rank < self.size:
            raise LayoutError(f"learner rank {rank} is not in a mesh of {self.size} ranks: {self}")
        rest, t = divmod(rank, self.tp)
        p, d = divmod(rest, self.dp)
        return t, p, d

    def replicas(self, t: int, p: int) -> Iterator[int]:
        """The ranks that hold what (t, p) holds, one for each data-parallel position."""
        return (self.rank(t, p, d) for d in range(self.dp))


@dataclass(frozen=True, slots=True)
class ServerMesh:
    """One rollout server. On a CPU SGLang pads what does not divide, a GPU one copies KV heads."""

    tp: int = 1
    cpu: bool = False

    def __post_init__(self) -> None:
        _check_positive("server mesh: tp", self.tp)

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self.tp


def _check_positive(name: str, value: int) -> None:
    if value < 1:
        raise LayoutError(f"{name} is {value}; give a number of ranks from 1 up")
