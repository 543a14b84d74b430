"""Metrics of a run: whole objects, in order, and forgotten where a resumed run does steps again."""

import json
import os
from pathlib import Path

import pytest

from megarl.launch.tempdir import own_temp_folder
from megarl.observe.metrics import MetricsLog, StepMetrics, WandbRun, read_rows


def write_steps(log: MetricsLog, count: int) -> None:
    for step in range(count):
        values = StepMetrics(step, version=step)
        values.add({"reward/mean": step / 10, "tokens/generated": 100})
        values.close()
        log.write(values)


def test_each_step_is_one_object_with_its_time_and_rate(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path)
    write_steps(log, 2)
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [0, 1]
    row = rows[1]
    assert row["tokens/generated_per_s"] == pytest.approx(100 / row["time/step_s"])


def test_time_of_one_stage_adds_up_over_its_parts() -> None:
    step = StepMetrics(0, 0)
    with step.timed("learn"):
        pass
    first_s = float(step.values["time/learn_s"])
    with step.timed("learn"):
        pass
    assert float(step.values["time/learn_s"]) > first_s


def test_resumed_run_keeps_only_steps_before_its_start(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path)
    write_steps(log, 5)
    assert log.keep_before(3) == 2
    assert [row["step"] for row in log.rows()] == [0, 1, 2]


def test_line_cut_by_a_kill_is_left_out_and_removed_on_resume(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path)
    write_steps(log, 2)
    path = tmp_path / "metrics.jsonl"
    path.write_text(path.read_text() + '{"step": 2, "rew')
    assert [row["step"] for row in read_rows(path)] == [0, 1]
    log.keep_before(2)
    write_steps(log, 1)
    assert len(read_rows(path)) == 3


def test_event_is_one_object_with_its_facts(tmp_path: Path) -> None:
    MetricsLog(tmp_path).event("server_rejoined", server="rollout-0", version=3)
    event = json.loads((tmp_path / "events.jsonl").read_text())
    assert (event["event"], event["server"], event["version"]) == (
        "server_rejoined",
        "rollout-0",
        3,
    )


def test_wandb_that_is_off_starts_nothing(tmp_path: Path) -> None:
    assert WandbRun.start("off", tmp_path, {}) is None
    assert list(tmp_path.iterdir()) == []


def test_wandb_offline_writes_into_the_run_and_temp_folders_without_network(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("wandb")
    with own_temp_folder("test_") as temp:
        monkeypatch.setenv("TMPDIR", "/nowhere")
        ended = f"3-{os.getpid()}-unix-/nowhere/socket"  # of the process that started this one
        monkeypatch.setenv("WANDB_SERVICE", ended)
        run = WandbRun.start("offline", tmp_path, {"loop": {"versions": 1}})
        assert (os.environ["TMPDIR"], os.environ["WANDB_SERVICE"]) == ("/nowhere", ended)
        assert list(temp.glob("wandb-*/socket"))  # its service's
        assert run is not None
        log = MetricsLog(tmp_path, run)
        write_steps(log, 2)
        run.close()
    assert list(tmp_path.glob("wandb/offline-run-*/run-*.wandb"))


def test_lines_that_are_no_steps_are_left_out(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    lines = [b'{"step": 0}', b"5", b"null", b"\xff\x00", b"{}", b'{"step": "1"}', b'{"step": 1']
    path.write_bytes(b"\n".join([*lines, b"[" * 100_000, b'{"step": 1, "older": "column"}']))
    assert [row["step"] for row in read_rows(path)] == [0, 1]
    assert MetricsLog(tmp_path).keep_before(1) == 1
    assert path.read_text() == '{"step": 0}\n'
