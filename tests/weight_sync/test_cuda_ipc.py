"""Arenas in a GPU's memory, between two processes, over a pretended GPU."""

from __future__ import annotations

import dataclasses
import gc
import multiprocessing
import os
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch

from megarl.errors import WeightSyncError
from megarl.weight_sync.transport import cuda_ipc
from megarl.weight_sync.transport.cuda_driver import tensor_over
from megarl.weight_sync.transport.cuda_export import can_export, can_stage
from megarl.weight_sync.transport.cuda_ipc import CudaArena, CudaArenaReader
from megarl.weight_sync.transport.shared import ArenaRef
from tests.weight_sync.pretended_gpu import PretendedGpu

RUN = f"cudaipc{os.getpid()}"
DIGEST, OTHER = "a" * 64, "b" * 64
SHM = Path("/dev/shm")


def _serve(pipe: Connection) -> None:
    """The other process: does what it is told with one reader, and says what came of it."""
    memory = PretendedGpu()
    reader: CudaArenaReader | None = None
    while True:
        order, *arguments = pipe.recv()
        try:
            match order:
                case "open":
                    reader = CudaArenaReader(*arguments, memory)
                    answer = "opened"
                case "view":
                    assert reader is not None
                    answer = reader.view(*arguments).tolist()
                case "stamp":
                    assert reader is not None
                    answer = reader.stamp
                case "close":
                    assert reader is not None
                    reader.close()
                    answer = "closed"
                case "drop":
                    reader = None
                    gc.collect()
                    answer = "dropped"
                case "calls":
                    answer = dict(memory.calls)
                case _:
                    return
        except WeightSyncError as error:
            answer = f"refused: {error}"
        pipe.send(answer)


@pytest.fixture(scope="module")
def other() -> Iterator[Callable[..., object]]:
    """A second process, asked one thing after the other."""
    context = multiprocessing.get_context("fork")
    mine, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(theirs,), daemon=True)
    process.start()

    def ask(*order: object) -> object:
        mine.send(order)
        assert mine.poll(60), f"no answer to {order}"
        return mine.recv()

    yield ask
    mine.send(("end",))
    process.join(10)
    assert process.exitcode == 0


@pytest.fixture
def gpu() -> Iterator[PretendedGpu]:
    memory = PretendedGpu()
    yield memory
    cuda_ipc.sweep()
    assert list(SHM.glob(f"megarl_{RUN}_*")) == []


def test_tensor_over_a_pointer_is_the_memory_itself_and_does_not_free_it() -> None:
    owner = torch.arange(64, dtype=torch.uint8)
    view = tensor_over(owner.data_ptr() + 8, 16, owner.device)
    assert view.tolist() == list(range(8, 24)) and view.data_ptr() == owner.data_ptr() + 8
    assert view.dtype == torch.uint8
    view.view(torch.float32).fill_(0)
    del view
    gc.collect()
    assert owner[8:24].count_nonzero() == 0 and owner[24] == 24
    assert tensor_over(0, 0, owner.device).shape == (0,)


def test_staged_arena_is_read_in_another_process_and_freed_when_closed(
    gpu: PretendedGpu, other: Callable[..., object]
) -> None:
    arena = CudaArena.staged(gpu, RUN, 0, 3, 256, DIGEST)
    assert arena.is_lasting and arena.ref.gpu == gpu.gpu
    arena.data.copy_(torch.arange(256).to(torch.uint8))
    before = gpu.calls["synchronize"]
    arena.stamp("7.x")
    assert gpu.calls["synchronize"] == before + 1  # written before anybody is told
    assert other("open", arena.ref, DIGEST) == "opened"
    assert other("stamp") == "7.x" and other("view", 100, 4) == [100, 101, 102, 103]
    assert arena.is_read
    assert other("close") == "closed"
    assert not arena.is_read
    arena.close()
    assert gpu.num_allocations == 0
    assert "was closed and is read again" in str(other("view", 0, 4))


def test_direct_arena_gives_parameters_where_they_lie_with_one_handle_for_each_allocation(
    gpu: PretendedGpu, other: Callable[..., object]
) -> None:
    first, second = gpu.allocate(4096), gpu.allocate(64)
    tensors = {
        0: tensor_over(first + 1024, 8, gpu.device),
        64: tensor_over(first + 32, 8, gpu.device),
        128: tensor_over(second, 8, gpu.device),
    }
    for offset, tensor in tensors.items():
        tensor.copy_(torch.arange(8) + offset)
    arena = CudaArena.direct(gpu, RUN, 0, 0, tensors, DIGEST)
    assert not arena.is_lasting
    opened = other("calls").get("open", 0)  # type: ignore[attr-defined]
    assert other("open", arena.ref, DIGEST) == "opened"
    assert other("calls")["open"] == opened + 2  # type: ignore[index]
    assert [other("view", offset, 4) for offset in tensors] == [
        [offset, offset + 1, offset + 2, offset + 3] for offset in tensors
    ]
    assert "nothing whole at bytes [4, 70)" in str(other("view", 4, 66))
    other("close")
    arena.close()
    assert tensors[0][1] == 1  # the parameters are the learner's
    gpu.free(first)
    gpu.free(second)


