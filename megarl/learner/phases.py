"""Where each learner rank is: one small file per rank, rewritten at every change of phase.

Owns the format of RUN/logs/learner-rank{r}.phase, and of a critic's. Read by the launcher after a
death and by rank 0 when a verb is late. Imports neither torch nor megatron, and knows nothing of
what a phase does.
"""

from __future__ import annotations

import json
import logging
import os
import re
import threading
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path

from megarl import run_paths
from megarl.linux import memory_bytes
from megarl.nodes import node_name

log = logging.getLogger(__name__)

IDLE = "idle"


@dataclass(frozen=True, slots=True)
class RankPhase:
    """What a rank was doing at `since` (Unix seconds), the start of its current phase.

    `verb` is the running verb, or the last one where `phase` is "idle"; `sequence` counts verbs
    from 1. `error` is the first error that this rank met, empty where none; `lost_peer` says that
    it was only the loss of another rank, so not the first cause. Memory is that at `since`.
    """

    rank: int
    pid: int
    host: str
    verb: str
    phase: str
    since: float
    sequence: int = 0
    rss_bytes: int = 0
    peak_rss_bytes: int = 0
    error: str = ""
    lost_peer: bool = False

    @property
    def place(self) -> str:
        """Verb and phase as one name.

        >>> RankPhase(1, 7, "n1", "step", "optimizer", 0.0).place
        'step/optimizer'
        >>> RankPhase(1, 7, "n1", "step", "idle", 0.0).place
        'idle after step'
        """
        if self.phase == IDLE:
            return f"idle after {self.verb}"
        return f"{self.verb}/{self.phase}"


class PhaseFile:
    """This rank's phase, mirrored to its file. Every write replaces the file whole."""

    def __init__(self, logs: Path, rank: int, role: str = run_paths.LEARNER) -> None:
        logs.mkdir(parents=True, exist_ok=True)
        self._path = phase_path(logs, rank, role)
        self._lock = threading.Lock()  # rank 0's HTTP thread reports a late verb
        self.current = RankPhase(
            rank, os.getpid(), node_name(os.environ), "start", "importing", time.time()
        )
        self._write(self.current)

    def begin(self, verb: str, sequence: int) -> None:
        """Verb number `sequence` starts on this rank."""
        self._change(verb=verb, phase="begin", sequence=sequence)

    def mark(self, phase: str) -> None:
        """The running verb enters `phase`. Costs about 0.1 ms on a local disk."""
        self._change(phase=phase)

    def idle(self) -> None:
        """The running verb has ended on this rank."""
        self._change(phase=IDLE)

    def fail(self, error: str, lost_peer: bool) -> None:
        """Record the first error of this rank; later ones do not replace it."""
        if not self.current.error:
            self._change(error=error, lost_peer=lost_peer)

    def forgive(self) -> None:
        """Drop a recorded error that the service has answered and survives."""
        self._change(error="", lost_peer=False)

    def _change(self, **facts: object) -> None:
        with self._lock:
            if "phase" in facts:
                rss_bytes, peak_rss_bytes = memory_bytes()
                facts |= {
                    "since": time.time(),
                    "rss_bytes": rss_bytes,
                    "peak_rss_bytes": max(peak_rss_bytes, self.current.peak_rss_bytes),
                }
            self.current = replace(self.current, **facts)  # type: ignore[arg-type]
            self._write(self.current)

    def _write(self, phase: RankPhase) -> None:
        try:
            write_json(self._path, asdict(phase))
        except OSError as error:  # a full disk: whoever saves says so, and is not to die of this
            log.warning("phase not written file=%s error=%s", self._path, error)


def phase_path(logs: Path, rank: int, role: str = run_paths.LEARNER) -> Path:
    """The phase file of one rank."""
    return logs / f"{role}-rank{rank}.phase"


def read_phases(logs: Path, role: str = run_paths.LEARNER) -> dict[int, RankPhase]:
    """Every rank's last phase, by rank. A file that is not readable is left out."""
    names = {field.name for field in fields(RankPhase)}
    phases = {}
    for path in logs.glob(f"{role}-rank*.phase"):
        if not re.fullmatch(rf"{role}-rank\d+\.phase", path.name):
            continue
        try:
            facts = json.loads(path.read_text())
            phase = RankPhase(**{name: facts[name] for name in names})
        except (OSError, ValueError, KeyError, TypeError):
            continue
        phases[phase.rank] = phase
    return dict(sorted(phases.items()))


def remove_old(run_dir: Path, role: str = run_paths.LEARNER) -> None:
    """Drop what an earlier learner of this run left: it would be taken for this one's."""
    for path in (run_dir / run_paths.LOGS).glob(f"{role}-rank*"):
        path.unlink(missing_ok=True)
    (run_dir / run_paths.failure(role)).unlink(missing_ok=True)
    (run_dir / run_paths.endpoint(role)).unlink(missing_ok=True)


def describe_late(phases: Mapping[int, RankPhase], world_size: int, sequence: int) -> str:
    """Who has not finished verb number `sequence`, and where each of them is.

    >>> at = lambda rank, phase, seq: RankPhase(rank, 7, "n1", "step", phase, time.time(), seq)
    >>> describe_late({0: at(0, "idle", 4), 1: at(1, "forward", 4)}, 3, 4)
    'rank 1 (host n1, pid 7, in step/forward for 0 s), rank 2 (no phase file)'
    """
    late = []
    for rank in range(world_size):
        phase = phases.get(rank)
        if phase is None:
            late.append(f"rank {rank} (no phase file)")
        elif phase.sequence < sequence or phase.phase != IDLE:
            who = f"host {phase.host}, pid {phase.pid}"
            late.append(
                f"rank {rank} ({who}, in {phase.place} for {time.time() - phase.since:.0f} s)"
            )
    return ", ".join(late) or "no rank: all have finished, only the answer is missing"


def write_json(path: Path, value: object, mode: int = 0o644) -> None:
    """Write JSON so that a reader sees the old file or the new one, never a part."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode)
    with os.fdopen(descriptor, "w") as file:
        json.dump(value, file)
    os.replace(temporary, path)
