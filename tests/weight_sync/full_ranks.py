"""Learner ranks that bring the policy together, or write it to disk, without Megatron or SGLang."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megarl.actor.parameters import parameter_table
from megarl.actor.shape import ModelShape
from megarl.float8 import BlockScaling
from megarl.reshard.layout import Layout
from megarl.reshard.mesh import LearnerMesh
from megarl.reshard.placement import Device
from megarl.types import ServerEndpoint, SyncReport
from megarl.weight_sync import stock_routes
from megarl.weight_sync.checkpoint_files import CheckpointWriter
from megarl.weight_sync.control import WIRE_DTYPES, SourceSpec
from megarl.weight_sync.full import FullBucket, FullPolicy
from megarl.weight_sync.modes import ModalSync, ModeSettings
from megarl.weight_sync.places import Place
from megarl.weight_sync.probe import Probe
from megarl.weight_sync.sender import Sender
from megarl.weight_sync.session import WeightSync
from tests.weight_sync import independent_float8, tiny
from tests.weight_sync.forked import Ranks


@dataclass(frozen=True)
class Fault:
    """What goes wrong on learner rank `rank` before bucket `at` is sent: "break" loses its
    parameters; "kill" and "stop" end or halt the process group `pid`, which is a server's."""

    kind: str
    at: int
    rank: int = 0
    pid: int = 0


@dataclass(frozen=True)
class Policy:
    """Whose weights are brought together, and where they are."""

    shape: ModelShape
    mesh: LearnerMesh
    seed: int
    dtype: str = "fp32"
    float8: BlockScaling | None = None

    @property
    def fp8_block(self) -> tuple[int, int] | None:
        """Of the float8 weights that are sent."""
        return None if self.float8 is None else (self.float8.rows, self.float8.columns)


def stored(
    shape: ModelShape, seed: int, dtype: str, float8: bool = False
) -> dict[str, torch.Tensor]:
    """The checkpoint of `seed` under Hugging Face's names, by plain indexing, or by numpy."""
    if float8:
        return independent_float8.tensors(shape, seed)[0]
    tensors = tiny.weights(shape, seed)
    found = {}
    for parameter in parameter_table(shape):
        kept = torch.float32 if parameter.precision == "float32" else WIRE_DTYPES[dtype]
        whole = tensors[parameter.name].to(kept)
        for number, name in enumerate(parameter.stored_names()):
            found[name] = whole[number] if parameter.stacked else whole
    return found


