"""Learner ranks and server ranks in processes of their own, without Megatron or SGLang: they start
fast.

A fork server imports torch once. Ranks are told where they run, so that one machine stands for
several nodes; a server's HTTP side is a thread of the test, its ranks run megarl's real receiver.
"""

from __future__ import annotations

import base64
import contextlib
import multiprocessing
import os
import pickle
import re
import socket
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megarl.reshard.execute import held
from megarl.reshard.mesh import LearnerMesh, ServerMesh
from megarl.reshard.placement import Device
from megarl.reshard.plan import Plan, make_plan
from megarl.reshard.sglang import sglang_layout
from megarl.types import SyncReport
from megarl.weight_sync import coverage, receiver
from megarl.weight_sync.acks import Ack
from megarl.weight_sync.checksum import box_checksum
from megarl.weight_sync.control import SourceSpec
from megarl.weight_sync.places import Place, learner_devices, placement, server_devices
from megarl.weight_sync.probe import Probe
from megarl.weight_sync.session import WeightSync
from megarl.weight_sync.transport import stores
from tests.weight_sync import fake_server, tiny
from tests.weight_sync.faults import Fault, in_learner_rank, in_server_rank
from tests.weight_sync.open_files import open_files
from tests.weight_sync.rig import moved
from tests.weight_sync.tiny import SHAPE, FakeModel

BUCKET_BYTES = 16 << 10
ANSWER_S = 60.0
GROUP_S = 60.0  # for learner ranks to wait for each other

Answers = list[SyncReport | str | None]

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload([__name__])


def census() -> dict[str, Any]:
    """What a process holds open, once what is ending has ended."""
    threads = []
    for _ in range(10):
        threads.append(len(os.listdir("/proc/self/task")))
        time.sleep(0.01)
    return {
        "files": len(os.listdir("/proc/self/fd")),
        "threads": min(threads),
        "own_kib": _own_kib(),
        "open": open_files(),
    }


