"""Storages leave the GPU for host memory and come back: bit for bit, with the memory free between.

As Megatron's buffers have it: two large storages with many views, and small ones beside them.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch import Tensor

from megarl.learner.host_store import HostStore, distinct_storages
from tests.gpu.machine import SLACK_BYTES, Machine, Outcome

MAX_GIGABYTES = 8.0
LEAST_GB_PER_S = 5.0  # page-locked copies over PCIe 4 are above 20
NUM_SMALL = 100


def run(machine: Machine) -> Outcome:
    outcome = Outcome()
    large = int(min(machine.gigabytes, MAX_GIGABYTES) * 1e9) // 8 if not machine.dry else 1 << 20
    tensors = [
        *(torch.randn(large, device=machine.device) for _ in range(2)),
        *(torch.randn(1000 + i, device=machine.device) for i in range(NUM_SMALL)),
    ]
    views = [tensors[0][i * 1000 : (i + 1) * 1000].view(10, 100) for i in range(10)]
    before, objects = _sums(tensors, views), [id(tensor) for tensor in views]
    num_bytes = sum(storage.nbytes() for storage in distinct_storages(tensors))
    store, full = HostStore(machine.device), machine.free_bytes()
    for cycle in range(machine.cycles):
        gone_s = _timed(machine, lambda: store.park(distinct_storages(tensors + views)))
        given = machine.free_bytes() - full
        assert all(storage.nbytes() == 0 for storage in distinct_storages(tensors))
        back_s = _timed(machine, store.unpark)
        assert _sums(tensors, views) == before, f"cycle {cycle}: not the same numbers"
        assert [id(tensor) for tensor in views] == objects
        assert full - machine.free_bytes() <= SLACK_BYTES, f"cycle {cycle}: memory was lost"
    outcome.figures["bytes"] = num_bytes
    if not machine.dry:
        outcome.want("given_bytes", given, low=num_bytes - SLACK_BYTES)
        outcome.want("page_locked", store.is_page_locked, low=1)
        outcome.want("offload_gb_per_s", num_bytes / gone_s / 1e9, low=LEAST_GB_PER_S)
        outcome.want("onload_gb_per_s", num_bytes / back_s / 1e9, low=LEAST_GB_PER_S)
    return outcome


def _timed(machine: Machine, work: Callable[[], None]) -> float:
    machine.synchronize()
    start_s = time.perf_counter()
    work()
    return time.perf_counter() - start_s


def _sums(tensors: list[Tensor], views: list[Tensor]) -> list[int]:
    """The bits of all, added up as integers."""
    return [int(tensor.view(torch.int32).sum(dtype=torch.int64)) for tensor in tensors + views]
