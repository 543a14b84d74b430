"""What the checks run on: a GPU, or with `--dry` a CPU that stands in for one at small sizes."""

from __future__ import annotations

import multiprocessing
import os
import statistics
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from multiprocessing.connection import Connection
from typing import Any

import torch

from megarl.weight_sync import batches, checksum_triton, sender
from megarl.weight_sync.transport import arenas
from megarl.weight_sync.transport.cuda_driver import DeviceMemory, cuda
from tests.weight_sync.pretended_gpu import PretendedGpu

ANSWER_S = 120.0
SLACK_BYTES = 64 << 20
"""What a driver may keep of its own after everything was given back."""


@dataclass(frozen=True)
class Machine:
    """`gigabytes` of parameters, `cycles` of the colocated cycle."""

    dry: bool = False
    gigabytes: float = 15.0
    cycles: int = 20

    @property
    def device(self) -> torch.device:
        return torch.device("cpu") if self.dry else torch.device("cuda", 0)

    @property
    def memory(self) -> DeviceMemory:
        """The GPU's memory as this process has it."""
        return _pretended() if self.dry else cuda(self.device)

    def prepare(self) -> None:
        """What each process does first: with `--dry` GPU memory is pretended."""
        if self.dry:
            memory = _pretended()
            arenas.reading_memory = lambda device: memory
            sender.memory_of = lambda device: memory  # type: ignore[assignment]
            batches.pays = lambda device: True
            if checksum_triton.is_available() and os.environ.get("TRITON_INTERPRET") == "1":
                checksum_triton.pays = lambda device: True
        else:
            torch.cuda.set_device(self.device)

    def synchronize(self) -> None:
        if not self.dry:
            torch.cuda.synchronize()

    def free_bytes(self) -> int:
        """Of the whole device, after this process gave back what it only keeps."""
        if self.dry:
            return 0
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        return torch.cuda.mem_get_info()[0]

    def seconds(self, work: Callable[[], object], repeats: int = 5) -> float:
        """Median wall seconds of `work` and of the device's part in it, after one warm-up."""
        work()
        took = []
        for _ in range(repeats):
            self.synchronize()
            start = time.perf_counter()
            work()
            self.synchronize()
            took.append(time.perf_counter() - start)
        return statistics.median(took)

    def copy_seconds(self, num_bytes: int) -> float:
        """What a device-to-device copy of so many bytes takes."""
        part = min(num_bytes, 2 << 30)
        source = torch.randint(256, (part,), dtype=torch.uint8, device=self.device)
        destination = torch.empty_like(source)
        took = self.seconds(lambda: destination.copy_(source))
        assert torch.equal(source, destination)
        return took * num_bytes / part


@dataclass
class Outcome:
    """Figures of one check, and the targets that it missed."""

    figures: dict[str, Any] = field(default_factory=dict)
    missed: list[str] = field(default_factory=list)

    def want(self, name: str, value: float, low: float = 0.0, high: float = float("inf")) -> None:
        """Note a figure, and that it is to lie within bounds."""
        self.figures[name] = round(value, 6)
        if not low <= value <= high:
            self.missed.append(f"{name}={value:.4g}, wanted {low:g} to {high:g}")


@cache
def _pretended() -> PretendedGpu:
    return PretendedGpu()


class Peer:
    """A second process with one object, whose methods are called from here, one at a time."""

    def __init__(self, machine: Machine, make: Callable[..., object], *arguments: object) -> None:
        context = multiprocessing.get_context("fork" if machine.dry else "spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(
            target=_serve, args=(machine, theirs, make, arguments), daemon=True
        )
        self._process.start()
        self._answer("the start")

    def ask(self, method: str, *arguments: object) -> Any:
        """What the method returns there. Raises RuntimeError with its traceback where it failed."""
        self._pipe.send((method, arguments))
        return self._answer(method)

    def _answer(self, what: str) -> Any:
        if not self._pipe.poll(ANSWER_S):
            raise RuntimeError(f"{what}: no answer of the other process within {ANSWER_S:.0f} s")
        is_good, value = self._pipe.recv()
        if not is_good:
            raise RuntimeError(f"{what} failed in the other process:\n{value}")
        return value

    def close(self) -> None:
        self._pipe.send(None)
        self._process.join(ANSWER_S)
        assert self._process.exitcode == 0, f"the other process ended {self._process.exitcode}"


def _serve(
    machine: Machine, pipe: Connection, make: Callable[..., object], arguments: tuple[object, ...]
) -> None:
    try:
        if machine.dry:
            _pretended.cache_clear()  # a process of its own, with memory of its own
        machine.prepare()
        found = make(machine, *arguments)
        pipe.send((True, None))
    except Exception:  # noqa: BLE001 - raised on the other side
        pipe.send((False, traceback.format_exc()))
        return
    while (order := pipe.recv()) is not None:
        method, given = order
        try:
            pipe.send((True, getattr(found, method)(*given)))
        except Exception:  # noqa: BLE001 - raised on the other side
            pipe.send((False, traceback.format_exc()))


def versions() -> Mapping[str, str]:
    """Card and software, for the log."""
    found = {"torch": torch.__version__, "cuda": str(torch.version.cuda)}
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        found["card"] = f"{properties.name}, {properties.total_memory / 1e9:.0f} GB"
    return found
