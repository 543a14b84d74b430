"""What each phase of a pass takes of memory on this rank, beside what was predicted.

Owns the phases' peaks and their names as metrics. What is predicted is `megarl.planning`'s, where a
part of the state is, `offload`'s. Imports no Megatron.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

import torch
import torch.distributed as dist

from megarl.learner.host_store import synchronize
from megarl.linux import memory_bytes, restart_peak
from megarl.planning.memory import PHASES, Phase, RankMemory

log = logging.getLogger(__name__)

P = ParamSpec("P")
R = TypeVar("R")


class MemoryMeter:
    """The most memory that each phase took since `take`.

    On a GPU that is what torch's allocator gave out; on a CPU the resident memory of the process,
    with Python, libraries and whatever else is in it. `state_bytes` tells what weights, gradients
    and optimizer state have on the device, which is exact on both.
    """

    def __init__(
        self, device: torch.device, state_bytes: Callable[[], int], predicted: RankMemory
    ) -> None:
        self._device, self._state_bytes, self.predicted = device, state_bytes, predicted
        self._peaks: dict[Phase, int] = {}
        self._state = 0

    @contextmanager
    def phase(self, name: Phase) -> Iterator[None]:
        """Measure what happens inside as `name`, also where it fails."""
        self._restart()
        try:
            yield
        finally:
            self._peaks[name] = max(self._peaks.get(name, 0), self._peak())
            if name == "train":
                self._state = self._state_bytes()

    def note(self, name: Phase) -> None:
        """What is taken now is what `name` takes; a later note replaces it."""
        self._restart()
        self._peaks[name] = self._peak()

    def take(self) -> dict[str, int]:
        """The metrics, of the rank that has most of each; then begin anew. Collective over all
        ranks, which must have gone through the same phases.

        `memory/<phase>_predicted_bytes`, and beside it `memory/<phase>_peak_bytes` on a GPU,
        `memory/<phase>_rss_bytes` on a CPU; `memory/state_bytes` and its prediction.
        """
        kind = "peak" if self._device.type == "cuda" else "rss"
        found: dict[str, int] = {}
        for name in PHASES:
            if name in self._peaks:
                found[f"memory/{name}_predicted_bytes"] = self.predicted.peaks[name]
                found[f"memory/{name}_{kind}_bytes"] = self._peaks[name]
        if self._state:
            found["memory/state_predicted_bytes"] = self.predicted.state.total
            found["memory/state_bytes"] = self._state
        self._peaks, self._state = {}, 0
        return _largest(found, self._device)

    def tell(self) -> None:
        """One line of the log for what is predicted. Collective over all ranks."""
        predicted: dict[str, int] = dict(self.predicted.peaks)
        predicted |= {"state": self.predicted.state.total, "host": self.predicted.host.total}
        most = _largest(predicted, self._device)
        if dist.get_rank() == 0:
            words = " ".join(f"{name}_bytes={value}" for name, value in most.items())
            log.info("memory predicted of=largest_rank %s", words)

    def _restart(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
        else:
            restart_peak()

    def _peak(self) -> int:
        if self._device.type == "cuda":
            synchronize(self._device)
            return int(torch.cuda.max_memory_allocated(self._device))
        return memory_bytes()[1]


class Measured(Protocol):
    """Whatever has a meter."""

    meter: MemoryMeter


M = TypeVar("M", bound=Measured)


def measured(
    phase: Phase,
) -> Callable[[Callable[Concatenate[M, P], R]], Callable[Concatenate[M, P], R]]:
    """A method as a phase of its object's `meter`."""

    def decorate(method: Callable[Concatenate[M, P], R]) -> Callable[Concatenate[M, P], R]:
        @functools.wraps(method)
        def run(self: M, *args: P.args, **kwargs: P.kwargs) -> R:
            with self.meter.phase(phase):
                return method(self, *args, **kwargs)

        return run

    return decorate


def _largest(values: dict[str, int], device: torch.device) -> dict[str, int]:
    if not values:
        return {}
    most = torch.tensor(list(values.values()), dtype=torch.int64, device=device)
    dist.all_reduce(most, op=dist.ReduceOp.MAX)
    numbers: list[Any] = most.tolist()
    return dict(zip(values, map(int, numbers), strict=True))
