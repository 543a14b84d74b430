"""One server rank's part of a plan: what comes by which way, and what it must hold afterwards.

Owns rebuilding it from the control message. Knows nothing of memory, groups or live parameters.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from megarl.errors import WeightSyncError
from megarl.reshard.arena import Slot, arena_layout
from megarl.reshard.cover import Cover
from megarl.reshard.engine_tensors import float32_on_server
from megarl.reshard.layout import Layout, Piece, RankLayout
from megarl.reshard.plan import Move, Plan
from megarl.reshard.store import cached_plan
from megarl.weight_sync import parcels
from megarl.weight_sync.control import ControlMessage, arena_digest
from megarl.weight_sync.formats import WireFormat, wire_format
from megarl.weight_sync.parcels import Parcel
from megarl.weight_sync.places import placement


@dataclass(frozen=True)
class Source:
    """What one learner rank's arena holds for this rank, and the moves that read it."""

    moves: tuple[Move, ...]
    slots: Mapping[str, Slot]  # by local name
    digest: str


@dataclass(frozen=True)
class Route:
    """This rank's part of one plan.

    `sources` are the arenas of its own node; `network` is what comes from other nodes, `fanout`
    what passes between the server's ranks of this node afterwards. `wire` is in which types
    parameters travel; the server keeps its tensors `float32` so, the others as the policy.
    """

    digest: str
    mine: RankLayout
    sources: Mapping[int, Source]
    network: tuple[Parcel, ...]
    fanout: tuple[Parcel, ...]
    pieces: tuple[Piece, ...]
    shapes: Mapping[str, tuple[int, ...]]  # global shape of each tensor
    wire: WireFormat
    float32: frozenset[str]

    def dtype(self, local: str) -> torch.dtype:
        """The type in which the server keeps one of its tensors."""
        return torch.float32 if local in self.float32 else self.wire.policy

    @property
    def expected(self) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """(shape, type) of each of the server's tensors that the sync fills."""
        float8 = {piece.local for piece in self.pieces if self.wire.of(piece.tensor).itemsize == 1}
        return {
            tensor.name: (
                tensor.shape,
                torch.float8_e4m3fn if tensor.name in float8 else self.dtype(tensor.name),
            )
            for tensor in self.mine.tensors
        }


def make_route(message: ControlMessage, key: str) -> Route:
    """Rebuild the plan from the message, and take this rank's part. Raises where digests differ."""
    spec, rank = message.source, message.tp_rank
    learner = spec.layout()
    server = spec.server_layout(message.mesh)
    wire = wire_format(message.dtype, server)
    where = placement(message.source_devices, message.devices)
    plan = cached_plan(learner, server, where, wire.policy.itemsize)
    if plan.digest != message.plan_digest:
        raise WeightSyncError(
            f"this server's plan is {plan.digest[:12]}, the learner's {message.plan_digest[:12]}; "
            "use one version of megarl in learner and rollout"
        )
    if parcels.members(plan) != message.members:
        raise WeightSyncError("the message names other members than the plan has")
    return Route(
        key,
        server.rank(rank),
        _sources(learner, plan, rank, message.dtype),
        parcels.to_server(plan, rank, message.bucket_bytes),
        parcels.inside_node(plan, rank, message.bucket_bytes),
        Cover(server).held(rank),
        {parameter.name: parameter.shape for parameter in server.parameters},
        wire,
        float32_on_server(spec.shape, server, rank),
    )


def _sources(learner: Layout, plan: Plan, rank: int, dtype: str) -> dict[int, Source]:
    moves: dict[int, list[Move]] = {}
    for move in plan.operations_to(rank, ["local", "node"]).moves(plan):
        moves.setdefault(move.src, []).append(move)
    sources = {}
    for src, mine in moves.items():
        slots, num_bytes = arena_layout(learner.rank(src), plan)
        digest = arena_digest(plan.digest, dtype, src, slots, num_bytes)
        sources[src] = Source(tuple(mine), slots, digest)
    return sources
