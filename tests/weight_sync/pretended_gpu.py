"""Host memory behind the interface of a GPU's, so that arenas of `cuda_ipc` run between processes.

It keeps CUDA's rules and says where they are broken: memory that another process has open must not
be freed, a handle must not be opened twice, or by its owner.
"""

from __future__ import annotations

import ctypes
import itertools
import mmap
import os
from collections import Counter
from pathlib import Path

import torch

from megarl.errors import WeightSyncError
from megarl.weight_sync.transport.cuda_driver import HANDLE_BYTES, VIRTUAL, Allocation

_FOLDER = Path("/dev/shm")


class PretendedGpu:
    """What is not allocated here counts as mapped by expandable segments."""

    device = torch.device("cpu")

    def __init__(self, gpu: str = "GPU-0", can_export: bool = True) -> None:
        self.gpu, self._can_export = gpu, can_export
        self.calls: Counter[str] = Counter()
        self._mine: dict[int, tuple[Path, mmap.mmap]] = {}
        self._opened: dict[int, tuple[Path, mmap.mmap]] = {}
        self._numbers = itertools.count()

    def allocate(self, num_bytes: int) -> int:
        self.calls["allocate"] += 1
        path = _FOLDER / f"megarl_pretended_{os.getpid()}_{id(self)}_{next(self._numbers)}"
        path.touch()
        os.truncate(path, max(num_bytes, 1))
        pointer, mapped = _map(path)
        self._mine[pointer] = (path, mapped)
        return pointer

    def free(self, pointer: int) -> None:
        self.calls["free"] += 1
        path, _ = self._mine.pop(pointer)
        assert not list(_FOLDER.glob(f"{path.name}.open.*")), f"{path} was freed while it was open"
        path.unlink()

    def allocation(self, pointer: int) -> Allocation:
        for base, (path, _) in self._mine.items():
            if base <= pointer < base + path.stat().st_size:
                return Allocation(base, path.stat().st_size)
        return Allocation(pointer, 1 << 40, VIRTUAL)

    def export(self, base: int) -> bytes:
        if not self._can_export:
            raise WeightSyncError("CUDA's cuIpcGetMemHandle: operation not supported (801)")
        return str(self._mine[base][0]).encode().ljust(HANDLE_BYTES, b" ")

    def open(self, handle: bytes) -> int:
        self.calls["open"] += 1
        path = Path(handle.decode().rstrip())
        assert all(path != mine for mine, _ in self._mine.values()), "a process opened its own"
        assert all(path != other for other, _ in self._opened.values()), "a handle was opened twice"
        if not path.exists():
            raise WeightSyncError("CUDA's cuIpcOpenMemHandle_v2: invalid resource handle (400)")
        pointer, mapped = _map(path)
        self._opened[pointer] = (path, mapped)
        path.with_name(f"{path.name}.open.{os.getpid()}").touch()
        return pointer

    def close(self, pointer: int) -> None:
        self.calls["close"] += 1
        path, _ = self._opened.pop(pointer)
        path.with_name(f"{path.name}.open.{os.getpid()}").unlink()

    def synchronize(self) -> None:
        self.calls["synchronize"] += 1

    @property
    def num_allocations(self) -> int:
        return len(self._mine)


def _map(path: Path) -> tuple[int, mmap.mmap]:
    """Shared memory and its address; it stays mapped as long as Python holds the second."""
    with path.open("r+b") as file:
        mapped = mmap.mmap(file.fileno(), 0)
    return ctypes.addressof(ctypes.c_char.from_buffer(mapped)), mapped
