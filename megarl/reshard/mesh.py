"""How many ranks there are on each axis, and which rank stands where. Knows nothing of tensors."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import KW_ONLY, dataclass, fields

from megarl.errors import LayoutError

MAX_RANKS = 2**17
"""Of one side, learner or servers: each rank is written down in a layout."""


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
        _check_most("learner mesh: tp x cp x dp x pp", self.size)
        if self.stage_size % (self.ep * self.etp):
            raise LayoutError(
                f"learner mesh: ep={self.ep} x etp={self.etp} does not divide the "
                f"{self.stage_size} ranks of a pipeline stage (tp x cp x dp); "
                "lower ep or etp, or use more ranks"
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

    @property
    def sequence_multiple(self) -> int:
        """Tokens that every sequence is padded to a multiple of: context ranks take two chunks of
        it each."""
        return 2 * self.cp if self.cp > 1 else 1

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

    The other fields say what SGLang's settings do to the layout: `dp_head` --enable-dp-lm-head,
    `dense_whole` --moe-dense-tp-size 1, `shared_whole` an all-to-all backend for experts (or
    SGLANG_SHARED_EXPERT_TP1), `fused_shared_experts` shared experts as one more slot behind the
    routed ones, `up_first` w13 as [up, gate] (FlashInfer's CUTLASS), `draft` that a draft model is
    served besides, `pp_layers` SGLANG_PP_LAYER_PARTITION.

    >>> mesh = ServerMesh(tp=4, ep=2, attention_dp=2, pp=2, servers=2)
    >>> mesh.stage(1)
    (4, 5, 6, 7, 12, 13, 14, 15)
    >>> mesh.holders(mesh.attention_tp)
    ((0, 2, 4, 6), (1, 3, 5, 7))
    >>> mesh.expert_holders()
    (((0, 4), (1, 5)), ((2, 6), (3, 7)))
    >>> str(mesh)
    'tp=4 ep=2 attention_dp=2 pp=2 servers=2'
    """

    tp: int = 1
    _: KW_ONLY
    cpu: bool = False
    ep: int = 1
    attention_dp: int = 1
    pp: int = 1
    servers: int = 1
    dp_head: bool = False
    dense_whole: bool = False
    shared_whole: bool = False
    fused_shared_experts: bool = False
    up_first: bool = False
    draft: bool = False
    pp_layers: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "pp_layers", tuple(self.pp_layers))  # a list when read from JSON
        for axis in ("tp", "ep", "attention_dp", "pp", "servers"):
            _check_positive(f"server mesh: {axis}", getattr(self, axis))
        _check_most("server mesh: servers x tp x pp", self.servers * self.size)
        for axis in ("ep", "attention_dp"):
            if self.tp % getattr(self, axis):
                raise LayoutError(
                    f"server mesh: {axis}={getattr(self, axis)} does not divide tp={self.tp}; "
                    "use a divisor of tp"
                )
        if self.dp_head and self.attention_dp == 1:
            raise LayoutError(
                "server mesh: dp_head needs attention_dp > 1; SGLang refuses --enable-dp-lm-head "
                "without attention data parallelism"
            )
        if self.pp_layers and len(self.pp_layers) != self.pp:
            raise LayoutError(
                f"server mesh: pp_layers={self.pp_layers} names {len(self.pp_layers)} stages, "
                f"pp={self.pp}; give one number of layers for each stage"
            )
        if any(count < 0 for count in self.pp_layers):
            raise LayoutError(
                f"server mesh: pp_layers={self.pp_layers} has {min(self.pp_layers)} layers in a "
                "stage; give numbers from 0 up"
            )

    def __str__(self) -> str:
        """`tp`, and whatever else is not as a plain server has it."""
        words = [f"tp={self.tp}"]
        for field in fields(self)[1:]:
            value = getattr(self, field.name)
            if value == field.default:
                continue
            if isinstance(value, tuple):
                value = "+".join(map(str, value))
            words.append(field.name if value is True else f"{field.name}={value}")
        return " ".join(words)

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

    def stage(self, p: int) -> tuple[int, ...]:
        """The ranks of pipeline stage p of all servers."""
        first = p * self.tp
        return tuple(s * self.size + first + r for s in range(self.servers) for r in range(self.tp))

    def holders(self, count: int) -> tuple[tuple[int, ...], ...]:
        """For each of `count` shards over neighbouring ranks, the positions in a stage."""
        return tuple(tuple(range(i, self.servers * self.tp, count)) for i in range(count))

    def expert_holders(self) -> tuple[tuple[tuple[int, ...], ...], ...]:
        """[e][x]: the positions in a stage that hold shard x of the e-th part of the experts."""
        return tuple(
            tuple(
                tuple(range(e * self.expert_tp + x, self.servers * self.tp, self.tp))
                for x in range(self.expert_tp)
            )
            for e in range(self.ep)
        )

    def layers(self, num_layers: int, p: int) -> tuple[int, int]:
        """[first, end) of the decoder layers on stage p: the last stages have one more.

        Source: sglang 0.5.23, get_pp_indices in distributed/utils.py. Raises LayoutError where
        there are fewer layers than stages, or `pp_layers` does not add up to `num_layers`.

        >>> [ServerMesh(pp=4).layers(10, p) for p in range(4)]
        [(0, 2), (2, 4), (4, 7), (7, 10)]
        """
        if self.pp_layers:
            if sum(self.pp_layers) != num_layers:
                raise LayoutError(
                    f"pp_layers={self.pp_layers} add up to {sum(self.pp_layers)} layers, the model "
                    f"has {num_layers}"
                )
            return sum(self.pp_layers[:p]), sum(self.pp_layers[: p + 1])
        if num_layers < self.pp:
            raise LayoutError(
                f"{num_layers} layers do not fill pp={self.pp} stages; use a pp up to {num_layers}"
            )
        few, rest = divmod(num_layers, self.pp)
        late = max(0, p - (self.pp - rest))
        first = p * few + late
        return first, first + few + (p >= self.pp - rest)


def _check_positive(name: str, value: int) -> None:
    if value < 1:
        raise LayoutError(f"{name} is {value}; give a number of ranks from 1 up")


def _check_most(name: str, value: int) -> None:
    if value > MAX_RANKS:
        raise LayoutError(f"{name} is {value} ranks; megarl lays out {MAX_RANKS} at most")
