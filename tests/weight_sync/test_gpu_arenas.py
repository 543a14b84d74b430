"""A whole sync over GPU arenas between two processes, over a pretended GPU: sender to receiver."""

from __future__ import annotations

import dataclasses
import multiprocessing
import os
from collections.abc import Iterator
from multiprocessing.connection import Connection

import pytest
import torch

from megarl.errors import WeightSyncError
from megarl.reshard.mesh import LearnerMesh, ServerMesh
from megarl.reshard.sglang import sglang_layout
from megarl.weight_sync import batches, coverage, sender
from megarl.weight_sync.acks import Ack
from megarl.weight_sync.checksum import add
from megarl.weight_sync.control import ControlMessage, SourceSpec, stamp
from megarl.weight_sync.places import ServerKind
from megarl.weight_sync.receiver import Receiver
from megarl.weight_sync.sender import Sender
from megarl.weight_sync.transport import arenas, cuda_ipc
from megarl.weight_sync.transport.arenas import Policy
from megarl.weight_sync.transport.cuda_driver import tensor_over
from megarl.weight_sync.transport.shared import Arena
from tests.weight_sync import tiny
from tests.weight_sync.pretended_gpu import PretendedGpu

MESH, SERVER = LearnerMesh(tp=2), ServerMesh(2)
SPEC = SourceSpec(tiny.SHAPE, MESH)


def _server(rank: int, pipe: Connection) -> None:
    """One server rank: takes messages and says its acknowledgement and its calls to the GPU."""
    memory = PretendedGpu()
    arenas.reading_memory = lambda device: memory
    batches.pays = lambda device: True
    model = tiny.FakeModel(sglang_layout(SPEC.shape, SERVER), rank, torch.bfloat16)
    receiver = Receiver()
    while (text := pipe.recv()) is not None:
        with torch.no_grad():
            ack = receiver.receive(model, ControlMessage.from_json(text))
        pipe.send((ack.to_json(), dict(memory.calls)))


class Pair:
    """Two learner ranks here, two server ranks in processes of their own."""

    def __init__(self, memory: PretendedGpu) -> None:
        self.memory, self.kind = memory, ServerKind(SERVER)
        self.calls: list[dict[str, int]] = [{}, {}]
        context = multiprocessing.get_context("fork")
        self.pipes, self.processes = [], []
        for rank in range(2):
            mine, theirs = context.Pipe()
            process = context.Process(target=_server, args=(rank, theirs), daemon=True)
            process.start()
            self.pipes.append(mine)
            self.processes.append(process)
        self.senders: list[Sender] = []

    def learn(
        self, seed: int, dtype: torch.dtype, is_exportable: bool, policy: Policy = "kept"
    ) -> None:
        """Learner ranks of these weights, whose memory can be exported or not."""
        for each in self.senders:
            each.close()
        self.senders = []
        for rank, tensors in enumerate(tiny.on_learner(SPEC, tiny.weights(SPEC.shape, seed))):
            mine = {name: tensor.to(dtype) for name, tensor in tensors.items()}
            if is_exportable:
                mine = {name: self._exportable(tensor) for name, tensor in mine.items()}
            run_id = f"pair{os.getpid()}"
            made = Sender(run_id, SPEC, rank, mine, "bf16", arenas=policy)
            self.senders.append(made)

    def _exportable(self, tensor: torch.Tensor) -> torch.Tensor:
        size = tensor.numel() * tensor.element_size()
        moved = tensor_over(self.memory.allocate(size), size, tensor.device).view(tensor.dtype)
        return moved.view(tensor.shape).copy_(tensor)

    def messages(self, version: int, generation: int = 0) -> list[ControlMessage]:
        refs = {
            rank: each.stage(self.kind, generation, stamp(version, "a"))
            for rank, each in enumerate(self.senders)
        }
        found = {rank: ref for rank, ref in refs.items() if ref is not None}
        plan = self.senders[0].route(self.kind).plan
        first = ControlMessage(
            version, "a", "r", "s", 0, 0, SPEC, SERVER, "bf16", plan.digest, found, ("h", 1), "t"
        )
        return [dataclasses.replace(first, tp_rank=rank) for rank in range(2)]

    def receive(self, messages: list[ControlMessage]) -> list[Ack]:
        for pipe, message in zip(self.pipes, messages, strict=True):
            pipe.send(message.to_json())
        answers = []
        for rank, pipe in enumerate(self.pipes):
            assert pipe.poll(60)
            text, self.calls[rank] = pipe.recv()
            answers.append(Ack.from_json(text))
        return answers

    def sync(self, version: int, generation: int = 0) -> list[str]:
        acks = self.receive(self.messages(version, generation))
        for each in self.senders:
            each.withdraw()
        assert [ack.error for ack in acks] == ["", ""]
        wanted: dict[str, int] = {}
        for each in self.senders:
            for tensor, part in each.checksums().items():
                wanted[tensor] = add([wanted.get(tensor, 0), part])
        destination = self.senders[0].route(self.kind).destination
        sums = {rank: ack.sums for rank, ack in enumerate(acks)}
        return coverage.differences(coverage.held(destination), sums, wanted)

    def close(self) -> None:
        for pipe in self.pipes:
            pipe.send(None)
        for process in self.processes:
            process.join(10)
            assert process.exitcode == 0
        for each in self.senders:
            each.close()


