"""Starts a learner through its launcher for a test, and ends it with everything it started."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil

from megarl.config.schema import DeadlineConfig
from megarl.learner.client import LearnerClient
from megarl.learner.phases import read_phases

ROOT = Path(__file__).parents[2]


def config_text(
    model: str = "none", tp: int = 2, pp: int = 1, gpus: int = 0, more: str = ""
) -> str:
    return f"""
[actor]
model = "{model}"
[learner.parallel]
tp = {tp}
pp = {pp}
[learner.precision]
params = "fp32"
[placement]
learner_gpus = {gpus}
{more}
"""


class RunningLearner:
    """One launcher and its ranks. `pids` are those of the ranks, once they are ready."""

    def __init__(
        self,
        run_dir: Path,
        config: str,
        module: str = "megarl.learner.agent",
        options: tuple[str, ...] = (),
    ) -> None:
        self.run_dir, self.failure_file = run_dir, run_dir / "logs" / "learner-failure.json"
        run_dir.mkdir(parents=True, exist_ok=True)
        (run_dir / "config.toml").write_text(config)
        self.log = run_dir / "launcher.log"
        paths = ("--config", str(run_dir / "config.toml"), "--run-dir", str(run_dir))
        with open(self.log, "ab") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-m", module, *paths, *options],
                cwd=ROOT,
                stdout=output,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
        self.family: set[psutil.Process] = {psutil.Process(self.process.pid)}

    def client(
        self, deadlines: DeadlineConfig | None = None, wait_s: float = 90.0
    ) -> LearnerClient:
        endpoint = self.run_dir / "endpoints" / "learner.json"
        deadline = time.monotonic() + wait_s
        while not endpoint.exists():
            assert self.process.poll() is None, self.log.read_text()[-4000:]
            assert time.monotonic() < deadline, self.log.read_text()[-4000:]
            time.sleep(0.05)
        self.look()
        facts = json.loads(endpoint.read_text())
        return LearnerClient(
            facts["url"], facts["api_key"], deadlines or DeadlineConfig(), self.failure_file
        )

    def look(self) -> None:
        """Remember every process below the launcher, to know later whether one is left."""
        try:
            self.family |= set(psutil.Process(self.process.pid).children(recursive=True))
        except psutil.NoSuchProcess:
            return

    def rank_pid(self, rank: int) -> int:
        return int(
            json.loads((self.run_dir / "logs" / f"learner-rank{rank}.phase").read_text())["pid"]
        )

    def idle_rank_pid(self, rank: int, limit_s: float = 60.0) -> int:
        """The process of a rank, once it waits for a verb: others may be done before it."""
        until = time.monotonic() + limit_s
        while not read_phases(self.run_dir / "logs")[rank].place.startswith("idle"):
            assert time.monotonic() < until, f"rank {rank} is busy"
            time.sleep(0.02)
        return self.rank_pid(rank)

    def failure(self, wait_s: float = 15.0) -> dict[str, object]:
        deadline = time.monotonic() + wait_s
        while not self.failure_file.exists():
            assert time.monotonic() < deadline, self.log.read_text()[-4000:]
            time.sleep(0.05)
        return dict(json.loads(self.failure_file.read_text()))

    def left(self) -> list[psutil.Process]:
        """Its processes that still run."""
        gone_states = (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
        running = []
        for process in self.family:
            try:
                if process.is_running() and process.status() not in gone_states:
                    running.append(process)
            except psutil.NoSuchProcess:
                continue
        return running

    def stop(self) -> None:
        self.look()
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(8)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        for process in self.left():
            process.kill()
