"""Starts the learner and the rollout servers of one run on their nodes, and ends them all.

The same on one machine and under Slurm but for one value, `Steps`: how a command reaches a node.
Each engine process runs below a warden on its node (`warden.py`), which leaves nothing of it
behind. Knows nothing of what the engines do.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

from megarl import ports, run_paths
from megarl.config.schema import Config
from megarl.errors import LaunchError
from megarl.launch.process import Process, start
from megarl.launch.topology import Topology
from megarl.launch.warden import NODE_RANK
from megarl.nodes import ADDRESS_VARIABLE, NODE_VARIABLE, RUN_ID_VARIABLE, Seat
from megarl.run_paths import CRITIC, LEARNER

LEARNER_GRACE_S = 4.0  # its launcher takes 3 s to end ranks that ignore SIGTERM
END_S = 8.0  # to end by themselves; Ctrl-C has 15 s in all
KILL_S = 4.0


class Steps(Protocol):
    """How a command reaches the nodes of a seat, and how it is ended by force."""

    death_signal: int | None
    """Sent to each command when the controller dies; None where the closed pipe must do."""

    def command(self, seat: Seat, name: str, argv: Sequence[str]) -> list[str]:
        """`argv` once on each node of `seat`, as one command to run here."""

    def kill(self, process: Process) -> None:
        """End what `command` made, with everything below it on its nodes, now."""


class Launcher:
    """The engine processes of one run. `sweep_run_ids`: whose shared memory goes when the learner
    ends.
    """

    def __init__(
        self,
        config: Config,
        run_dir: Path,
        topology: Topology,
        steps: Steps,
        sweep_run_ids: Sequence[str],
    ) -> None:
        self.topology = topology
        self._config = config
        self._run_dir = run_dir
        self._steps = steps
        self._run_ids = tuple(sweep_run_ids)
        self._processes: list[Process] = []
        self._closed = False

    async def start_learner(self) -> Process:
        """Start the learner's ranks; its service writes RUN/endpoints/learner.json when it is
        ready.
        """
        sweeps = [f"--sweep-run={run_id}" for run_id in self._run_ids]
        return await self._start_ranks(LEARNER, self.topology.learner, sweeps)

    async def start_critic(self) -> Process:
        """Start the ranks of a critic that has its own, as the learner's; they share no memory."""
        assert self.topology.critic is not None
        return await self._start_ranks(CRITIC, self.topology.critic)

    async def _start_ranks(self, role: str, seat: Seat, options: Sequence[str] = ()) -> Process:
        argv = learner_command(self._config, self._run_dir, seat, role)
        log_path = self._run_dir / run_paths.LOGS / f"{role}.log"
        env = {ADDRESS_VARIABLE: seat.address}
        return await self._start(role, seat, argv, env, log_path, LEARNER_GRACE_S, options)

    async def spawn(
        self, argv: Sequence[str], env: Mapping[str, str], name: str, log_path: Path
    ) -> Process:
        """Start rollout server `name`, such as server-0, at its seat: rollout/server.py's `Spawn`.

        `env` is added to this process's environment.
        """
        seat = self.topology.servers[int(name.rpartition("-")[2])]
        return await self._start(name, seat, argv, env, log_path, grace_s=0.0)

    async def _start(
        self,
        name: str,
        seat: Seat,
        argv: Sequence[str],
        env: Mapping[str, str],
        log_path: Path,
        grace_s: float,
        options: Sequence[str] = (),
    ) -> Process:
        if self._closed:
            raise LaunchError(f"{name}: not started, the run is ending")
        warden = [sys.executable, "-m", "megarl.launch.warden", f"--grace-s={grace_s}", *options]
        gpus = "none" if seat.gpus is None else f"{seat.gpus[0]}:{seat.gpus[1]}"
        warden.append(f"--gpus={gpus}")
        command = self._steps.command(seat, name, [*warden, "--", *argv])
        full_env = {
            **os.environ,
            "PYTHONUNBUFFERED": "1",
            RUN_ID_VARIABLE: self._run_ids[0],
            # Of several nodes each has its own name from Slurm.
            NODE_VARIABLE: seat.nodes[0].name if len(seat.nodes) == 1 else "",
            **env,
        }
        process = await start(
            name, command, full_env, log_path, self._steps.death_signal, self._steps.kill
        )
        self._processes.append(process)
        return process

    async def end_all(self) -> None:
        """End everything that runs, in END_S by asking and KILL_S more by force. Nothing starts
        after.
        """
        self.ask_all_to_end()
        await self._wait(END_S)
        self.kill_all()
        await self._wait(KILL_S)

    def ask_all_to_end(self) -> None:
        """Ask everything to end, without waiting. Nothing starts after."""
        self._closed = True
        for process in self._running():
            process.ask_to_end()

    def kill_all(self) -> None:
        """End everything by force, without waiting."""
        self._closed = True
        for process in self._running():
            process.force()

    def _running(self) -> list[Process]:
        return [process for process in self._processes if process.returncode is None]

    async def _wait(self, limit_s: float) -> None:
        if running := self._running():
            await asyncio.wait([asyncio.create_task(p.wait()) for p in running], timeout=limit_s)


def learner_command(config: Config, run_dir: Path, seat: Seat, role: str = LEARNER) -> list[str]:
    """The command of the learner on each of its nodes, or of a critic's ranks."""
    python = config.launch.learner_python or sys.executable
    argv = [python, "-m", "megarl.learner.agent"]
    argv += ["--config", str(run_dir / run_paths.SETTINGS), "--run-dir", str(run_dir)]
    argv += ["--role", role] if role != LEARNER else []
    if len(seat.nodes) > 1:
        rendezvous = f"{seat.address}:{ports.free_port(seat.address)}"
        argv += ["--nnodes", str(len(seat.nodes)), "--node-rank", NODE_RANK, "--rdzv", rendezvous]
    return argv