def test_memory_that_somebody_has_open_is_kept_until_it_is_closed(
    gpu: PretendedGpu, other: Callable[..., object], caplog: pytest.LogCaptureFixture
) -> None:
    arena = CudaArena.staged(gpu, RUN, 1, 0, 64, DIGEST)
    other("open", arena.ref, DIGEST)
    arena.close()
    assert "a server has it open" in caplog.text
    assert gpu.num_allocations == 1 and cuda_ipc.sweep() == 1
    assert list(SHM.glob(f"megarl_{RUN}_*")) == []  # nobody else can open it
    assert other("stamp") == ""
    other("close")
    CudaArena.staged(gpu, RUN, 2, 0, 64, DIGEST).close()  # the next one frees what was left
    assert gpu.num_allocations == 0 and cuda_ipc.sweep() == 0


def test_dropped_reader_closes_what_it_had_open(
    gpu: PretendedGpu, other: Callable[..., object]
) -> None:
    arena = CudaArena.staged(gpu, RUN, 0, 0, 64, DIGEST)
    other("open", arena.ref, DIGEST)
    other("drop")
    assert not arena.is_read
    arena.close()
    assert gpu.num_allocations == 0


def test_reader_refuses_what_is_stale_another_its_own_or_open_already(
    gpu: PretendedGpu, other: Callable[..., object]
) -> None:
    arena = CudaArena.staged(gpu, RUN, 0, 0, 64, DIGEST)

    def refusal(ref: ArenaRef, digest: str = DIGEST) -> str:
        return str(other("open", ref, digest))

    assert "another layout or dtype" in refusal(arena.ref, OTHER)
    assert "stale or belongs" in refusal(dataclasses.replace(arena.ref, nonce="f" * 32))
    assert "expected GPU-1" in refusal(dataclasses.replace(arena.ref, gpu="GPU-1"))
    assert "not the name of an arena" in refusal(dataclasses.replace(arena.ref, name="../x"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cuda_ipc, "_this_process", lambda: "another")
        patch.setattr(cuda_ipc, "_namespace", lambda: 1)
        with pytest.raises(WeightSyncError, match="another PID namespace.*gpu_arenas"):
            CudaArenaReader(arena.ref, DIGEST, gpu)
    with pytest.raises(WeightSyncError, match="this process's own"):
        CudaArenaReader(arena.ref, DIGEST, gpu)
    assert not arena.is_read  # refused readers hold nothing
    assert refusal(arena.ref) == "opened"
    assert "is open in this process already" in refusal(arena.ref)
    assert other("stamp") == ""  # the first reader goes on
    other("close")
    arena.close()
    assert "the learner has ended" in refusal(arena.ref)


def test_handles_and_files_stay_the_same_in_number_over_many_generations(
    gpu: PretendedGpu, other: Callable[..., object]
) -> None:
    before = len(os.listdir("/proc/self/fd"))
    for generation in range(20):
        arena = CudaArena.staged(gpu, RUN, generation, 0, 64, DIGEST)
        arena.data.fill_(generation)
        assert other("open", arena.ref, DIGEST) == "opened"
        assert other("view", 0, 1) == [generation]
        other("close")
        arena.close()
        del arena
    assert gpu.num_allocations == 0 and len(os.listdir("/proc/self/fd")) == before
    calls = other("calls")
    assert isinstance(calls, dict) and calls["open"] == calls["close"]


def test_probe_says_in_words_why_memory_cannot_be_exported(gpu: PretendedGpu) -> None:
    pointer = gpu.allocate(64)
    assert can_export(tensor_over(pointer, 64, gpu.device), gpu).ok
    assert "expandable_segments" in can_export(torch.zeros(4), gpu).why
    assert "not contiguous" in can_export(torch.zeros(4, 4).t(), gpu).why
    assert "not on a GPU" in can_export(torch.zeros(4)).why
    assert "spans several" in can_export(tensor_over(pointer, 65, gpu.device), gpu).why
    gpu.free(pointer)
    assert can_stage(gpu).ok and gpu.num_allocations == 0
    without = PretendedGpu(can_export=False)
    assert "not supported" in can_stage(without).why and without.num_allocations == 0
    with pytest.raises(WeightSyncError, match="a parameter cannot be exported: it was mapped"):
        CudaArena.direct(gpu, RUN, 0, 0, {0: torch.zeros(4)}, DIGEST)


def test_folder_without_file_locks_is_told_with_what_to_set(
    gpu: PretendedGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    arena = CudaArena.staged(gpu, RUN, 0, 0, 64, DIGEST)
    with monkeypatch.context() as patch:
        patch.setattr(cuda_ipc.fcntl, "F_OFD_SETLK", 10_000)
        with pytest.raises(WeightSyncError, match='no locks of open files.*gpu_arenas = "never"'):
            _ = arena.is_read
    arena.close()
