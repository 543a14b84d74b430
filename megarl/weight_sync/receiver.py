"""The receiving side of a weight sync, in every TP rank's scheduler process of an SGLang server.

SGLang calls `load` (its --custom-weight-loader) inside an update request. Owns the order of one
sync and the checksums of what is in the live parameters afterwards; how weights come in is
`inflow`'s. Imports torch and megarl's pure folders only: neither sglang nor megatron. It never
raises: an exception in an update ends the whole server. What goes wrong is said in the
acknowledgement.
"""

from __future__ import annotations

import logging
import os
import socket
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from megarl.errors import WeightSyncError, in_words
from megarl.reshard import execute
from megarl.reshard.layout import Piece, RankLayout
from megarl.weight_sync import parts
from megarl.weight_sync.acks import Ack
from megarl.weight_sync.checksum_triton import BoxValues
from megarl.weight_sync.control import ControlMessage, decode
from megarl.weight_sync.inflow import ArenaInflow, Inflow, MessageInflow
from megarl.weight_sync.live_sums import LiveSums
from megarl.weight_sync.parcels import server_member
from megarl.weight_sync.route import Route, make_route
from megarl.weight_sync.transport import stores
from megarl.weight_sync.transport.meeting import bounded

log = logging.getLogger(__name__)

KV_CACHE_SCALES = (".k_scale", ".v_scale")
"""Ends of names of parameters that SGLang gives an attention in a quantized model. They scale the
KV cache, no policy has them, and checkpoints without them leave them unset."""
_ALONE = "alone"
_REMEMBERED = 256  # syncs of which a second delivery is known
_ENDING_S = 10.0  # after a rank's own waiting: until its sender has made its last call


def engine_rank() -> int | None:
    """This process's TP rank as SGLang has it; None outside of SGLang.

    Source: sglang 0.5.23, deserialize_own_rank in managers/tp_worker.py.
    """
    context = sys.modules.get("sglang.srt.runtime_context")
    return None if context is None else int(context.get_parallel().tp_rank)


class Receiver:
    """What one server rank keeps between syncs: its part of the plan, its inflows, the store."""

    def __init__(self, engine_rank: Callable[[], int | None] = engine_rank) -> None:
        self._engine_rank = engine_rank
        self._route: Route | None = None
        self._sums = LiveSums(parts.num_threads())
        self._inflows: tuple[Inflow, ...] = (ArenaInflow(), MessageInflow())
        self._store: tuple[tuple[str, int], TCPStore] | None = None
        self._last: tuple[ControlMessage, float] | None = None
        self._taken: deque[str] = deque(maxlen=_REMEMBERED)

    def is_new(self, message: ControlMessage) -> bool:
        """Whether it has not been handed to this rank before.

        What is delivered once more is over: its learner does not come, and waiting for it would
        hold up the server.
        """
        if message.token in self._taken:
            return False
        self._taken.append(message.token)
        return True

    def receive(self, model: torch.nn.Module, message: ControlMessage) -> Ack:
        """Carry out one sync and say how it went. Raises nothing but what ends a process."""
        try:
            ack = self._sync(model, message)
            for inflow in self._inflows:
                inflow.let_go()
            return ack
        except Exception as error:  # noqa: BLE001 - raising ends the server
            log.warning("weight sync refused stamp=%s error=%s", message.stamp, error)
            text = in_words(error)
            for inflow in self._inflows:
                inflow.refuse(message, text)
                inflow.let_go()
            return Ack(message.token, False, text, host=socket.gethostname(), pid=os.getpid())

    def acknowledge(self, message: ControlMessage, ack: Ack) -> None:
        """Write the acknowledgement where the sender looks for it, unless that hangs."""

        def write() -> None:
            if self._store is None or self._store[0] != message.store:
                self._store = (message.store, stores.connect(message.store))
            self._store[1].set(message.ack_key, ack.to_json())

        try:
            bounded(write, time.monotonic() + stores.CONNECT_S, server_member(message.tp_rank))
        except Exception:
            self._store = None  # the next sync connects anew
            raise

    def _sync(self, model: torch.nn.Module, message: ControlMessage) -> Ack:
        start = time.perf_counter()
        until = time.monotonic() + message.wait_s
        self._check_rank(message)
        self._check_alone(message)
        self._last = (message, until + _ENDING_S)
        route = self._find_route(message)
        parameters = live_tensors(model, route)
        device = next(iter(parameters.values())).device
        for inflow in self._inflows:
            inflow.open(message, route, device, until)
        _synchronize(parameters)  # no forward pass is still reading them
        for inflow in self._inflows:
            inflow.fill(parameters, until)
        execute.clear_paddings(route.mine, parameters)
        derive_weights(model)
        _synchronize(parameters)
        copied = time.perf_counter()
        for inflow in self._inflows:
            inflow.check(message)
        _check_paddings(route.mine, parameters)
        box_of = partial(_sent, tensors=parameters, route=route)
        sums = self._sums.of(route.pieces, parameters, box_of, route.digest).totals
        moved: dict[str, int] = {}
        for inflow in self._inflows:
            moved.update(inflow.moved_bytes)
        return Ack(
            message.token,
            True,
            "",
            sums,
            socket.gethostname(),
            os.getpid(),
            copied - start,
            time.perf_counter() - copied,
            moved,
        )

    def _check_rank(self, message: ControlMessage) -> None:
        mine = self._engine_rank()
        if mine is not None and mine != message.tp_rank:
            raise WeightSyncError(
                f"TP rank {mine} got the message of TP rank {message.tp_rank}; refused: it would "
                "hold another rank's part"
            )

    def _check_alone(self, message: ControlMessage) -> None:
        """Raise WeightSyncError where another learner is in the middle of a sync of this server.

        It would call what this one has written its own. What the first rank finds holds for all:
        the other sync may end between two ranks' looks at it.
        """
        if self._last is None or self._last[0].store == message.store:
            return
        last, over = self._last
        found = _ALONE
        if time.monotonic() < over and _is_busy(last):
            found = (
                f"the learner of run {last.run_id} at {last.store[0]}:{last.store[1]} is syncing "
                f"this server to version {last.version}; refused: end one of the two learners"
            )

        def agree() -> str:
            store = stores.connect(message.store)
            return str(store.compare_set(message.alone_key, "", found).decode())

        agreed = bounded(agree, time.monotonic() + stores.CONNECT_S, server_member(message.tp_rank))
        if agreed != _ALONE:
            raise WeightSyncError(agreed)

    def _find_route(self, message: ControlMessage) -> Route:
        """The cached part of the plan, or a new one where the message is of another."""
        key = f"{message.plan_digest} {message.dtype} {message.tp_rank} {message.bucket_bytes}"
        if self._route is None or self._route.digest != key:
            self._route = make_route(message, key)
        return self._route


