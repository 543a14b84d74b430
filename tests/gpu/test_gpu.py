"""The checks of `run.sh` as tests: on a GPU one by one, on a CPU all together and small."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.gpu.check import CHECKS

ROOT = Path(__file__).parents[2]
GPU_S, DRY_S = 300, 240


def _lines(text: str) -> dict[str, dict[str, Any]]:
    """The checks' lines of JSON, by check."""
    lines = [json.loads(line) for line in text.splitlines() if line.startswith("{")]
    return {line["check"]: line for line in lines if "check" in line}


@pytest.mark.gpu
@pytest.mark.parametrize("check", CHECKS)
def test_check_holds_on_this_gpu(check: str) -> None:
    command = [sys.executable, "-m", "tests.gpu.check", "--only", check]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=GPU_S, check=False
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr[-4000:]}"


def test_every_check_runs_dry_on_a_cpu() -> None:
    done = subprocess.run(
        [ROOT / "tests/gpu/run.sh", "--dry", "--cycles", "2"],
        env={**os.environ, "PYTHON": sys.executable},
        capture_output=True,
        text=True,
        timeout=DRY_S,
        check=False,
    )
    lines = _lines(done.stdout)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr[-4000:]}"
    assert tuple(lines) == CHECKS and all(line["ok"] for line in lines.values())
    assert lines["copies"]["figures"]["copies_of_a_layer"] <= 10
    assert lines["cycle"]["figures"]["cycles"] == 2
    assert lines["ipc"]["figures"]["handles_open"] == 0


def test_without_a_gpu_nothing_is_called_a_success() -> None:
    command = [sys.executable, "-m", "tests.gpu.check", "--only", "ipc"]
    done = subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=DRY_S,
        check=False,
    )
    assert done.returncode == 2 and "nothing was checked" in done.stderr
