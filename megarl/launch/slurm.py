"""Roles as steps of the surrounding Slurm job. Owns the srun command line and how a step is ended.

What was seen of srun (22.05): it hands the end of its own standard input to every task, which is
how a warden is asked to end; at SIGTERM it kills the step's tasks at once, with all below them;
when it is killed itself, Slurm ends the step; --kill-on-bad-exit sends the other tasks SIGTERM,
then SIGKILL.

scancel of a job sends SIGTERM to srun as well, so that wardens die before they have looked at
/dev/shm; the controller then removes what the run itself put there on its node, an engine's own
leftovers stay.
"""

from __future__ import annotations

import signal
from collections.abc import Sequence

from megarl.launch.process import Process
from megarl.nodes import Seat


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