def _own_kib() -> int:
    """This process's own memory, without what it shares."""
    found = re.search(r"RssAnon:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1])


def run_id(server_pid: int | str, port: int | str) -> str:
    """What the arenas of a learner are called; all ranks are children of one fork server."""
    return f"forked{server_pid}-{port}"


class Ranks:
    """Processes that serve orders over a pipe each."""

    def __init__(self, target: Callable[..., None], arguments: Sequence[tuple[Any, ...]]) -> None:
        self.heard: dict[int, Any] = {}  # by rank, of the answers that are waited for
        self.pipes: list[Connection] = []
        self.processes: list[BaseProcess] = []
        self._reading = threading.Lock()
        for mine in arguments:
            here, there = _context.Pipe()
            process = _context.Process(target=target, args=(there, *mine), daemon=True)
            process.start()
            there.close()
            self.pipes.append(here)
            self.processes.append(process)

    def tell(self, orders: Sequence[Any]) -> None:
        for pipe, order in zip(self.pipes, orders, strict=True):
            with contextlib.suppress(OSError):  # it has ended
                pipe.send(order)

    def answers(self, all_or_none: bool = False) -> list[Any]:
        """Every rank's answer; None of one that has ended. With `all_or_none` one that ends takes
        the others along."""
        with self._reading:
            return self._answers(all_or_none)

    def _answers(self, all_or_none: bool) -> list[Any]:
        self.heard = found = dict[int, Any]()
        until = time.monotonic() + ANSWER_S
        while len(found) < len(self.pipes):
            waiting = {pipe: rank for rank, pipe in enumerate(self.pipes) if rank not in found}
            try:
                ready = wait(list(waiting), max(0.0, until - time.monotonic()))
            except (OSError, ValueError):  # killed before
                return [None] * len(self.pipes)
            assert ready, f"ranks {sorted(waiting.values())} do not answer"
            for pipe in ready:
                assert isinstance(pipe, Connection)
                try:
                    found[waiting[pipe]] = pipe.recv()
                except (EOFError, OSError, ValueError):
                    found[waiting[pipe]] = None
                    if all_or_none:
                        self._end()
        return [found[rank] for rank in range(len(self.pipes))]

    def ask(self, order: Any) -> list[Any]:
        self.tell([order] * len(self.pipes))
        return self.answers()

    def _end(self) -> None:
        """Kill all, and wait: the fork server may be late to say of one that it has ended."""
        for process in self.processes:
            process.kill()
            process.join()

    def kill(self) -> None:
        """End all. Who waits for answers meanwhile learns that none come, before the pipes go:
        their file numbers may be those of the next ranks' pipes."""
        self._end()
        with self._reading:
            for pipe in self.pipes:
                pipe.close()


class Learner:
    """Learner ranks at `places`."""

    def __init__(
        self,
        mesh: LearnerMesh,
        places: Sequence[Place],
        deadline_s: float = 30.0,
        shares: bool = False,
    ) -> None:
        """Where it `shares`, the ranks' parameters lie in shared memory."""
        with socket.create_server(("127.0.0.1", 0)) as probe:
            port = probe.getsockname()[1]
        self.mesh, self.places, self.limit_s = mesh, tuple(places), deadline_s
        self.probe_of: Callable[[int], Probe] = tiny.probe
        self.ranks = Ranks(
            _learner_rank, [(rank, port, mesh, self.places, shares) for rank in range(len(places))]
        )
        self.port = port

    def publish(
        self,
        seed: int,
        version: int,
        servers: Sequence[fake_server.Server],
        fault: Fault | None = None,
        faulty_rank: int = 0,
        limit_s: float | None = None,
    ) -> Answers:
        """Every rank's report of one publish of the weights of `seed`, or its error."""
        self.begin(seed, version, servers, fault, faulty_rank, limit_s)
        return self.ranks.answers()

    def begin(
        self,
        seed: int,
        version: int,
        servers: Sequence[fake_server.Server],
        fault: Fault | None = None,
        faulty_rank: int = 0,
        limit_s: float | None = None,
    ) -> None:
        """Tell every rank to publish; `ranks.answers()` waits for what they say."""
        endpoints = [server.endpoint for server in servers]
        faults = [fault if rank == faulty_rank else None for rank in range(len(self.places))]
        limit_s = self.limit_s if limit_s is None else limit_s
        order = ("publish", seed, version, endpoints)
        probe = self.probe_of(seed)
        self.ranks.tell([(*order, each, limit_s, probe) for each in faults])

    def plan(self, server: fake_server.Server) -> Plan:
        """The plan to one server, made here."""
        layout = SourceSpec(SHAPE, self.mesh).layout()
        devices = server_devices(server.endpoint, self.places)
        where = placement(learner_devices(self.places), devices)
        return make_plan(layout, sglang_layout(SHAPE, _mesh(server.endpoint.tp)), where, 4)

    @property
    def shared(self) -> list[str]:
        """Its arenas."""
        return [path.name for path in Path("/dev/shm").glob(f"megarl_{run_id('*', self.port)}_*")]

    def close(self) -> None:
        """End the ranks as they are, and remove what a killed one cannot."""
        self.ranks.kill()
        for name in self.shared:
            (Path("/dev/shm") / name).unlink()


class Server(fake_server.Server):
    """A fake server whose ranks are forked processes on `nodes`."""

    def __init__(self, name: str, nodes: Sequence[str], gpus: Sequence[int] = ()) -> None:
        super().__init__(name, nodes, _start_server_ranks, gpus)


def _start_server_ranks(tp: int) -> Ranks:
    return Ranks(_server_rank, [(rank, tp) for rank in range(tp)])


def _mesh(tp: int) -> ServerMesh:
    return ServerMesh(tp, cpu=True)


def _learner_rank(
    pipe: Connection,
    rank: int,
    port: int,
    mesh: LearnerMesh,
    places: tuple[Place, ...],
    shares: bool,
) -> None:
    world = len(places)
    dist.init_process_group(
        "gloo",
        init_method=f"tcp://127.0.0.1:{port}",
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=GROUP_S),
    )
    spec = SourceSpec(SHAPE, mesh)
    parameters, probe = tiny.on_learner(spec, tiny.weights(SHAPE, 0))[rank], tiny.probe(0)
    memory = moved(run_id(os.getppid(), port), rank, parameters) if shares else None
    sync = WeightSync(
        run_id(os.getppid(), port), spec, rank, parameters, "fp32",
        group=dist.group.WORLD, cpu_servers=True, place=places[rank], bucket_bytes=BUCKET_BYTES,
        memory=memory, probe=lambda: probe,
    )  # fmt: skip
    while True:
        name, *arguments = pipe.recv()
        if name == "publish":
            seed, version, servers, fault, sync._deadline_s, probe = arguments
            new = tiny.on_learner(spec, tiny.weights(SHAPE, seed))[rank]
            for parameter, tensor in new.items():
                parameters[parameter].copy_(tensor)
            try:
                with in_learner_rank(fault, parameters):
                    pipe.send(sync.publish(version, servers))
            except Exception as error:  # noqa: BLE001 - told to the test
                pipe.send(f"{type(error).__name__}: {error}")
        elif name == "census":
            keys = sync._board.num_keys if sync._board else 0
            pipe.send({**census(), "keys": keys})
        else:
            sync.close()
            if memory is not None:
                memory.close()
            pipe.send(True)


