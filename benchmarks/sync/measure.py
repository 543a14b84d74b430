"""Times the syncs of one case, one after the other, in real processes."""

from __future__ import annotations

import itertools
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks.sync import counting, stock
from benchmarks.sync.cases import Case, num_bytes
from benchmarks.sync.learner import Learner
from benchmarks.sync.server import Server
from megarl.config.load import read_config
from megarl.config.schema import Config

ROOT = Path(__file__).parents[2]
WARM_UP = 2  # syncs before the timed ones: plans and arenas are made in the first
STREAM_TOKENS = 1500  # more than arrive meanwhile, and within every model's context


@dataclass(frozen=True)
class Sync:
    """One publish. `start` and `end` are of perf_counter, the same clock in all processes.

    `memcpy_s` is of a copy made just before, `token_s` of one token asked for just after.
    """

    start: float
    end: float
    memcpy_s: float
    token_s: float
    report: dict[str, Any]


@dataclass(frozen=True)
class Counted:
    """Of one sync: Python calls of each learner rank and server rank, HTTP requests, files mapped.

    `num_files` are those of shared memory that the server's ranks have mapped, all together.
    """

    learner_calls: tuple[int, ...]
    server_calls: tuple[int, ...]
    routes: tuple[str, ...]
    num_files: int


@dataclass
class Measured:
    """All that was timed of a case: `syncs` with weights read in place, `staged_syncs` copied."""

    staged_syncs: list[Sync] = field(default_factory=list)
    syncs: list[Sync] = field(default_factory=list)
    stall_s: list[float] = field(default_factory=list)
    stock_tensor_s: list[float] = field(default_factory=list)
    stock_distributed_s: list[float] = field(default_factory=list)
    gather_s: list[float] = field(default_factory=list)
    probe_s: list[float] = field(default_factory=list)
    counted: Counted | None = None


class MemoryCopy:
    """A plain copy of as many bytes as the server holds, in private memory that is warm."""

    def __init__(self, size: int) -> None:
        self._from = torch.ones(size, dtype=torch.uint8)
        self._to = self._from.clone()

    def seconds(self) -> float:
        """Of one copy."""
        start = time.perf_counter()
        self._to.copy_(self._from)
        return time.perf_counter() - start


def measure(case: Case, num_syncs: int, num_stock_syncs: int) -> Measured:
    """Start the processes, time everything, end them. Raises RuntimeError where a sync fails."""
    config = read_config(
        ROOT / "examples/smollm2.toml", ["--actor.model", str(case.model.resolve())]
    )
    with tempfile.TemporaryDirectory() as name:
        return _measure(case, config, Path(name), num_syncs, num_stock_syncs)


def _measure(
    case: Case, config: Config, folder: Path, num_syncs: int, num_stock_syncs: int
) -> Measured:
    measured = Measured()
    counts = folder / "counts"
    server = Server(case, config, folder / "server.log", counting.LOADER, counts)
    try:
        copy = MemoryCopy(num_bytes(case))
        versions = itertools.count(1)
        with Learner(case, "staged") as learner:
            measured.staged_syncs = _syncs(learner, server, versions, copy, num_syncs)
        with Learner(case, "in_place") as learner:
            measured.syncs = _syncs(learner, server, versions, copy, num_syncs)
            measured.probe_s = [server.score(range(1, 18)) for _ in range(num_syncs)]
            measured.stall_s = _stalls(learner, server, versions, num_syncs)
            measured.counted = _count(learner, server, next(versions), counts)
            measured.gather_s = [learner.gather() for _ in range(1 + num_stock_syncs)][1:]
        del copy
        measured.stock_tensor_s = stock.by_tensor(server, case, num_stock_syncs)
        measured.stock_distributed_s = stock.by_broadcast(server, case, num_stock_syncs)
    finally:
        server.kill()
    return measured


def _syncs(
    learner: Learner, server: Server, versions: Iterator[int], copy: MemoryCopy, num_syncs: int
) -> list[Sync]:
    """The timed syncs, after those that warm up."""
    syncs = [_sync(learner, server, next(versions), copy) for _ in range(WARM_UP + num_syncs)]
    return syncs[WARM_UP:]


def _sync(learner: Learner, server: Server, version: int, copy: MemoryCopy) -> Sync:
    """One step and publish, and the first token."""
    memcpy_s = min(copy.seconds() for _ in range(2))  # the first may have to warm the caches
    answers = learner.publish(version, [server.endpoint])
    report = answers[0]["report"]
    errors = [found["error"] for found in report["servers"] if not found["verified"]]
    if errors:
        raise RuntimeError(f"version {version} was not verified: {errors}")
    start = time.perf_counter()
    label = server.first_token()
    token_s = time.perf_counter() - start
    if label != report["servers"][0]["label"]:
        raise RuntimeError(f"a token after version {version} was verified is of {label}")
    began = max(answer["start"] for answer in answers)
    return Sync(began, answers[0]["end"], memcpy_s, token_s, report)


def _stalls(
    learner: Learner, server: Server, versions: Iterator[int], num_syncs: int
) -> list[float]:
    """For each sync with a response under way, how much longer than usual its next token took."""
    arrived: list[float] = []

    def listen() -> None:
        arrived.extend(server.stream(STREAM_TOKENS))

    listener = threading.Thread(target=listen, daemon=True)
    listener.start()
    time.sleep(2.0)
    spans = []
    for _ in range(num_syncs):
        answers = learner.publish(next(versions), [server.endpoint])
        spans.append((min(a["start"] for a in answers), answers[0]["end"]))
        time.sleep(1.0)
    server.post("/abort_request", {"abort_all": True})
    listener.join(60.0)
    gaps = [(a, b - a) for a, b in zip(arrived, arrived[1:], strict=False)]
    usual = median(gap for _, gap in gaps)
    return [
        max(gap for at, gap in gaps if at + gap >= start and at <= end) - usual
        for start, end in spans
    ]


def _count(learner: Learner, server: Server, version: int, counts: Path) -> Counted:
    """What one sync is made of, from a sync that is not timed."""
    answers = learner.publish(version, [server.endpoint], count=True)
    received = [int(line) for line in counts.read_text(encoding="ascii").split()]
    return Counted(
        tuple(answer["num_calls"] for answer in answers),
        tuple(received),
        tuple(route for answer in answers for route in answer["routes"]),
        server.num_mapped("megarl_"),
    )
