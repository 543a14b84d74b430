"""What a person sees while a run goes on: one live line, and a table at the end.

On a terminal the line is rewritten in place; elsewhere a line is printed now and then. Knows metric
names only to show them.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

from megarl import run_paths

LINE_EVERY_S = 10.0  # where the output is no terminal
STAGES = ("rollout", "learn", "weight_sync")
MISMATCH = "mismatch/max_abs_logprob"
TABLE_STEPS = 10  # rewards at the start and at the end are means over so many steps


class Progress:
    """Shows the newest step; `total` is the number of steps of the run."""

    def __init__(self, total: int, out: TextIO | None = None) -> None:
        self._total = total
        self._out = out or sys.stderr
        self._live = self._out.isatty()
        self._shown_s = -LINE_EVERY_S
        self._width = 0

    def note(self, text: str) -> None:
        """Say something that stays."""
        self._clear()
        print(text, file=self._out, flush=True)

    def step(self, values: Mapping[str, Any]) -> None:
        """Show one finished step."""
        line = progress_line(values, self._total)
        last = values["step"] + 1 >= self._total
        if self._live:
            self._out.write("\r" + line.ljust(self._width))
            self._width = len(line)
            if last:
                self._out.write("\n")
                self._width = 0
            self._out.flush()
        elif last or time.monotonic() - self._shown_s >= LINE_EVERY_S:
            self._shown_s = time.monotonic()
            print(line, file=self._out, flush=True)

    def _clear(self) -> None:
        if self._live and self._width:
            self._out.write("\r" + " " * self._width + "\r")
            self._width = 0


def progress_line(values: Mapping[str, Any], total: int) -> str:
    """One step in one line.

    >>> progress_line({"step": 4, "reward/mean": 0.25, "time/step_s": 0.5, "time/rollout_s": 0.3,
    ...     "tokens/generated_per_s": 2048.2, "buffer/staleness": 0,
    ...     "mismatch/mean_abs_logprob": 2.1e-07}, 300)
    'step 5/300  reward 0.250  0.50 s (rollout 0.30)  2048 tok/s  stale 0  mismatch 2.1e-07'
    >>> progress_line({"step": 0, "time/step_s": 0.5, "reward/failed": 0.5, "reward/timeout": 0.25},
    ...     9)
    'step 1/9  reward   -    0.50 s ()  0 tok/s  stale 0  no reward for 75%'
    """
    seconds = {stage: values.get(f"time/{stage}_s") for stage in STAGES}
    times = " ".join(f"{stage} {took_s:.2f}" for stage, took_s in seconds.items() if took_s)
    reward = values.get("reward/mean")
    parts = [
        f"step {values['step'] + 1}/{total}",
        "reward   -  " if reward is None else f"reward {reward:.3f}",
        f"{values['time/step_s']:.2f} s ({times})",
        f"{values.get('tokens/generated_per_s', 0):.0f} tok/s",
        f"stale {values.get('buffer/staleness', 0)}",
    ]
    if "mismatch/mean_abs_logprob" in values:
        parts.append(f"mismatch {values['mismatch/mean_abs_logprob']:.1e}")
    if lost := values.get("reward/failed", 0.0) + values.get("reward/timeout", 0.0):
        parts.append(f"no reward for {lost:.0%}")
    if "eval/accuracy" in values:
        parts.append(f"accuracy {values['eval/accuracy']:.3f}")
    return "  ".join(parts)


def _mean(values: Sequence[float]) -> str:
    return f"{sum(values) / len(values):.3f}" if values else "-"


def end_table(rows: Sequence[Mapping[str, Any]], run_dir: Path) -> str:
    """The first and last rewards and accuracies of a run, and where everything was written."""
    rewards = [row["reward/mean"] for row in rows if row.get("reward/mean") is not None]
    accuracies = [row["eval/accuracy"] for row in rows if "eval/accuracy" in row]
    mismatch = [row[MISMATCH] for row in rows if MISMATCH in row]
    steps = min(TABLE_STEPS, (len(rewards) + 1) // 2)  # a short run is not compared with itself
    lines = [
        f"{'':<34}{'first':>10}{'last':>10}",
        f"{f'mean reward, {steps} steps':<34}{_mean(rewards[:steps]):>10}"
        f"{_mean(rewards[len(rewards) - steps :]):>10}",
    ]
    lost = [row.get("reward/failed", 0.0) + row.get("reward/timeout", 0.0) for row in rows]
    if any(lost):
        lines.append(f"{'share of samples without a reward':<34}{_mean(lost):>20}")
    if accuracies:
        last = f"{accuracies[-1]:.3f}" if len(accuracies) > 1 else "-"  # it ended before another
        lines.append(f"{'greedy accuracy, held out':<34}{accuracies[0]:>10.3f}{last:>10}")
    if mismatch:
        lines.append(f"{'largest log-prob mismatch, nats':<34}{'':>10}{max(mismatch):>10.1e}")
    seconds = sum(row.get("time/step_s", 0.0) for row in rows)
    lines.append(f"{'steps, and their time':<34}{len(rows):>10}{f'{seconds:.0f} s':>10}")
    width = max(len(line) for line in lines)
    where = [
        ("metrics", run_paths.METRICS),
        ("settings", run_paths.SETTINGS),
        ("samples", f"{run_paths.ROLLOUTS}/"),
        ("checkpoints", f"{run_paths.CHECKPOINTS}/"),
        ("logs", f"{run_paths.LOGS}/"),
    ]
    if (run_dir / run_paths.EXPORTS).is_dir():
        where.insert(-1, ("exports", f"{run_paths.EXPORTS}/"))
    lines += ["-" * width, *(f"{name:<14}{run_dir / file}" for name, file in where)]
    return "\n".join(lines)