def start(world: int) -> Ranks:
    """Learner ranks that serve orders: (name of a function here, policy, arguments)."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    return Ranks(_serve, [(rank, world, port) for rank in range(world)])


def _serve(pipe: Connection, rank: int, world: int, port: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world
    )
    while True:
        name, policy, arguments = pipe.recv()
        work: Callable[..., Any] = {
            "gather": _gather,
            "write": _write,
            "publish": _publish,
            "close": _close,
        }[name]
        try:
            pipe.send(work(rank, policy, *arguments))
        except Exception as error:  # noqa: BLE001 - told to the test
            pipe.send(f"{type(error).__name__}: {error}")


def _parameters(rank: int, policy: Policy) -> dict[str, torch.Tensor]:
    spec = SourceSpec(policy.shape, policy.mesh)
    return tiny.on_learner(spec, tiny.weights(policy.shape, policy.seed))[rank]


def _travelling(
    rank: int, policy: Policy, parameters: dict[str, torch.Tensor]
) -> tuple[Layout, Mapping[str, torch.Tensor]]:
    """What a rank sends, and its layout: its parameters, but for what is quantized."""
    source = SourceSpec(policy.shape, policy.mesh, float8=policy.float8)
    if policy.float8 is None:
        return source.layout(), parameters
    sender = Sender(f"full{os.getppid()}", source, rank, parameters, policy.dtype)
    sender.prepare()
    return sender.layout, sender.sent


def _gather(
    rank: int, policy: Policy, bucket_bytes: int, broken_rank: int = -1, most: int = 1 << 30
) -> dict[str, Any]:
    """What came to rank 0, and what this rank sent; `most` buckets are wanted."""
    parameters = _parameters(rank, policy)
    layout, tensors = _travelling(rank, policy, parameters)
    devices = [Device(0, i) for i in range(policy.mesh.size)]
    full = FullPolicy(
        policy.shape, layout, rank, tensors, policy.dtype,
        group=dist.group.WORLD, devices=devices, bucket_bytes=bucket_bytes,
        fp8_block=policy.fp8_block,
    )  # fmt: skip
    if rank == broken_rank:
        parameters.clear()
    wanted = stored(policy.shape, policy.seed, policy.dtype, policy.float8 is not None)
    sent, seen, wrong = 0, [], []
    earlier: list[weakref.ref[torch.Tensor]] = []
    send = dist.send

    def counted(tensor: torch.Tensor, **to: Any) -> None:
        nonlocal sent
        sent += tensor.numel() * tensor.itemsize
        send(tensor, **to)

    dist.send = counted
    try:
        for bucket, data in full.stream(lambda: len(seen) < most):
            seen.append([tensor.name for tensor in bucket.tensors])
            if data is not None:
                wrong += [f"{ref} is held" for ref in earlier if ref() is not None]
                earlier.append(weakref.ref(data))
                for name, view in bucket.views(data).items():
                    mine, theirs = view.flatten(), wanted[name].flatten()
                    if mine.dtype != theirs.dtype or not torch.equal(
                        mine.view(torch.uint8), theirs.contiguous().view(torch.uint8)
                    ):
                        wrong.append(name)
            del data
    finally:
        dist.send = send
    return {"sent": sent, "seen": seen, "wrong": wrong}


def _write(
    rank: int, policy: Policy, folder: Path, model: Path, shard_bytes: int, broken_rank: int = -1
) -> bool:
    parameters = _parameters(rank, policy)
    layout, tensors = _travelling(rank, policy, parameters)
    writer = CheckpointWriter(
        policy.shape, layout, rank, tensors, policy.dtype, model, dist.group.WORLD, shard_bytes,
        fp8_block=policy.fp8_block,
    )  # fmt: skip
    if rank == broken_rank:
        parameters.clear()
    writer.write(folder)
    return folder.is_dir()


_LIVE: dict[str, Any] = {}


def _publish(
    rank: int,
    policy: Policy,
    settings: ModeSettings,
    version: int,
    servers: list[ServerEndpoint],
    probe: Probe,
    fault: Fault | None,
) -> SyncReport:
    """One publish by the modes' dispatcher, which is kept while its settings stay the same."""
    parameters = _LIVE.setdefault("parameters", {})
    parameters.clear()
    parameters.update(_parameters(rank, policy))
    _LIVE["probe"] = probe
    if _LIVE.get("settings") != settings:
        _close(rank, policy)
        _LIVE["settings"] = settings
        source = SourceSpec(policy.shape, policy.mesh, float8=policy.float8)
        exact = WeightSync(
            f"modes{os.getppid()}_{version}", source, rank, parameters, policy.dtype,
            group=dist.group.WORLD, cpu_servers=True, deadline_s=settings.deadline_s,
            place=Place("a", rank), bucket_bytes=settings.bucket_bytes,
            probe=lambda: _LIVE["probe"],
        )  # fmt: skip
        _LIVE["sync"] = ModalSync(
            exact, source, rank, parameters, policy.dtype, group=dist.group.WORLD,
            host="127.0.0.1", settings=settings, score=lambda: _LIVE["probe"],
        )  # fmt: skip
    with _faulty(rank, parameters, fault):
        report: SyncReport = _LIVE["sync"].publish(version, servers)
    return report


def _close(rank: int, policy: Policy | None) -> None:
    sync = _LIVE.pop("sync", None)
    if sync is not None:
        sync.close()


@contextlib.contextmanager
def _faulty(rank: int, parameters: dict[str, torch.Tensor], fault: Fault | None) -> Iterator[None]:
    if fault is None or fault.rank != rank:
        yield
        return
    kept = {route: route.send for route in (stock_routes.BroadcastRoute, stock_routes.RequestRoute)}
    own = FullPolicy._own

    def send(route: Any, calls: Any, bucket: FullBucket, *more: Any) -> None:
        if bucket.number == fault.at:
            os.killpg(fault.pid, {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}[fault.kind])
        kept[type(route)](route, calls, bucket, *more)

    def lost(policy: FullPolicy, bucket: FullBucket) -> Any:
        parameters.clear()
        return own(policy, bucket)

    if fault.kind == "break":
        FullPolicy._own = lost  # type: ignore[method-assign]
    else:
        for route in kept:
            route.send = send  # type: ignore[method-assign]
    try:
        yield
    finally:
        FullPolicy._own = own  # type: ignore[method-assign]
        for route, whole in kept.items():
            route.send = whole  # type: ignore[method-assign]
