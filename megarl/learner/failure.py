"""Which rank failed first, and the one account of it, such as RUN/logs/learner-failure.json.

Pure but for reading memory counters: exit codes and phase files in, a verdict out. No torch.
"""

from __future__ import annotations

import signal
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from megarl.learner.phases import RankPhase
from megarl.linux import available_bytes
from megarl.run_paths import LEARNER

_GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class Exit:
    """How one rank's process ended. `exitcode` is minus the signal's number where one ended it."""

    pid: int
    exitcode: int

    @property
    def signal_name(self) -> str:
        """Such as SIGKILL, or empty.

        >>> Exit(7, -9).signal_name, Exit(7, 1).signal_name
        ('SIGKILL', '')
        """
        if self.exitcode >= 0:
            return ""
        try:
            return signal.Signals(-self.exitcode).name
        except ValueError:
            return f"signal {-self.exitcode}"


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes: of the rank when it entered its last phase, and what the host had left afterwards."""

    rss_bytes: int
    peak_rss_bytes: int
    host_available_bytes: int
    cgroup_oom_kills: int


@dataclass(frozen=True, slots=True)
class Failure:
    """The first failing rank. `text` is the account in one line."""

    rank: int
    host: str
    pid: int
    exitcode: int
    signal: str
    verb: str
    phase: str
    memory: Memory
    error: str
    text: str

    def facts(self) -> dict[str, object]:
        """As JSON."""
        return asdict(self)


def first_failure(
    exits: Mapping[int, Exit], phases: Mapping[int, RankPhase]
) -> tuple[int, Exit] | None:
    """The rank to blame, with its exit; None where every failed rank only lost a peer elsewhere.

    A rank that lost a peer, or that the launcher ended with SIGTERM, is not a cause, unless it had
    met an error of its own before. Among causes the earliest known comes first.

    >>> at = lambda rank, error="", lost=False: RankPhase(
    ...     rank, 7, "n1", "step", "forward", 5.0, 1, error=error, lost_peer=lost)
    >>> first_failure({0: Exit(6, 1), 1: Exit(7, -9)}, {0: at(0, "closed", True), 1: at(1)})
    (1, Exit(pid=7, exitcode=-9))
    >>> first_failure({0: Exit(6, -15), 1: Exit(7, 1)}, {0: at(0), 1: at(1, "ValueError: x")})
    (1, Exit(pid=7, exitcode=1))
    >>> first_failure({0: Exit(6, 1)}, {0: at(0, "closed", True)}) is None
    True
    """
    causes = []
    for rank, end in exits.items():
        phase = phases.get(rank)
        has_error = bool(phase and phase.error and not phase.lost_peer)
        lost_peer = bool(phase and phase.lost_peer)
        ended_by_launcher = end.exitcode == -signal.SIGTERM
        if has_error or not (lost_peer or ended_by_launcher):
            killed = end.exitcode < 0 and not ended_by_launcher
            causes.append((not killed, phase.since if phase else 0.0, rank))
    if not causes:
        return None
    rank = min(causes)[2]
    return rank, exits[rank]


def describe(
    rank: int,
    end: Exit,
    phase: RankPhase | None,
    host: str,
    memory: Memory,
    now: float,
    role: str = LEARNER,
) -> Failure:
    """The account of one rank's end. `now` is in Unix seconds."""
    verb, step, error, place = "", "", "", "an unknown phase"
    if phase is not None:
        verb, step, error, host = phase.verb, phase.phase, phase.error, phase.host
        place = f"{phase.place} for {max(0.0, now - phase.since):.1f} s"
    how = f"was ended by {end.signal_name}" if end.signal_name else f"exited with {end.exitcode}"
    held, left = memory.rss_bytes / _GIB, memory.host_available_bytes / _GIB
    text = (
        f"{role} rank {rank} (host {host}, pid {end.pid}) {how} in {place}; "
        f"it held {held:.2f} GiB, its host has {left:.1f} GiB left"
    )
    if memory.cgroup_oom_kills:
        text += f"; the kernel killed {memory.cgroup_oom_kills} processes here for lack of memory"
    if error:
        text += f": {error}"
    signal_name = end.signal_name
    return Failure(rank, host, end.pid, end.exitcode, signal_name, verb, step, memory, error, text)


def memory_now(phase: RankPhase | None, oom_kills_before: int) -> Memory:
    """The rank's memory by its phase file, and the host's by the kernel."""
    return Memory(
        phase.rss_bytes if phase else 0,
        phase.peak_rss_bytes if phase else 0,
        available_bytes(),
        max(0, cgroup_oom_kills() - oom_kills_before),
    )


def cgroup_oom_kills() -> int:
    """Processes of this cgroup that the kernel has ended for lack of memory; 0 where unknown."""
    try:
        group = Path("/proc/self/cgroup").read_text().strip().rpartition("::")[2]
        lines = Path(f"/sys/fs/cgroup{group}/memory.events").read_text().splitlines()
    except OSError:
        return 0
    counts = dict(line.split() for line in lines)
    return int(counts.get("oom_kill", 0))
