"""Learner ranks and server ranks in processes of their own, without Megatron or SGLang: they start
fast.

A fork server imports torch once. Ranks are told where they run, so that one machine stands for
several nodes; a server's HTTP side is a thread of the test, its ranks run megarl's real receiver.
"""

from __future__ import annotations

import base64
import contextlib
import json
import multiprocessing
import os
import pickle
import signal
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megarl.reshard.mesh import LearnerMesh, ServerMesh
from megarl.reshard.placement import Device
from megarl.reshard.plan import Plan, make_plan
from megarl.reshard.sglang import sglang_layout
from megarl.types import ServerEndpoint, SyncReport
from megarl.weight_sync import acks, packing, receiver
from megarl.weight_sync.acks import Ack
from megarl.weight_sync.control import SourceSpec
from megarl.weight_sync.places import Place, learner_devices, placement, server_devices
from megarl.weight_sync.session import WeightSync
from megarl.weight_sync.transport.p2p import Transfer
from tests.weight_sync import tiny
from tests.weight_sync.tiny import SHAPE, FakeModel

BUCKET_BYTES = 16 << 10
ANSWER_S = 60.0

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload([__name__])

Fault = tuple[str, int]
"""What goes wrong, and with which of the rank's messages of one sync: see `faulty`."""


def faulty(transfers: list[Transfer], fault: Fault) -> list[Transfer]:
    """The transfers of one sync: one is dropped, doubled, changed, or ends or stops the process."""
    kind, at = fault
    if kind == "drop":
        return transfers[:at] + transfers[at + 1 :]
    if kind == "double":
        return [*transfers[: at + 1], transfers[at], *transfers[at + 1 :]]
    whole = transfers[at].buffer

    def buffer() -> torch.Tensor:
        if kind == "change":
            changed = whole().clone()
            changed.view(torch.int32)[-1] ^= 1
            return changed
        os.kill(os.getpid(), {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}[kind])
        return whole()

    return [*transfers[:at], replace(transfers[at], buffer=buffer), *transfers[at + 1 :]]


@contextlib.contextmanager
def fault_in(name: str, fault: Fault | None) -> Any:
    """`packing.<name>` with a fault, for one sync."""
    kept: Callable[..., list[Transfer]] = getattr(packing, name)
    if fault is not None:
        setattr(packing, name, lambda *args: faulty(kept(*args), fault))
    try:
        yield
    finally:
        setattr(packing, name, kept)


def census() -> dict[str, int]:
    """What a process holds open, once what is ending has ended."""
    threads = []
    for _ in range(10):
        threads.append(len(os.listdir("/proc/self/task")))
        time.sleep(0.01)
    return {
        "files": len(os.listdir("/proc/self/fd")),
        "threads": min(threads),
        "shared": len(list(Path("/dev/shm").glob(f"megarl_{run_id(os.getppid(), '*')}_*"))),
    }


def run_id(server_pid: int | str, port: int | str) -> str:
    """What the arenas of a learner are called; all ranks are children of one fork server."""
    return f"forked{server_pid}-{port}"


class Ranks:
    """Processes that serve orders over a pipe each."""

    def __init__(self, target: Callable[..., None], arguments: Sequence[tuple[Any, ...]]) -> None:
        self.pipes: list[Connection] = []
        self.processes: list[BaseProcess] = []
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

    def answers(self) -> list[Any]:
        """Every rank's answer; None of one that has ended."""
        found: list[Any] = []
        for pipe in self.pipes:
            try:
                assert pipe.poll(ANSWER_S), "a rank does not answer"
                found.append(pipe.recv())
            except (EOFError, OSError):
                found.append(None)
        return found

    def ask(self, order: Any) -> list[Any]:
        self.tell([order] * len(self.pipes))
        return self.answers()

    def kill(self) -> None:
        for process in self.processes:
            process.kill()
            process.join()
        for pipe in self.pipes:
            pipe.close()


class Learner:
    """Learner ranks at `places`."""

    def __init__(
        self, mesh: LearnerMesh, places: Sequence[Place], deadline_s: float = 30.0
    ) -> None:
        with socket.create_server(("127.0.0.1", 0)) as probe:
            port = probe.getsockname()[1]
        self.mesh, self.places = mesh, tuple(places)
        self.ranks = Ranks(
            _learner_rank,
            [(rank, port, mesh, self.places, deadline_s) for rank in range(len(places))],
        )
        self.port = port

    def publish(
        self, seed: int, version: int, servers: Sequence[Server], fault: Fault | None = None,
        faulty_rank: int = 0,
    ) -> list[SyncReport | str | None]:  # fmt: skip
        """Every rank's report of one publish of the weights of `seed`, or its error."""
        endpoints = [server.endpoint for server in servers]
        ranks = range(len(self.places))
        faults = [fault if rank == faulty_rank else None for rank in ranks]
        self.ranks.tell([("publish", seed, version, endpoints, faults[rank]) for rank in ranks])
        return self.ranks.answers()

    def plan(self, server: Server) -> Plan:
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


