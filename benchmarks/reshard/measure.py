"""Seconds, memory and bytes of megarl's plan and of awex's, each in a process of its own."""

from __future__ import annotations

import time
import tracemalloc
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from benchmarks.reshard.awex import AwexPlan, plan_with_awex
from benchmarks.reshard.fresh import in_fresh_process
from benchmarks.reshard.rows import Row
from megarl.reshard.plan import make_plan


@dataclass(frozen=True)
class OwnPlan:
    """One run. `plan_s` is from two built layouts to the proved plan; `operations_s` besides.

    `operations_s` writes out the operations of the busiest receiver and of the busiest sender.
    `cpu_s` is the processor's time for both, of all threads: on a machine that is shared, the wall
    says more about the others.
    """

    layout_s: float
    plan_s: float
    operations_s: float
    cpu_s: float
    num_operations: tuple[int, int]
    busiest: tuple[int, int]
    network_out: Mapping[int, int]
    network_in: Mapping[int, int]
    received_bytes: int
    digest: str

    @property
    def total_s(self) -> float:
        """The plan and the operations of a rank."""
        return self.plan_s + self.operations_s


def time_own_plan(row: Row) -> OwnPlan:
    """Plan a row once in this process, with the garbage collector as Python starts it."""
    start = time.perf_counter()
    source, destination, placement = row.layouts()
    built, cpu = time.perf_counter(), time.process_time()
    plan = make_plan(source, destination, placement)
    planned, cpu_planned = time.perf_counter(), time.process_time()
    traffic = plan.traffic
    receiver = _busiest(traffic.network_in, destination.rank_ids)
    sender = _busiest(traffic.network_out, source.rank_ids)
    before, cpu_before = time.perf_counter(), time.process_time()
    to, out = plan.operations_to(receiver), plan.operations_from(sender)
    after, cpu_after = time.perf_counter(), time.process_time()
    received = sum(
        sum(part.values())
        for part in (traffic.network_in, traffic.node_in, traffic.local, traffic.fanout_in)
    )
    return OwnPlan(
        built - start,
        planned - built,
        after - before,
        cpu_planned - cpu + cpu_after - cpu_before,
        (len(to), len(out)),
        (receiver, sender),
        dict(traffic.network_out),
        dict(traffic.network_in),
        received,
        plan.digest,
    )


def peak_bytes(row: Row, busiest: tuple[int, int]) -> int:
    """The most that was allocated at once by the plan and the two ranks' operations."""
    source, destination, placement = row.layouts()
    tracemalloc.start()
    try:
        plan = make_plan(source, destination, placement)
        kept = plan.operations_to(busiest[0]), plan.operations_from(busiest[1])
        assert kept
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@dataclass(frozen=True)
class Measured:
    """All that was measured of megarl's plan of a row; times are medians of `num_runs`."""

    layout_s: float
    plan_s: float
    operations_s: float
    total_s: float
    cpu_s: float
    num_runs: int
    peak_bytes: int
    plan: OwnPlan


def measure_own(row: Row, num_runs: int) -> Measured:
    """Plan a row in as many fresh processes, and once more to see its memory.

    Raises RuntimeError where two runs gave different plans.
    """
    runs = [in_fresh_process(time_own_plan, row) for _ in range(num_runs)]
    if len({run.digest for run in runs}) != 1:
        raise RuntimeError(f"{row.name}: the plan differs from run to run, so ranks would disagree")
    peak = in_fresh_process(peak_bytes, row, runs[0].busiest)
    return Measured(
        median(run.layout_s for run in runs),
        median(run.plan_s for run in runs),
        median(run.operations_s for run in runs),
        median(run.total_s for run in runs),
        median(run.cpu_s for run in runs),
        num_runs,
        peak,
        runs[0],
    )


def measure_awex(row: Row, ranks: tuple[int, int], folder: Path, limit_s: float) -> AwexPlan:
    """awex's planner on a row, in a fresh process. `ranks` are its local plans': to, from."""
    return in_fresh_process(_awex, row, ranks, folder, limit_s)


def _awex(row: Row, ranks: tuple[int, int], folder: Path, limit_s: float) -> AwexPlan:
    source, destination, _ = row.layouts()
    return plan_with_awex(source, destination, row.server.size, ranks, folder, limit_s)


def _busiest(load: Mapping[int, int], ranks: tuple[int, ...]) -> int:
    return max(ranks, key=lambda rank: (load.get(rank, 0), -rank))
