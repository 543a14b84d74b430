"""The receiving side of a weight sync, in every TP rank's scheduler process of an SGLang server.

SGLang calls `load` (its --custom-weight-loader) inside an update request. Owns copying from the
arenas into the live parameters, and the checksums of what is there afterwards. Imports torch and
megarl's pure folders only: neither sglang nor megatron. It never raises: an exception in an update
ends the whole server. What goes wrong is said in the acknowledgement.
"""

from __future__ import annotations

import logging
import os
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from megarl.errors import WeightSyncError
from megarl.reshard import execute
from megarl.reshard.arena import arena_layout
from megarl.reshard.layout import Piece, RankLayout, local_box
from megarl.reshard.megatron import megatron_layout
from megarl.reshard.plan import Move, make_plan
from megarl.reshard.sglang import sglang_layout
from megarl.weight_sync import acks, coverage
from megarl.weight_sync.acks import Ack
from megarl.weight_sync.checksum import box_checksum
from megarl.weight_sync.control import WIRE_DTYPES, ControlMessage, arena_digest, decode
from megarl.weight_sync.transport.shared import ArenaReader, ArenaRef

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Source:
    """What one learner rank's arena holds for this rank, and the moves that read it."""

    moves: tuple[Move, ...]
    tensors: Mapping[str, tuple[int, tuple[int, ...]]]  # local name -> (byte offset, shape)
    digest: str


@dataclass(frozen=True)
class Route:
    """This rank's part of one plan."""

    digest: str
    mine: RankLayout
    sources: Mapping[int, Source]
    pieces: tuple[Piece, ...]
    shapes: Mapping[str, tuple[int, ...]]  # global shape of each tensor
    dtype: torch.dtype


class Receiver:
    """What one server rank keeps between syncs: its part of the plan, open arenas, the store."""

    def __init__(self) -> None:
        self._route: Route | None = None
        self._readers: dict[int, ArenaReader] = {}
        self._store: tuple[tuple[str, int], TCPStore] | None = None

    def receive(self, model: torch.nn.Module, message: ControlMessage) -> Ack:
        """Carry out one sync and say how it went. Raises nothing but what ends a process."""
        try:
            return self._sync(model, message)
        except Exception as error:  # noqa: BLE001 - raising ends the server
            log.warning("weight sync refused stamp=%s error=%s", message.stamp, error)
            text = str(error) if isinstance(error, WeightSyncError) else repr(error)
            return Ack(message.token, False, text, host=socket.gethostname(), pid=os.getpid())

    def acknowledge(self, message: ControlMessage, ack: Ack) -> None:
        """Write the acknowledgement where the sender looks for it."""
        if self._store is None or self._store[0] != message.store:
            self._store = (message.store, acks.connect(message.store))
        try:
            self._store[1].set(message.ack_key, ack.to_json())
        except Exception:
            self._store = None  # the next sync connects anew
            raise

    def _sync(self, model: torch.nn.Module, message: ControlMessage) -> Ack:
        start = time.perf_counter()
        route = self._find_route(message)
        parameters = {name: p.detach() for name, p in model.named_parameters()}
        check_parameters(model, parameters, route)
        readers = self._open(message, route)
        _check_stamps(readers, message.stamp)
        _synchronize(parameters)  # no forward pass is still reading them
        for rank, source in route.sources.items():
            execute.run(source.moves, _views(readers[rank], source, route.dtype), parameters)
        execute.clear_paddings(route.mine, parameters)
        _synchronize(parameters)
        copied = time.perf_counter()
        _check_stamps(readers, message.stamp)  # not written again while they were read
        _check_paddings(route.mine, parameters)
        sums = tuple(
            box_checksum(
                parameters[piece.local][execute.slices(local_box(piece.box, piece.at))],
                piece.tensor,
                route.shapes[piece.tensor],
                piece.box,
            )
            for piece in route.pieces
        )
        checked = time.perf_counter()
        return Ack(
            message.token,
            True,
            "",
            sums,
            socket.gethostname(),
            os.getpid(),
            copied - start,
            checked - copied,
        )

    def _find_route(self, message: ControlMessage) -> Route:
        """The cached part of the plan, or a new one where the message is of another."""
        key = f"{message.plan_digest} {message.dtype} {message.tp_rank}"
        if self._route is None or self._route.digest != key:
            self._route = _make_route(message, key)
        return self._route

    def _open(self, message: ControlMessage, route: Route) -> dict[int, ArenaReader]:
        """The arenas that the route reads: opened once, dropped when the message names others."""
        missing = [rank for rank in route.sources if rank not in message.arenas]
        if missing:
            raise WeightSyncError(f"the message names no arena of learner ranks {missing}")
        kept: dict[int, ArenaReader] = {}
        for rank, source in route.sources.items():
            ref: ArenaRef = message.arenas[rank]
            reader = self._readers.get(rank)
            if reader is None or reader.ref != ref:
                reader = ArenaReader(ref, source.digest)
            kept[rank] = reader
        self._readers = kept
        return kept


