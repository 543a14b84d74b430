"""Roles as steps of the surrounding Slurm job, and when that job ends.

Owns the srun command line and how a step is ended.

What was seen of srun (22.05): it hands the end of its own standard input to every task, which is
how a warden is asked to end; at SIGTERM it kills the step's tasks at once, with all below them;
when it is killed itself, Slurm ends the step; --kill-on-bad-exit sends the other tasks SIGTERM,
then SIGKILL.

scancel of a job sends SIGTERM to srun as well, so that wardens die before they have looked at
/dev/shm; the controller then removes what the run itself put there on its node, an engine's own
leftovers stay.
"""

from __future__ import annotations

import logging
import signal
import subprocess
from collections.abc import Mapping, Sequence
from datetime import datetime

from megarl.launch.process import Process
from megarl.nodes import Seat

log = logging.getLogger(__name__)

ANSWER_S = 30.0  # for Slurm's controller to say when a job ends


def end_time_s(environment: Mapping[str, str]) -> float | None:
    """When the surrounding Slurm job reaches its time limit, in seconds since 1970.

    None outside a job, and where Slurm does not say, or knows no limit. Slurm from 23.02 on has it
    in the environment; an older one is asked.
    """
    if "SLURM_JOB_ID" not in environment:
        return None
    known = environment.get("SLURM_JOB_END_TIME", "")
    if known.isdecimal():
        return float(known)
    ask = ["squeue", "--noheader", f"--jobs={environment['SLURM_JOB_ID']}", "--format=%e"]
    try:
        said = subprocess.run(ask, capture_output=True, text=True, timeout=ANSWER_S, check=True)
        return datetime.fromisoformat(said.stdout.strip()).timestamp()
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        log.warning("the job's end is unknown, nothing is saved before it why=%s", error)
        return None


def time_limit_s(environment: Mapping[str, str]) -> float | None:
    """For how long the surrounding Slurm job may run. None where the environment does not say."""
    begin, end = (environment.get(f"SLURM_JOB_{which}_TIME", "") for which in ("START", "END"))
    is_known = "SLURM_JOB_ID" in environment and begin.isdecimal() and end.isdecimal()
    return float(end) - float(begin) if is_known else None


class SlurmSteps:
    """Commands run as one task on each node of the seat, in a step that shares the job's
    resources.
    """

    death_signal: int | None = None  # any signal would kill the wardens before they have cleaned up

    def command(self, seat: Seat, name: str, argv: Sequence[str]) -> list[str]:
        """The srun command of one step."""
        count = len(seat.nodes)
        return [
            "srun",
            "--overlap",
            f"--job-name={name}",
            f"--nodes={count}",
            f"--ntasks={count}",
            "--ntasks-per-node=1",
            f"--nodelist={','.join(node.name for node in seat.nodes)}",
            "--export=ALL",
            "--cpu-bind=none",  # one task starts many ranks; they share the job's cores of the node
            "--kill-on-bad-exit=1",
            "--unbuffered",
            *argv,
        ]

    def kill(self, process: Process) -> None:
        """End the step by force."""
        process.signal(signal.SIGTERM)
