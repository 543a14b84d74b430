"""Arenas between two processes through CUDA IPC: values, refusals, and nothing left behind."""

from __future__ import annotations

import os
import time

import torch

from megarl.errors import WeightSyncError
from megarl.weight_sync.transport import cuda_ipc
from megarl.weight_sync.transport.cuda_ipc import CudaArena, CudaArenaReader
from megarl.weight_sync.transport.shared import ArenaRef
from tests.gpu.machine import SLACK_BYTES, Machine, Outcome, Peer

DIGEST = "c" * 64
GENERATIONS = 50


class Server:
    """Holds at most one reader."""

    def __init__(self, machine: Machine) -> None:
        self._memory = machine.memory
        self._reader: CudaArenaReader | None = None

    def open(self, ref: ArenaRef) -> float:
        start = time.perf_counter()
        self._reader = CudaArenaReader(ref, DIGEST, self._memory)
        return time.perf_counter() - start

    def refusal(self, ref: ArenaRef) -> str:
        try:
            CudaArenaReader(ref, DIGEST, self._memory)
        except WeightSyncError as error:
            return str(error)
        return "opened"

    def read(self, offset: int, num_bytes: int) -> bytes:
        assert self._reader is not None
        return self._reader.view(offset, num_bytes).cpu().numpy().tobytes()

    def is_refused(self) -> bool:
        try:
            self.read(0, 1)
        except WeightSyncError:
            return True
        return False

    def close(self) -> float:
        assert self._reader is not None
        start = time.perf_counter()
        self._reader.close()
        return time.perf_counter() - start

    def num_open(self) -> int:
        return len(cuda_ipc._OPEN)


def run(machine: Machine) -> Outcome:
    outcome, memory = Outcome(), machine.memory
    size = 4 << 20 if machine.dry else 1 << 30
    peer = Peer(machine, Server)
    before = 0
    run_id, opened, closed = f"gpucheck{os.getpid()}", [], []
    pattern = torch.randint(256, (1 << 20,), dtype=torch.uint8)
    for generation in range(GENERATIONS):
        arena = CudaArena.staged(memory, run_id, generation, 0, size, DIGEST)
        arena.data[: 1 << 20].copy_(pattern.roll(generation))
        arena.data[size - 64 :].fill_(generation)
        arena.stamp(str(generation))
        opened.append(peer.ask("open", arena.ref))
        assert peer.ask("read", 0, 1 << 20) == pattern.roll(generation).numpy().tobytes()
        assert peer.ask("read", size - 64, 64) == bytes([generation] * 64)
        assert "open in this process already" in peer.ask("refusal", arena.ref)
        assert arena.is_read
        closed.append(peer.ask("close"))
        assert peer.ask("is_refused") and not arena.is_read
        stale = arena.ref
        arena.close()
        del arena
        before = before or machine.free_bytes()  # after what CUDA takes once
    assert "does not exist" in peer.ask("refusal", stale)
    outcome.want("handles_open", peer.ask("num_open"), high=0)
    assert cuda_ipc.sweep() == 0
    lost = before - machine.free_bytes()
    outcome.want("lost_bytes", max(lost, 0), high=SLACK_BYTES)
    outcome.figures["open_s"] = sorted(opened)[len(opened) // 2]
    outcome.figures["close_s"] = sorted(closed)[len(closed) // 2]
    peer.close()
    return outcome
