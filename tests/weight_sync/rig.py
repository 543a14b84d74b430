"""Sender and receiver in one process, over real arenas, without a server: what tests drive."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from megarl.reshard.engine_tensors import float32_on_server
from megarl.reshard.mesh import ServerMesh
from megarl.weight_sync import coverage
from megarl.weight_sync.acks import Ack
from megarl.weight_sync.checksum import add
from megarl.weight_sync.control import WIRE_DTYPES, ControlMessage, SourceSpec, stamp
from megarl.weight_sync.places import ServerKind
from megarl.weight_sync.receiver import Receiver
from megarl.weight_sync.sender import Sender
from megarl.weight_sync.transport.in_place import live_memory
from megarl.weight_sync.transport.shared import Arena
from tests.weight_sync import tiny
from tests.weight_sync.tiny import FakeModel, Tensors

_RUNS = itertools.count()


class Rig:
    """All learner ranks and all ranks of one server, standing in one process."""

    def __init__(
        self,
        source: SourceSpec,
        mesh: ServerMesh,
        dtype: str = "fp32",
        server_dtype: str = "",
        models: Sequence[Any] = (),
        weights: Callable[[int], tiny.Tensors] | None = None,
        shares: bool = False,
    ) -> None:
        """`models` are those of the server's ranks, else stand-ins; `weights` makes a seed's.

        Where it `shares`, the learner's parameters lie in shared memory.
        """
        self.source, self.mesh, self.dtype = source, mesh, dtype
        self.weights = weights or partial(tiny.weights, source.shape)
        self.kind = ServerKind(mesh)
        self.run_id = f"test{os.getpid()}_{next(_RUNS)}"
        self.learner = tiny.on_learner(source, self.weights(0))
        self.memories = [
            moved(self.run_id, rank, parameters) if shares else None
            for rank, parameters in enumerate(self.learner)
        ]
        self.senders = [
            Sender(self.run_id, source, rank, parameters, dtype, memory=memory)
            for rank, (parameters, memory) in enumerate(
                zip(self.learner, self.memories, strict=True)
            )
        ]
        layout = self.senders[0].route(self.kind).destination
        served = WIRE_DTYPES[server_dtype or dtype]
        self.models: list[Any] = list(models) or [
            FakeModel(layout, rank, served, float32_on_server(source.shape, layout, rank))
            for rank in range(mesh.tp)
        ]
        self.receivers = [Receiver(lambda: None) for _ in range(mesh.tp)]

    def learn(self, seed: int) -> None:
        """New weights on the learner, in place."""
        new = tiny.on_learner(self.source, self.weights(seed))
        for mine, theirs in zip(self.learner, new, strict=True):
            for name, tensor in mine.items():
                tensor.copy_(theirs[name])

    def messages(self, version: int, generation: int = 0) -> list[ControlMessage]:
        """Stage, and say so to every server rank."""
        for sender in self.senders:
            sender.prepare()
        refs = {
            rank: sender.stage(self.kind, generation, stamp(version, "a"))
            for rank, sender in enumerate(self.senders)
        }
        return [
            ControlMessage(
                version=version,
                attempt="a",
                run_id=self.run_id,
                server="s",
                incarnation=0,
                tp_rank=rank,
                source=self.source,
                mesh=self.mesh,
                dtype=self.dtype,
                plan_digest=self.senders[0].route(self.kind).plan.digest,
                arenas={rank: ref for rank, ref in refs.items() if ref is not None},
                store=("127.0.0.1", 1),
                token="t",
            )
            for rank in range(self.mesh.tp)
        ]

    def receive(self, messages: list[ControlMessage]) -> list[Ack]:
        with torch.no_grad():
            return [
                r.receive(model, ControlMessage.from_json(message.to_json()))
                for r, model, message in zip(self.receivers, self.models, messages, strict=True)
            ]

    def differences(self, acks: list[Ack]) -> list[str]:
        """The sender's verdict on acknowledgements that are all ok."""
        assert [ack.error for ack in acks] == [""] * len(acks)
        wanted: dict[str, int] = {}
        for sender in self.senders:
            for tensor, part in sender.checksums().items():
                wanted[tensor] = add([wanted.get(tensor, 0), part])
        destination = self.senders[0].route(self.kind).destination
        sums = {rank: ack.sums for rank, ack in enumerate(acks)}
        return coverage.differences(coverage.held(destination), sums, wanted)

    def sync(self, version: int) -> list[str]:
        return self.differences(self.receive(self.messages(version)))

    def close(self) -> None:
        for sender, memory in zip(self.senders, self.memories, strict=True):
            sender.close()
            if memory is not None:
                memory.close()


def moved(run_id: str, rank: int, parameters: Tensors) -> Arena:
    """Put the parameters into shared memory, at places that no planner knows."""
    sizes = [(tensor.nbytes + 63) // 64 * 64 for tensor in parameters.values()]
    memory = live_memory(run_id, rank, sum(sizes))
    at = memory.ref.num_bytes
    for (name, tensor), size in zip(list(parameters.items()), sizes, strict=True):
        at -= size
        parameters[name] = memory.view(at, tensor.nbytes).view(tensor.dtype).view(tensor.shape)
        parameters[name].copy_(tensor)
    return memory