@pytest.fixture
def pair(monkeypatch: pytest.MonkeyPatch) -> Iterator[Pair]:
    memory = PretendedGpu()
    monkeypatch.setattr(sender, "memory_of", lambda device: memory)
    made = Pair(memory)
    yield made
    made.close()
    assert cuda_ipc.sweep() == 0


def test_cast_weights_are_staged_once_opened_once_and_synced_again(pair: Pair) -> None:
    pair.learn(3, torch.float32, is_exportable=False)
    assert pair.sync(1) == [] and pair.sync(2) == []
    assert [calls["open"] for calls in pair.calls] == [2, 2]  # of two learner ranks, once each
    assert pair.memory.calls["allocate"] == 2
    assert pair.sync(3, generation=1) == []
    assert [calls["open"] for calls in pair.calls] == [4, 4]
    assert [calls["close"] for calls in pair.calls] == [2, 2]
    for each in pair.senders:
        each.close()
    assert pair.memory.num_allocations == 2  # the servers still have them open


def test_colocated_learner_has_its_memory_back_after_every_publish(pair: Pair) -> None:
    pair.learn(3, torch.float32, is_exportable=False, policy="released")
    for version in range(3):
        assert pair.sync(version) == []
        assert pair.memory.num_allocations == 0
    assert all(calls["open"] == calls["close"] == 6 for calls in pair.calls)


def test_learner_that_is_told_so_keeps_its_arenas_in_host_memory(pair: Pair) -> None:
    pair.learn(3, torch.bfloat16, is_exportable=True, policy="host")
    assert pair.sync(1) == []
    assert all("open" not in calls for calls in pair.calls)


def test_exportable_weights_are_read_where_they_lie_and_let_go_before_the_answer(
    pair: Pair,
) -> None:
    pair.learn(4, torch.bfloat16, is_exportable=True)
    before = pair.memory.num_allocations
    assert pair.sync(1) == [] and pair.sync(2) == []
    assert pair.memory.num_allocations == before  # nothing was staged
    assert all(calls["open"] == calls["close"] > 0 for calls in pair.calls)
    pair.learn(5, torch.bfloat16, is_exportable=True)  # at other addresses
    assert pair.sync(3) == []
    for pointer in list(pair.memory._mine):
        pair.memory.free(pointer)  # which asserts that nobody has it open


def test_weights_that_cannot_be_exported_are_staged_and_the_log_says_why(
    pair: Pair, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", logger=arenas.log.name)
    pair.learn(6, torch.bfloat16, is_exportable=False)
    assert pair.sync(1) == []
    assert "kind=staged" in caplog.text and "expandable_segments" in caplog.text


def test_withdrawn_arena_is_refused_by_a_server_that_comes_late(pair: Pair) -> None:
    pair.learn(7, torch.bfloat16, is_exportable=True)
    messages = pair.messages(1)
    for each in pair.senders:
        each.withdraw()
    assert all("does not exist" in ack.error for ack in pair.receive(messages))
    assert pair.sync(2) == []  # the next sync is a whole one


def test_learner_whose_gpu_cannot_export_uses_host_memory_and_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    broken = PretendedGpu(can_export=False)
    monkeypatch.setattr(arenas, "cuda", lambda device: broken)
    arenas.memory_of.cache_clear()
    assert arenas.memory_of(torch.device("cuda", 0)) is None
    assert arenas.memory_of(torch.device("cpu")) is None
    arenas.memory_of.cache_clear()
    assert "arenas are in host memory gpu=GPU-0 why=" in caplog.text
    arena = arenas.make_arena(None, f"pair{os.getpid()}", 0, 0, 64, "a" * 64, {}, {}, True)
    assert isinstance(arena, Arena) and arena.ref.gpu == ""
    arena.close()


def test_server_on_a_cpu_refuses_an_arena_in_a_gpu(pair: Pair) -> None:
    arena = cuda_ipc.CudaArena.staged(pair.memory, f"pair{os.getpid()}", 0, 0, 64, "a" * 64)
    with pytest.raises(WeightSyncError, match="which a server on cpu cannot read"):
        arenas.open_arena(arena.ref, "a" * 64, torch.device("cpu"))
    arena.close()