def _server_rank(pipe: Connection, rank: int, tp: int) -> None:
    layout = sglang_layout(SHAPE, _mesh(tp))
    model = FakeModel(layout, rank, torch.float32)
    shapes = {parameter.name: parameter.shape for parameter in layout.parameters}
    said: list[Ack] = []
    told = receiver.Receiver.acknowledge

    def acknowledge(self: receiver.Receiver, message: Any, ack: Ack) -> None:
        said.append(ack)
        told(self, message, ack)

    receiver.Receiver.acknowledge = acknowledge  # type: ignore[method-assign]
    stores.CONNECT_S = 5.0
    receiver._RECEIVER._engine_rank = lambda: rank
    while True:
        name, *arguments = pipe.recv()
        if name == "load":
            payload, fault = arguments
            said.clear()
            with in_server_rank(fault):
                receiver.load(model, pickle.loads(base64.b64decode(payload)))
            pipe.send(said[-1] if said else "nothing")
        elif name == "sums":
            pipe.send({k: tiny.sha256(v) for k, v in model.named_parameters()})
        elif name == "poison":
            values = list(dict(model.named_parameters()).values())
            tensor = values[arguments[0] % len(values)].detach().view(-1)
            tensor[arguments[0] % tensor.numel()] += 1.0
            pipe.send(True)
        elif name == "sums64":
            live = {name: p.detach() for name, p in model.named_parameters()}
            pipe.send(
                [
                    box_checksum(held(piece, live), piece.tensor, shapes[piece.tensor], piece.box)
                    for piece in coverage.held(layout)[rank]
                ]
            )
        else:
            pipe.send(census())


def apart(learner: int, *servers: int) -> tuple[list[Place], list[tuple[str, ...]]]:
    """Learner ranks on node "a", servers of so many ranks each on a node of its own."""
    places = [Place("a", rank) for rank in range(learner)]
    return places, [(f"s{i}",) * tp for i, tp in enumerate(servers)]


def distinct_bytes() -> int:
    """Bytes of the policy in fp32."""
    return sum(tensor.numel() for tensor in tiny.weights(SHAPE, 0).values()) * 4


__all__ = ["Device", "Learner", "Place", "Server", "apart", "distinct_bytes"]
