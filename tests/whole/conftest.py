"""Starts `megarl train` on the quickstart as a user does, and looks at what it leaves."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

ROOT = Path(__file__).parents[2]
QUICKSTART = ROOT / "examples" / "quickstart.toml"
START_S = 180.0
Rows = list[dict[str, Any]]


class Run:
    """One `megarl train` of an example in a folder of its own, started as often as wanted."""

    def __init__(self, folder: Path, *settings: str, example: Path = QUICKSTART) -> None:
        self.dir = folder / example.stem
        self._command = [sys.executable, "-m", "megarl", "train", str(example)]
        self._command += ["--run.dir", str(folder), "--eval.max_prompts", "16", *settings]
        self._output = folder / "output.txt"
        self._temp = tempfile.mkdtemp(prefix="run")  # its path is short, as sockets need it
        self.process: subprocess.Popen[bytes] | None = None

    def add(self, *settings: str) -> None:
        """Have the next start take these settings too."""
        self._command += settings

    def start(self) -> None:
        """Start, or continue, without waiting."""
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": self._temp}
        with self._output.open("ab") as output:
            self.process = subprocess.Popen(
                self._command,
                stdout=output,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                cwd=ROOT,
                env=environment,
                start_new_session=True,
            )

    def wait(self, timeout_s: float = 300.0) -> int:
        """The exit status."""
        assert self.process is not None
        return self.process.wait(timeout_s)

    def finish(self, timeout_s: float = 300.0) -> Rows:
        """Run to the end, which must be a success; the steps' numbers."""
        self.start()
        status = self.wait(timeout_s)
        assert status == 0, self.output
        return self.rows

    @property
    def id(self) -> str:
        """Of its last start."""
        return str(json.loads((self.dir / "run.lock").read_text())["run_id"])

    @property
    def output(self) -> str:
        """What it printed."""
        return self._output.read_text(errors="replace")

    @property
    def rows(self) -> Rows:
        """The finished steps."""
        path = self.dir / "metrics.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    @property
    def events(self) -> Rows:
        """The run's events."""
        path = self.dir / "events.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def is_saved(self, version: int) -> bool:
        """Whether the checkpoint of a version, or one that took its place, is whole by now."""
        folders = (self.dir / "checkpoints").glob("v??????/COMPLETE")
        return any(int(path.parent.name[1:]) >= version for path in folders)

    def until(self, happened: Callable[[], bool], timeout_s: float = START_S) -> None:
        """Wait for something of a run that must go on meanwhile."""
        assert self.process is not None
        deadline_s = time.monotonic() + timeout_s
        while not happened():
            assert self.process.poll() is None, self.output
            assert time.monotonic() < deadline_s, self.output
            time.sleep(0.05)

    def processes(self) -> list[psutil.Process]:
        """All that is alive of this run: it names the run's folder, or descends from it."""
        found = []
        for process in psutil.process_iter():
            try:
                words = process.cmdline() + list(process.environ().values())
            except psutil.Error:
                continue
            if any(str(self.dir) in word for word in words):
                found.append(process)
        if self.process is not None and self.process.poll() is None:
            found += psutil.Process(self.process.pid).children(recursive=True)
        return list({process.pid: process for process in found}.values())

    def left_in_temp(self) -> list[str]:
        """What is left in the temp folder, but for what torch compiled."""
        return [name for name in os.listdir(self._temp) if not name.startswith("torchinductor_")]

    def stop(self) -> None:
        """Leave nothing running, whatever happened."""
        for process in self.processes():
            process.kill()
        if self.process is not None and self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        shutil.rmtree(self._temp, ignore_errors=True)


@pytest.fixture
def quickstart(tmp_path: Path) -> Iterator[Callable[..., Run]]:
    """Makes runs; all of them are stopped at the end."""
    made: list[Run] = []

    def make(*settings: str, example: Path = QUICKSTART) -> Run:
        folder = tmp_path / f"runs{len(made)}"
        folder.mkdir()
        made.append(Run(folder, *settings, example=example))
        return made[-1]

    yield make
    for run in made:
        run.stop()