def _make_route(message: ControlMessage, key: str) -> Route:
    """Rebuild the plan from the message, and take this rank's part. Raises where digests differ."""
    if message.dtype not in WIRE_DTYPES:
        raise WeightSyncError(f"wire dtype {message.dtype!r} is unknown; use {list(WIRE_DTYPES)}")
    spec, dtype = message.source, WIRE_DTYPES[message.dtype]
    learner = megatron_layout(spec.shape, spec.mesh, spec.vocab_divisor)
    server = sglang_layout(spec.shape, message.mesh)
    plan = make_plan(learner, server)
    if plan.digest != message.plan_digest:
        raise WeightSyncError(
            f"this server's plan is {plan.digest[:12]}, the learner's {message.plan_digest[:12]}; "
            "use one version of megarl in learner and rollout"
        )
    moves: dict[int, list[Move]] = {}
    for move in plan.receives(message.tp_rank):
        moves.setdefault(move.src, []).append(move)
    sources = {}
    for rank, mine in moves.items():
        layout = learner.ranks[rank]
        offsets, num_bytes = arena_layout(layout, plan, dtype.itemsize)
        shapes = {tensor.name: tensor.shape for tensor in layout.tensors}
        tensors = {name: (offset, shapes[name]) for name, offset in offsets.items()}
        digest = arena_digest(plan.digest, message.dtype, rank, offsets, num_bytes)
        sources[rank] = Source(tuple(mine), tensors, digest)
    return Route(
        key,
        server.ranks[message.tp_rank],
        sources,
        coverage.held(server)[message.tp_rank],
        {parameter.name: parameter.shape for parameter in server.parameters},
        dtype,
    )


def check_parameters(
    model: torch.nn.Module, parameters: Mapping[str, torch.Tensor], route: Route
) -> None:
    """Raise WeightSyncError where the live parameters are not those of the layout, one and all."""
    expected = {tensor.name: tensor.shape for tensor in route.mine.tensors}
    unknown, missing = parameters.keys() - expected.keys(), expected.keys() - parameters.keys()
    if unknown or missing:
        raise WeightSyncError(
            f"the server's parameters are not those of its layout: unknown {sorted(unknown)[:3]}, "
            f"missing {sorted(missing)[:3]}; this engine version or setting is not supported"
        )
    for name, shape in expected.items():
        found = parameters[name]
        if tuple(found.shape) != shape or found.dtype != route.dtype:
            raise WeightSyncError(
                f"{name} is {tuple(found.shape)} {found.dtype} on the server, expected {shape} "
                f"{route.dtype}; give learner and rollout one model, tp and number format"
            )
    for name, module in model.named_modules():
        if getattr(module, "use_intel_amx_backend", False):
            raise WeightSyncError(
                f"{name}: its weight is packed for AMX in place, which a sync cannot write; "
                "run the server without AMX kernels"
            )


def _views(reader: ArenaReader, source: Source, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """The arena's tensors by local name, without a copy."""
    views = {}
    for name, (offset, shape) in source.tensors.items():
        num_bytes = torch.Size(shape).numel() * dtype.itemsize
        views[name] = reader.data[offset : offset + num_bytes].view(dtype).view(shape)
    return views


def _check_stamps(readers: Mapping[int, ArenaReader], stamp: str) -> None:
    for rank, reader in readers.items():
        if reader.stamp != stamp:
            raise WeightSyncError(
                f"the arena of learner rank {rank} is stamped {reader.stamp!r}, expected "
                f"{stamp!r}: its bytes are of another publish; refused"
            )


def _check_paddings(mine: RankLayout, parameters: Mapping[str, torch.Tensor]) -> None:
    for padding in mine.paddings:
        if torch.count_nonzero(parameters[padding.local][execute.slices(padding.box)]):
            raise WeightSyncError(f"{padding.local} {padding.box}: padding is not zero")


def _synchronize(parameters: Mapping[str, torch.Tensor]) -> None:
    """Wait until every device has done what it was asked."""
    for device in {tensor.device for tensor in parameters.values() if tensor.is_cuda}:
        torch.cuda.synchronize(device)


_RECEIVER = Receiver()


def load(model: torch.nn.Module, named_tensors: Sequence[tuple[str, object]]) -> None:
    """SGLang's custom weight loader: a message in, an acknowledgement out. Never raises."""
    try:
        message = decode(named_tensors)
        with torch.no_grad():
            ack = _RECEIVER.receive(model, message)
        _RECEIVER.acknowledge(message, ack)
        log.info(
            "weights received stamp=%s ok=%s copy_s=%.4f check_s=%.4f",
            message.stamp,
            ack.ok,
            ack.copy_s,
            ack.check_s,
        )
    except Exception:  # raising ends the server; the sender sees no acknowledgement and says so
        log.exception("weight sync failed without an acknowledgement")
