"""One server rank's part of a plan: what comes by which way, and what it must hold afterwards.

Owns rebuilding it from the control message. Knows nothing of memory, groups or live parameters.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from megarl.errors import WeightSyncError
from megarl.reshard.arena import arena_layout
from megarl.reshard.layout import Layout, Piece, RankLayout
from megarl.reshard.plan import Move, Plan
from megarl.reshard.sglang import sglang_layout
from megarl.reshard.store import cached_plan
from megarl.weight_sync import coverage, parcels
from megarl.weight_sync.control import WIRE_DTYPES, ControlMessage, arena_digest
from megarl.weight_sync.parcels import Parcel
from megarl.weight_sync.places import placement


@dataclass(frozen=True)
class Source:
    """What one learner rank's arena holds for this rank, and the moves that read it."""

    moves: tuple[Move, ...]
    tensors: Mapping[str, tuple[int, tuple[int, ...]]]  # local name -> (byte offset, shape)
    digest: str


@dataclass(frozen=True)
class Route:
    """This rank's part of one plan.

    `sources` are the arenas of its own node; `network` is what comes from other nodes, `fanout`
    what passes between the server's ranks of this node afterwards.
    """

    digest: str
    mine: RankLayout
    sources: Mapping[int, Source]
    network: tuple[Parcel, ...]
    fanout: tuple[Parcel, ...]
    pieces: tuple[Piece, ...]
    shapes: Mapping[str, tuple[int, ...]]  # global shape of each tensor
    dtype: torch.dtype


def make_route(message: ControlMessage, key: str) -> Route:
    """Rebuild the plan from the message, and take this rank's part. Raises where digests differ."""
    if message.dtype not in WIRE_DTYPES:
        raise WeightSyncError(f"wire dtype {message.dtype!r} is unknown; use {list(WIRE_DTYPES)}")
    spec, dtype, rank = message.source, WIRE_DTYPES[message.dtype], message.tp_rank
    learner = spec.layout()
    server = sglang_layout(spec.shape, message.mesh)
    where = placement(message.source_devices, message.devices)
    plan = cached_plan(learner, server, where, dtype.itemsize)
    if plan.digest != message.plan_digest:
        raise WeightSyncError(
            f"this server's plan is {plan.digest[:12]}, the learner's {message.plan_digest[:12]}; "
            "use one version of megarl in learner and rollout"
        )
    if parcels.members(plan) != message.members:
        raise WeightSyncError("the message names other members than the plan has")
    return Route(
        key,
        server.ranks[rank],
        _sources(learner, plan, rank, message.dtype),
        parcels.to_server(plan, rank, message.bucket_bytes),
        parcels.inside_node(plan, rank, message.bucket_bytes),
        coverage.held(server)[rank],
        {parameter.name: parameter.shape for parameter in server.parameters},
        dtype,
    )


def _sources(learner: Layout, plan: Plan, rank: int, dtype: str) -> dict[int, Source]:
    moves: dict[int, list[Move]] = {}
    for move in plan.receives(rank):
        if move.link in ("local", "node"):
            moves.setdefault(move.src, []).append(move)
    sources = {}
    itemsize = WIRE_DTYPES[dtype].itemsize
    for src, mine in moves.items():
        layout = learner.ranks[src]
        offsets, num_bytes = arena_layout(layout, plan, itemsize)
        shapes = {tensor.name: tensor.shape for tensor in layout.tensors}
        tensors = {name: (offset, shapes[name]) for name, offset in offsets.items()}
        digest = arena_digest(plan.digest, dtype, src, offsets, num_bytes)
        sources[src] = Source(tuple(mine), tensors, digest)
    return sources
