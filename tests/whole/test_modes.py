"""Whole runs whose servers get their weights by SGLang's own calls, or from disk."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors import safe_open

from tests.whole.conftest import Run

LAYOUT = ["--learner.parallel.tp", "2", "--rollout.servers", "2"]


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["hf", "disk"])
def test_three_steps_agree_on_log_probs_in_other_modes(
    quickstart: Callable[..., Run], tmp_path: Path, mode: str
) -> None:
    disk = ["--weight_sync.disk_dir", str(tmp_path / "shared")] if mode == "disk" else []
    run = quickstart("--loop.versions", "3", "--weight_sync.mode", mode, *disk, *LAYOUT)
    rows = run.finish()
    assert [row["step"] for row in rows] == [0, 1, 2]
    for row in rows:
        assert row["mismatch/mean_abs_logprob"] < 1e-4
        assert row["weight_sync/verified_servers"] == 2
        assert row["weight_sync/probe_max_abs_logprob"] < 1e-3
        assert row["grad_norm"] > 0
    assert f"mode={mode} " in (run.dir / "logs" / "learner.log").read_text()
    assert not run.processes()
    if mode == "disk":
        (folder,) = (tmp_path / "shared" / "quickstart").iterdir()
        assert folder.name.startswith("v000003-")
        with safe_open(folder / "model.safetensors", "pt") as file:
            assert "model.norm.weight" in file.keys()  # noqa: SIM118 - it is no dict