def _is_busy(message: ControlMessage) -> bool:
    """Whether the sender of `message` still has calls to make; also where it hangs."""

    def check() -> bool:
        socket.create_connection(message.store).close()  # refused at once where it has ended
        return bool(stores.connect(message.store).check([message.busy_key]))

    try:
        return bounded(check, time.monotonic() + stores.CONNECT_S, "its learner")
    except WeightSyncError:
        return True
    except (OSError, RuntimeError):
        return False


def live_tensors(model: torch.nn.Module, route: Route) -> dict[str, torch.Tensor]:
    """The model's parameters and buffers that the sync fills, by name.

    Raises WeightSyncError where they are not those of the layout, one and all: only a buffer may be
    one that the policy does not know (a table of rotary angles), and scales of the KV cache.
    """
    expected = route.expected
    parameters = {
        name: parameter
        for name, parameter in model.named_parameters()
        if not name.endswith(KV_CACHE_SCALES)
    }
    found = {**dict(model.named_buffers()), **parameters}
    unknown, missing = parameters.keys() - expected.keys(), expected.keys() - found.keys()
    if unknown or missing:
        raise WeightSyncError(
            f"the server's parameters are not those of its layout: unknown {sorted(unknown)[:3]}, "
            f"missing {sorted(missing)[:3]}; this engine version or setting is not supported"
        )
    for name, (shape, dtype) in expected.items():
        mine = found[name]
        if tuple(mine.shape) != shape or mine.dtype != dtype:
            raise WeightSyncError(
                f"{name} is {tuple(mine.shape)} {mine.dtype} on the server, expected {shape} "
                f"{dtype}; give learner and rollout one model, tp and number format"
            )
    _check_unpacked(model)
    return {name: found[name].detach() for name in expected}


def derive_weights(model: torch.nn.Module) -> None:
    """Have the model work out anew what it derives from its weights, as SGLang's loaders do.

    Latent attention keeps two parts of kv_b_proj transposed besides. SGLang takes a custom loader
    for one that has called this itself. Source: sglang 0.5.23, post_load_weights in
    model_loader/loader.py and end_weight_update in managers/scheduler_components.
    """
    step = getattr(model, "post_load_weights", None)
    if step is not None:
        step()


def _sent(piece: Piece, tensors: Mapping[str, torch.Tensor], route: Route) -> BoxValues:
    """What one piece now is, in the type in which it travels.

    Raises WeightSyncError where the server's wider type holds what that type cannot.
    """
    values = execute.held(piece, tensors)
    sent = values.to(route.wire.of(piece.tensor))
    if sent.dtype != values.dtype and not torch.equal(sent.to(values.dtype), values):
        raise WeightSyncError(
            f"{piece.tensor} {piece.box}: the server holds {values.dtype} values that did not "
            f"come as {sent.dtype}; nothing else may write to {piece.local}"
        )
    return BoxValues(sent, piece.tensor, route.shapes[piece.tensor], piece.box)


def _check_unpacked(model: torch.nn.Module) -> None:
    for name, module in model.named_modules():
        if vars(module).get("use_intel_amx_backend"):
            raise WeightSyncError(
                f"{name}: its weight is packed for AMX in place, which a sync cannot write; "
                "run the server without AMX kernels"
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
        if not _RECEIVER.is_new(message):
            log.warning("update delivered again, nothing done stamp=%s", message.stamp)
            return
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
