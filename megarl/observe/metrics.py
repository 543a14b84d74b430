"""What a run measured: one object a step into `metrics.jsonl`, and the same to Weights & Biases.

Owns names of files and the step's timer. Knows nothing of what the numbers mean.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

from megarl import run_paths
from megarl.actor.config_fields import is_integer

log = logging.getLogger(__name__)

WANDB_SERVICE = "WANDB_SERVICE"  # where a process finds the service that its parent started
Value = float | int | str


class StepMetrics:
    """The numbers of one pass of the loop, filled while it runs."""

    def __init__(self, step: int, version: int) -> None:
        self.values: dict[str, Value] = {"step": step, "version": version}
        self._started_s = time.perf_counter()

    def add(self, values: Mapping[str, Value]) -> None:
        """Set values; a later one of the same name replaces the earlier."""
        self.values.update(values)

    @contextlib.contextmanager
    def timed(self, stage: str) -> Iterator[None]:
        """Add the time spent inside to `time/<stage>_s`."""
        started_s = time.perf_counter()
        try:
            yield
        finally:
            name = f"time/{stage}_s"
            before_s = float(self.values.get(name, 0.0))
            self.values[name] = before_s + time.perf_counter() - started_s

    def close(self) -> None:
        """Set the time of the whole step, `time/step_s`, and its rate, `tokens/generated_per_s`."""
        took_s = time.perf_counter() - self._started_s
        self.values["time/step_s"] = took_s
        if "tokens/generated" in self.values:
            self.values["tokens/generated_per_s"] = float(self.values["tokens/generated"]) / took_s


class MetricsLog:
    """Appends steps to `RUN/metrics.jsonl`; events that are no step go to `RUN/events.jsonl`."""

    def __init__(self, run_dir: Path, wandb: WandbRun | None = None) -> None:
        self._path = run_dir / run_paths.METRICS
        self._events = run_dir / "events.jsonl"
        self._wandb = wandb

    def write(self, step: StepMetrics) -> None:
        """Append one step's object, whole."""
        with self._path.open("a") as file:
            file.write(json.dumps(step.values) + "\n")
        if self._wandb:
            self._wandb.log(step.values)

    def event(self, kind: str, **facts: Value) -> None:
        """Append one event with the time of day in seconds since 1970."""
        with self._events.open("a") as file:
            file.write(json.dumps({"time_s": round(time.time(), 3), "event": kind, **facts}) + "\n")

    def rows(self) -> list[dict[str, Any]]:
        """All steps so far; a last line that was cut by a kill is left out."""
        return read_rows(self._path)

    def keep_before(self, step: int) -> int:
        """Drop the steps from `step` on, which a resumed run does again; returns how many.

        A last line that a kill cut short goes too.
        """
        rows = self.rows()
        kept = [row for row in rows if row["step"] < step]
        partial = self._path.with_suffix(".partial")
        partial.write_text("".join(json.dumps(row) + "\n" for row in kept))
        partial.replace(self._path)
        return len(rows) - len(kept)


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The objects of a JSONL file of metrics, in order; none where it does not exist.

    What is no object with a step is left out.
    """
    if not path.exists():
        return []
    rows = []
    for line in path.read_text(errors="replace").splitlines():
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            row = None
        if isinstance(row, dict) and is_integer(row.get("step")):
            rows.append(row)
        else:
            log.warning("metrics line dropped file=%s bytes=%d", path, len(line))
    return rows


@contextlib.contextmanager
def _service_of_its_own() -> Iterator[None]:
    """Have wandb start a service inside, in Python's temp folder, whatever the environment says.

    A service that it names is of a process that started this one, and may have ended; nor are
    processes that this one starts to use ours.
    """
    before = {name: os.environ.pop(name, None) for name in ("TMPDIR", WANDB_SERVICE)}
    os.environ["TMPDIR"] = tempfile.gettempdir()
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


class WandbRun:
    """One Weights & Biases run; `offline` writes below the run folder and needs no network."""

    def __init__(self, run: Any) -> None:
        self._run = run

    @classmethod
    def start(
        cls, mode: Literal["off", "offline", "online"], run_dir: Path, settings: Mapping[str, Any]
    ) -> WandbRun | None:
        """The run, or None where it is off, or missing and not asked for by `online`."""
        if mode == "off":
            return None
        try:
            import wandb
        except ImportError:
            if mode == "online":
                raise
            log.info("wandb is not installed, metrics go to metrics.jsonl only")
            return None
        with _service_of_its_own():
            run = wandb.init(
                mode=mode,
                project="megarl",
                name=run_dir.name,
                dir=str(run_dir),
                config=dict(settings),
                settings=wandb.Settings(silent=True, console="off"),
            )
        return cls(run)

    def log(self, values: Mapping[str, Value]) -> None:
        """Send one step."""
        self._run.log(dict(values), step=int(values["step"]))

    def close(self) -> None:
        """Flush and end."""
        self._run.finish()
