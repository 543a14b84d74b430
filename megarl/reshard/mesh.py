"""How many ranks there are on each axis, and which rank stands where. Knows nothing of tensors."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from megarl.errors import LayoutError


@dataclass(frozen=True, slots=True)
class LearnerMesh:
    """Megatron's ranks. Dense tensors see them in its order tp-cp-ep-dp-pp, experts in their own.

    rank = t + tp * (c + cp * (d + dp * p)) for dense tensors, and inside a pipeline stage
    position = x + etp * (e + ep * replica) for routed experts. `dp` counts the replicas of dense
    tensors with the same context-parallel position; `vpp` the model chunks of a stage.

    >>> LearnerMesh(tp=2, pp=2, dp=2).coordinates(5)
    (1, 1, 0)
    >>> LearnerMesh(tp=2, pp=2, dp=2).rank(t=1, p=1, d=0)
    5
    >>> LearnerMesh(tp=4, dp=4, ep=8).expert_dp
    2
    """

    tp: int = 1
    pp: int = 1
    dp: int = 1
    cp: int = 1
    ep: int = 1
    etp: int = 1
    vpp: int = 1

    def __post_init__(self) -> None:
        for axis in ("tp", "pp", "dp", "cp", "ep", "etp", "vpp"):
            _check_positive(f"learner mesh: {axis}", getattr(self, axis))
        if self.stage_size % (self.ep * self.etp):
            raise LayoutError(
                f"learner mesh: ep={self.ep} x etp={self.etp} does not divide the "
                f"{self.stage_size} ranks of a pipeline stage (tp x cp x dp)"
            )

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self.stage_size * self.pp

    @property
    def stage_size(self) -> int:
        """Ranks of one pipeline stage."""
        return self.tp * self.cp * self.dp

    @property
    def expert_dp(self) -> int:
        """Replicas of each routed expert's shard."""
        return self.stage_size // (self.ep * self.etp)

    def rank(self, t: int, p: int, d: int, c: int = 0) -> int:
        """The rank at tensor position t, stage p, data position d, context position c."""
        return t + self.tp * (c + self.cp * (d + self.dp * p))

    def coordinates(self, rank: int) -> tuple[int, int, int]:
        """(t, p, replica) of a rank; replicas are counted over context and data positions."""
        if not 0 <= rank < self.size:
            raise LayoutError(f"learner rank {rank} is not in a mesh of {self.size} ranks: {self}")
        rest, t = divmod(rank, self.tp)
        p, replica = divmod(rest, self.cp * self.dp)
        return t, p, replica

    def replicas(self, t: int, p: int) -> Iterator[int]:
        """The ranks that hold what (t, p) holds."""
        first = p * self.stage_size + t
        return (first + self.tp * i for i in range(self.cp * self.dp))

    def stage(self, p: int) -> tuple[int, ...]:
        """The ranks of pipeline stage p."""
        return tuple(range(p * self.stage_size, (p + 1) * self.stage_size))

    def dense_holders(self) -> tuple[tuple[int, ...], ...]:
        """For each tensor position, the positions in a stage that hold its shard."""
        return tuple(tuple(range(t, self.stage_size, self.tp)) for t in range(self.tp))

    def expert_holders(self) -> tuple[tuple[tuple[int, ...], ...], ...]:
        """[e][x]: the positions in a stage that hold shard x of the e-th part of the experts."""
        step = self.ep * self.etp
        return tuple(
            tuple(tuple(range(x + self.etp * e, self.stage_size, step)) for x in range(self.etp))
            for e in range(self.ep)
        )


@dataclass(frozen=True, slots=True)
class ServerMesh:
    """Rollout servers of one kind. `servers` equal ones hold rank server * size + rank.

    `tp` counts the ranks of one pipeline stage: `attention_dp` groups of them each hold the whole
    attention, `ep` parts hold the routed experts, each cut over tp / ep ranks. On a CPU SGLang pads
    what does not divide, where a GPU server copies KV heads.
    """

    tp: int = 1
    cpu: bool = False
    ep: int = 1
    attention_dp: int = 1
    pp: int = 1
    servers: int = 1

    def __post_init__(self) -> None:
        for axis in ("tp", "ep", "attention_dp", "pp", "servers"):
            _check_positive(f"server mesh: {axis}", getattr(self, axis))
        for axis in ("ep", "attention_dp"):
            if self.tp % getattr(self, axis):
                raise LayoutError(
                    f"server mesh: {axis}={getattr(self, axis)} does not divide tp={self.tp}"
                )

    @property
    def size(self) -> int:
        """Ranks of one server."""
        return self.tp * self.pp

    @property
    def attention_tp(self) -> int:
        """Ranks over which one copy of the attention is cut."""
        return self.tp // self.attention_dp

    @property
    def expert_tp(self) -> int:
        """Ranks over which each routed expert is cut."""
        return self.tp // self.ep


def _check_positive(name: str, value: int) -> None:
    if value < 1:
        raise LayoutError(f"{name} is {value}; give a number of ranks from 1 up")
