"""The calls to CUDA's driver, against a library with its names and signatures, compiled here."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from megarl.errors import WeightSyncError
from megarl.weight_sync.transport import cuda_driver
from megarl.weight_sync.transport.cuda_driver import (
    GRANULARITY_BYTES,
    MANAGED,
    POOLED,
    VIRTUAL,
    Allocation,
    Cuda,
)
from tests.weight_sync.in_c import compile_in_c

SOURCE = Path(__file__).with_name("pretended_cuda.c")


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    made = tmp_path_factory.mktemp("cuda") / "libpretended.so"
    compile_in_c(SOURCE, made, "-Wall")
    return ctypes.CDLL(str(made))


@pytest.fixture
def cuda(library: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cuda]:
    monkeypatch.setattr(cuda_driver, "_driver", lambda: library)
    for name in ("init", "empty_cache"):
        monkeypatch.setattr(torch.cuda, name, lambda: None)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (5, 7))
    yield Cuda(torch.device("cuda", 0))
    assert library.num_pushed() == 0  # every context that was pushed was popped
    library.refuse_as(0)


def test_memory_is_whole_blocks_with_a_handle_that_opens_it(cuda: Cuda) -> None:
    assert cuda.gpu == "00010203-0405-0607-0809-0a0b0c0d0e0f"
    pointer = cuda.allocate(100)
    assert cuda.allocation(pointer + 50) == Allocation(pointer, GRANULARITY_BYTES)
    handle = cuda.export(pointer)
    assert len(handle) == 64
    assert cuda.open(handle) == pointer
    cuda.close(pointer)
    cuda.free(pointer)
    with pytest.raises(WeightSyncError, match=r"cuIpcOpenMemHandle_v2: invalid resource handle"):
        cuda.open(handle)
    with pytest.raises(WeightSyncError, match="400"):
        cuda.open(bytes(64))


def test_memory_that_is_not_there_is_told_with_what_is_free(cuda: Cuda) -> None:
    with pytest.raises(WeightSyncError, match=r"out of memory \(2\); 5 of 7 bytes are free"):
        cuda.allocate(1 << 30)
    with pytest.raises(WeightSyncError, match="cuMemFree_v2"):
        cuda.free(12)


@pytest.mark.parametrize(("kind", "why"), [(1, VIRTUAL), (8, MANAGED), (17, POOLED), (0, "")])
def test_memory_that_cannot_be_exported_is_told_by_what_it_is(
    cuda: Cuda, library: ctypes.CDLL, kind: int, why: str
) -> None:
    pointer = cuda.allocate(1)
    library.refuse_as(kind)
    assert cuda.allocation(pointer).why_not == why
    library.refuse_as(0)
    cuda.free(pointer)


def test_gpu_that_is_not_there_is_an_error_in_words(
    library: ctypes.CDLL, cuda: Cuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(WeightSyncError, match=r"CUDA's cuDeviceGet: other \(101\)"):
        Cuda(torch.device("cuda", 1))
    monkeypatch.undo()
    cuda_driver._driver.cache_clear()
    monkeypatch.setattr(ctypes, "CDLL", lambda name: (_ for _ in ()).throw(OSError(f"no {name}")))
    with pytest.raises(WeightSyncError, match=r"driver cannot be loaded: no libcuda.so.1"):
        cuda_driver._driver()
