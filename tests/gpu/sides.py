"""A learner rank and a server rank of a dense policy, each in its own process, without engines.

They hold what Megatron's and SGLang's ranks hold, by the layouts, in bf16 on the device.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from functools import partial

import torch

from megarl.actor.shape import ModelShape
from megarl.reshard.mesh import LearnerMesh, ServerMesh
from megarl.reshard.sglang import sglang_layout
from megarl.weight_sync import coverage
from megarl.weight_sync.acks import Ack
from megarl.weight_sync.control import ControlMessage, SourceSpec, stamp
from megarl.weight_sync.inflow import ArenaInflow
from megarl.weight_sync.places import ServerKind
from megarl.weight_sync.receiver import Receiver
from megarl.weight_sync.sender import Sender, SendPlan
from megarl.weight_sync.transport.arenas import Policy
from megarl.weight_sync.transport.cuda_driver import tensor_over
from tests.gpu.machine import Machine
from tests.reshard.models import tiny_shape

ALIGNMENT = 256  # bytes; parameters lie in one buffer, as Megatron's do


def dense_shape(machine: Machine) -> ModelShape:
    """Qwen3-8B with as many layers as make the gigabytes (36 in all), or a tiny one."""
    if machine.dry:
        return tiny_shape(num_layers=3, hidden_size=64, head_dim=16, num_heads=8, num_kv_heads=4)
    sizes = {
        "hidden_size": 4096,
        "head_dim": 128,
        "num_heads": 32,
        "num_kv_heads": 8,
        "intermediate_size": 12_288,
        "vocab_size": 151_936,
    }
    ends, layer = 2 * 151_936 * 4096 * 2, 385_900_000  # bytes
    layers = max(1, round((machine.gigabytes * 1e9 - ends) / layer))
    return tiny_shape(num_layers=layers, **sizes)


def source_of(machine: Machine) -> SourceSpec:
    """The learner's layout: one rank."""
    return SourceSpec(dense_shape(machine), LearnerMesh())


class Learner:
    """Rank 0 of 1."""

    def __init__(self, machine: Machine, policy: Policy = "kept") -> None:
        self._machine, self._spec, self._policy = machine, source_of(machine), policy
        self._sender: Sender | None = None
        self._buffer: torch.Tensor | None = None
        self._pointer = 0
        self._spare: list[torch.Tensor] = []

    def load(self, seed: int, shift_bytes: int = 0) -> int:
        """New parameters in new memory; returns its address. `shift_bytes` are taken before."""
        shapes = {t.name: t.shape for t in self._spec.layout().rank(0).tensors}
        offsets, total = {}, 0
        for name, shape in shapes.items():
            offsets[name] = total
            total += -(-torch.Size(shape).numel() * 2 // ALIGNMENT) * ALIGNMENT
        device = self._machine.device
        if shift_bytes:
            self._spare.append(torch.empty(shift_bytes, dtype=torch.uint8, device=device))
        if self._machine.dry:  # the pretended driver's memory can be exported, torch's cannot
            self._pointer = self._machine.memory.allocate(total)
            self._buffer = tensor_over(self._pointer, total, device)
        else:
            self._buffer = torch.empty(total, dtype=torch.uint8, device=device)
        torch.manual_seed(seed)
        parameters = {}
        for name, shape in shapes.items():
            size = torch.Size(shape).numel() * 2
            place = self._buffer[offsets[name] : offsets[name] + size]
            parameters[name] = place.view(torch.bfloat16).view(shape).normal_()
        self._machine.synchronize()
        self._sender = Sender(
            f"gpucheck{self._machine.dry:d}",
            self._spec,
            0,
            parameters,
            "bf16",
            arenas=self._policy,
        )
        return self._buffer.data_ptr()

    def unload(self) -> None:
        """Give the parameters' memory back to the device."""
        assert self._sender is not None
        self._sender.close()
        self._sender, self._buffer = None, None
        self._spare.clear()
        if self._machine.dry:
            self._machine.memory.free(self._pointer)
        else:
            torch.cuda.synchronize()
            torch.cuda.empty_cache()

    def message(self, tp: int, version: int, direct: bool = True) -> str:
        """Stage for servers of that tp; the control message for their rank 0.

        Not `direct`: parameters are copied also where servers could read them in place.
        """
        assert self._sender is not None
        kind = ServerKind(ServerMesh(tp))
        find = Sender._live if direct else _staged
        self._sender._live = partial(find, self._sender)  # type: ignore[method-assign]
        ref = self._sender.stage(kind, tp, stamp(version, "a"))
        assert ref is not None
        return ControlMessage(
            version=version,
            attempt="a",
            run_id="gpucheck",
            server="s",
            incarnation=0,
            tp_rank=0,
            source=self._spec,
            mesh=kind.mesh,
            dtype="bf16",
            plan_digest=self._sender.route(kind).plan.digest,
            arenas={0: ref},
            store=("127.0.0.1", 1),
            token="t",
        ).to_json()

    def stage_seconds(self, tp: int, version: int) -> float:
        """Wall seconds of staging, device included."""
        start = time.perf_counter()
        self.message(tp, version)
        return time.perf_counter() - start

    def sums(self) -> tuple[dict[str, int], float]:
        """Checksums of the live parameters, and the seconds they took."""
        assert self._sender is not None
        start = time.perf_counter()
        found = self._sender.checksums()
        return found, time.perf_counter() - start

    def withdraw(self) -> None:
        """The publish is over."""
        assert self._sender is not None
        self._sender.withdraw()

    def free_bytes(self) -> int:
        return self._machine.free_bytes()


def _staged(sender: Sender, route: SendPlan) -> tuple[dict[int, torch.Tensor], dict[int, int]]:
    """As `Sender._live`, with nothing that servers could read where it is."""
    live, others = Sender._live(sender, route)
    return {}, others | {offset: tensor.nbytes for offset, tensor in live.items()}


class _Model(torch.nn.Module):
    """A server rank's parameters under their flat names."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        super().__init__()
        self._tensors = tensors

    def named_parameters(self, *_: object, **__: object):  # type: ignore[no-untyped-def]
        return iter(self._tensors.items())


class Server:
    """Rank 0 of a server of that tp."""

    def __init__(self, machine: Machine, tp: int) -> None:
        self._machine, self._tp = machine, tp
        self._layout = sglang_layout(dense_shape(machine), ServerMesh(tp))
        self._receiver = Receiver()
        self.forget()

    def forget(self) -> None:
        """Parameters full of NaN."""
        self._model = _Model(
            {
                t.name: torch.full(
                    t.shape, torch.nan, dtype=torch.bfloat16, device=self._machine.device
                )
                for t in self._layout.rank(0).tensors
            }
        )

    @property
    def num_bytes(self) -> int:
        return sum(t.numel() * 2 for t in self._model._tensors.values())

    def receive(self, text: str) -> Ack:
        """What SGLang's scheduler does with a message."""
        with torch.no_grad():
            return self._receiver.receive(self._model, ControlMessage.from_json(text))

    def differences(self, ack: Ack, wanted: Mapping[str, int]) -> list[str]:
        """What keeps a server of tp 1 from being proved."""
        assert ack.ok, ack.error
        pieces = {0: coverage.held(self._layout)[0]}
        return coverage.differences(pieces, {0: ack.sums}, wanted)

    def num_copies_of_layer(self, layer: int) -> int:
        """Copies that the last sync made for one layer."""
        inflow = self._receiver._inflows[0]
        assert isinstance(inflow, ArenaInflow)
        name = f".layers.{layer}."
        return sum(name in copy.destination.name for copy in inflow._prepared[0][1].copies)
