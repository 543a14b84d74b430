"""Starts what is measured, each in processes of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.training import lengths, model

ROOT = Path(__file__).parents[2]
MAX_TOKENS = 1024  # of a microbatch of the timed steps


def steps(num_samples: int, num_steps: int, ranks: int, file: Path | None) -> dict[str, Any]:
    """Seconds of each way's steps, on `ranks` data-parallel ranks."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        config = {
            "actor": {"model": str(model.write(folder / "model"))},
            "learner": {
                "max_tokens_per_microbatch": MAX_TOKENS,
                "precision": {"params": "fp32"},
                "optimizer": {"lr": 1e-5},
            },
            "placement": {"learner_gpus": ranks},
            "weight_sync": {"shared_weights": False},
        }
        drawn = lengths.draw(num_samples, seed=0, file=file)
        fitting = [(p, min(r, MAX_TOKENS - p)) for p, r in drawn]
        written = folder / "settings.json"
        written.write_text(json.dumps({"config": config, "lengths": fitting, "steps": num_steps}))
        launcher = ("torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}")
        return _run("-m", *launcher, "-m", "benchmarks.training.ranks", str(written))


def saves(num_turns: int, ranks: int, sizes: dict[str, int]) -> list[dict[str, float]]:
    """Seconds of saves of a model of these sizes, waited for and beside steps, by turn."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        config = {
            "actor": {"model": str(model.write(folder / "model", **sizes))},
            "learner": {
                "max_tokens_per_microbatch": MAX_TOKENS,
                "parallel": {"tp": ranks},
                "precision": {"params": "fp32"},
                "optimizer": {"lr": 1e-5},
            },
            "placement": {"learner_gpus": ranks},
        }
        written = folder / "settings.json"
        few = [(16, 48)] * 4
        written.write_text(json.dumps({"config": config, "lengths": few, "turns": num_turns}))
        launcher = ("torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}")
        found: Any = _run("-m", *launcher, "-m", "benchmarks.training.saving", str(written))
        return list(found)


def peaks(num_tokens: int, vocabulary: int) -> dict[str, dict[str, Any]]:
    """Peak memory of each way's log-probs."""
    sizes = ("--tokens", str(num_tokens), "--vocabulary", str(vocabulary))
    return {way: _run("-m", "benchmarks.training.peak", way, *sizes) for way in ("naive", "megarl")}


def _run(*arguments: str) -> dict[str, Any]:
    """The JSON object in the last line that a Python prints; its errors go to ours."""
    done = subprocess.run(
        [sys.executable, *arguments],
        capture_output=True,
        text=True,
        cwd=ROOT,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
    )
    if done.returncode:
        raise SystemExit(
            f"{' '.join(arguments)} ended with {done.returncode}:\n{done.stderr[-4000:]}"
        )
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found
