"""A whole run is ended early, its newest checkpoint damaged, goes on elsewhere, and is exported."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable

import pytest

from tests.whole.conftest import Run

pytestmark = pytest.mark.slow


def test_run_that_was_ended_early_goes_on_from_what_is_whole_and_its_export_begins_a_new_one(
    quickstart: Callable[..., Run],
) -> None:
    run = quickstart(
        *("--loop.versions", "12", "--checkpoint.every", "2", "--checkpoint.keep_every", "4"),
        *("--checkpoint.best", "reward/mean", "--export.every", "4", "--export.last"),
    )
    run.start()
    run.until(lambda: len(run.rows) >= 5 and run.is_saved(4))
    assert run.process is not None
    run.process.send_signal(signal.SIGUSR1)
    assert run.wait(120) == os.EX_TEMPFAIL, run.output
    assert "ended early: SIGUSR1" in run.output
    ended = len(run.rows)  # each finished step is in the checkpoint that was saved at the end
    newest = run.dir / f"checkpoints/v{ended:06d}"
    state = json.loads((newest / "state.json").read_text())
    assert state["version"] == ended and state["prompts"]["position"] >= 0
    assert state["metrics"] == {"reward/mean": run.rows[-1]["reward/mean"]}
    (part, *_) = (newest / "megatron").glob("*.distcp")
    damaged = bytearray(part.read_bytes())
    damaged[len(damaged) // 2] ^= 16
    part.write_bytes(damaged)

    run.add("--learner.parallel.tp", "1", "--learner.parallel.pp", "2")
    run.finish()
    told = [line for line in run.output.splitlines() if "damaged" in line]
    assert len(told) == 1 and f"first {part.name}: " in told[0], run.output
    assert f"It is now {newest}.damaged; continuing from v" in told[0]
    assert [row["step"] for row in run.rows] == list(range(12))
    assert all(row["mismatch/mean_abs_logprob"] < 1e-4 for row in run.rows)
    kept = {path.name for path in (run.dir / "checkpoints").glob("v??????")}
    assert {"v000004", "v000008", "v000012"} <= kept and len(kept) <= 5
    saves = [event for event in run.events if event["event"] == "checkpoint"]
    assert all(save["stood_still_s"] <= save["took_s"] for save in saves)
    exports = sorted(path.name for path in (run.dir / "export").iterdir())
    assert exports == ["v000004", "v000008", "v000012"]

    model = str(run.dir / "export/v000012")
    other = quickstart("--actor.model", model, "--loop.versions", "1")
    (row,) = other.finish()
    before = sum(each["reward/mean"] for each in run.rows[:2]) / 2
    print(f"reward at the start {before}, of the export {row['reward/mean']}")
    assert row["mismatch/mean_abs_logprob"] < 1e-4  # SGLang and the learner both loaded it