class Server:
    """A server's HTTP side, and its ranks on `nodes`."""

    def __init__(self, name: str, nodes: Sequence[str], gpus: Sequence[int] = ()) -> None:
        self.web = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
        self.web.daemon_threads = True
        self.web.owner = self  # type: ignore[attr-defined]
        self.thread = threading.Thread(target=self.web.serve_forever, args=(0.01,), daemon=True)
        self.thread.start()
        url = f"http://127.0.0.1:{self.web.server_port}"
        self.endpoint = ServerEndpoint(
            name, url, len(nodes), 0, nodes=tuple(nodes), gpus=tuple(gpus)
        )
        self.faults: list[Fault | None] = [None] * len(nodes)
        self.version, self.is_open = "", False
        self.acks: list[Ack | None] = []
        self._start()

    def _start(self) -> None:
        tp = self.endpoint.tp
        self.ranks = Ranks(_server_rank, [(rank, tp) for rank in range(tp)])

    def restart(self) -> None:
        """Kill the ranks and start new ones, as another incarnation."""
        self.ranks.kill()
        self.endpoint = replace(self.endpoint, incarnation=self.endpoint.incarnation + 1)
        self.faults = [None] * self.endpoint.tp
        self.is_open = False
        self._start()

    def handle(self, route: str, body: dict[str, Any]) -> tuple[int, str] | None:
        """The answer to a call; None where the server has died of it."""
        if route == "/begin_weight_update":
            if self.is_open:
                return 400, "already open"
            self.is_open = True
        elif route == "/end_weight_update":
            self.is_open = False
        elif route == "/update_weight_version":
            self.version = body["new_version"]
        else:
            payloads = body["serialized_named_tensors"]
            self.ranks.tell([("load", p, f) for p, f in zip(payloads, self.faults, strict=True)])
            self.acks = self.ranks.answers()
            if None in self.acks:
                return None
        return 200, "{}"

    def holds(self, seed: int) -> bool:
        """Whether every rank holds exactly its slices of the weights of `seed`."""
        wanted = tiny.on_server(SHAPE, self.endpoint.tp, tiny.weights(SHAPE, seed))
        return self.ranks.ask(("sums",)) == [
            {name: tiny.sha256(tensor) for name, tensor in mine.items()} for mine in wanted
        ]

    def close(self) -> None:
        self.ranks.kill()
        self.web.shutdown()
        self.web.server_close()
        self.thread.join()


class _Handler(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        owner: Server = self.server.owner  # type: ignore[attr-defined]
        answer = owner.handle(self.path, body)
        if answer is None:
            self.close_connection = True
            return
        self.send_response(answer[0])
        self.send_header("Content-Length", str(len(answer[1])))
        self.end_headers()
        with contextlib.suppress(OSError):  # the caller has given up
            self.wfile.write(answer[1].encode())

    def log_message(self, *_: object) -> None:
        """Says nothing."""


def _mesh(tp: int) -> ServerMesh:
    return ServerMesh(tp, cpu=True)


def _learner_rank(
    pipe: Connection,
    rank: int,
    port: int,
    mesh: LearnerMesh,
    places: tuple[Place, ...],
    limit_s: float,
) -> None:
    world = len(places)
    dist.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world
    )
    spec = SourceSpec(SHAPE, mesh)
    parameters = tiny.on_learner(spec, tiny.weights(SHAPE, 0))[rank]
    sync = WeightSync(
        run_id(os.getppid(), port), spec, rank, parameters, "fp32",
        group=dist.group.WORLD, cpu_servers=True, deadline_s=limit_s, place=places[rank],
        bucket_bytes=BUCKET_BYTES,
    )  # fmt: skip
    while True:
        name, *arguments = pipe.recv()
        if name == "publish":
            seed, version, servers, fault = arguments
            new = tiny.on_learner(spec, tiny.weights(SHAPE, seed))[rank]
            for parameter, tensor in new.items():
                parameters[parameter].copy_(tensor)
            try:
                with fault_in("outgoing", fault):
                    pipe.send(sync.publish(version, servers))
            except Exception as error:  # noqa: BLE001 - told to the test
                pipe.send(f"{type(error).__name__}: {error}")
        elif name == "census":
            keys = sync._board.num_keys if sync._board else 0
            pipe.send({**census(), "keys": keys})
        else:
            sync.close()
            pipe.send(True)


def _server_rank(pipe: Connection, rank: int, tp: int) -> None:
    model = FakeModel(sglang_layout(SHAPE, _mesh(tp)), rank, torch.float32)
    said: list[Ack] = []
    told = receiver.Receiver.acknowledge

    def acknowledge(self: receiver.Receiver, message: Any, ack: Ack) -> None:
        said.append(ack)
        told(self, message, ack)

    receiver.Receiver.acknowledge = acknowledge  # type: ignore[method-assign]
    acks._CONNECT_S = 5.0
    while True:
        name, *arguments = pipe.recv()
        if name == "load":
            payload, fault = arguments
            with fault_in("incoming", fault):
                receiver.load(model, pickle.loads(base64.b64decode(payload)))
            pipe.send(said.pop())
        elif name == "sums":
            pipe.send({k: tiny.sha256(v) for k, v in model.named_parameters()})
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
