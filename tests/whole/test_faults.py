"""Processes of a run are killed for real: what must go on goes on, what must end says why."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import psutil

from tests.whole.conftest import Run

SHM = Path("/dev/shm")


def scheduler(run: Run) -> psutil.Process:
    """SGLang's scheduler process of the run's first server."""
    found = [p for p in run.processes() if "sglang::scheduler" in " ".join(p.cmdline())]
    assert found, [p.cmdline()[:3] for p in run.processes()]
    return found[0]


def learner_rank(run: Run, rank: int) -> psutil.Process:
    """The process of one learner rank."""
    for process in run.processes():
        try:
            if process.environ().get("RANK") == str(rank):
                return process
        except psutil.Error:
            continue
    raise AssertionError(f"no rank {rank} among {run.processes()}")


def shared_memory(run: Run) -> set[str]:
    """The entries of /dev/shm that processes of the run have mapped: weights, at the least."""
    found = set()
    for process in run.processes():
        with suppress(OSError):  # it has ended by now
            for line in Path(f"/proc/{process.pid}/maps").read_text().splitlines():
                _, inside, name = line.partition(f"{SHM}/")
                found |= {name} if inside and (SHM / name).exists() else set()
    assert any(name.startswith(f"megarl_{run.id}_") for name in found)
    return found


def left_in_shm(run: Run, held: set[str]) -> set[str]:
    """What is left of `held`, or bears the run's id: memory of other runs comes and goes there."""
    return {n for n in os.listdir(SHM) if n in held or n.startswith(f"megarl_{run.id}_")}


def trained_ids(run: Run, step: int) -> list[str]:
    """Names of the group files of one step."""
    return sorted(p.name for p in (run.dir / f"rollouts/v{step:06d}").glob("*.safetensors"))


def written(run: Run, step: int) -> set[str]:
    """Names of the samples whose text and reward of one step can be read."""
    lines = (run.dir / f"rollouts/v{step:06d}/samples.jsonl").read_text().splitlines()
    samples = [json.loads(line) for line in lines]
    assert all(sample["reward"] is not None for sample in samples)
    return {sample["sample"] for sample in samples}


def test_killed_scheduler_is_replaced_and_no_prompt_is_lost_or_used_twice(
    quickstart: Callable[..., Run],
) -> None:
    run = quickstart("--loop.versions", "8", "--rollout.sampling.max_new_tokens", "4")
    run.start()
    run.until(lambda: len(run.rows) >= 2)
    scheduler(run).send_signal(signal.SIGKILL)
    assert run.wait(300) == 0, run.output
    rows = run.rows
    assert [row["step"] for row in rows] == list(range(8))
    assert all(row["buffer/samples"] == 256 for row in rows)
    assert all(len(trained_ids(run, step)) == 16 for step in range(8))
    assert all(row["mismatch/mean_abs_logprob"] < 1e-4 for row in rows)
    assert all(len(written(run, step)) == 256 for step in range(8))
    assert run.left_in_temp() == []
    assert any(event["event"] == "server_rejoined" for event in run.events) or any(
        event["event"] == "server_restarted" for event in run.events
    )


def test_killed_learner_rank_ends_the_run_with_its_name_and_another_layout_resumes_it(
    quickstart: Callable[..., Run],
) -> None:
    run = quickstart("--loop.versions", "6", "--checkpoint.every", "2", "--export.last")
    run.start()
    run.until(lambda: len(run.rows) >= 3 and run.is_saved(2))
    held = shared_memory(run)
    killed_s = time.monotonic()
    learner_rank(run, 1).send_signal(signal.SIGKILL)
    assert run.wait(60) == 1
    assert time.monotonic() - killed_s < 30
    last = run.output[-2000:]
    assert "rank 1" in last and "SIGKILL" in last and "phase" in last, last
    assert "Traceback" not in run.output
    assert not run.processes()
    assert not left_in_shm(run, held)
    assert run.left_in_temp() == []

    run.add("--learner.parallel.tp", "1", "--learner.parallel.pp", "2")
    assert run.finish()
    assert [row["step"] for row in run.rows] == list(range(6))
    assert all(row["mismatch/mean_abs_logprob"] < 1e-4 for row in run.rows)
    assert (run.dir / "export/v000006/model.safetensors").is_file()
    assert any(event["event"] == "resume" and event["version"] >= 2 for event in run.events)
    assert "continuing at version" in run.output


def test_interrupted_run_is_gone_within_fifteen_seconds_and_resumes(
    quickstart: Callable[..., Run],
) -> None:
    run = quickstart("--loop.versions", "40", "--checkpoint.every", "2")
    run.start()
    run.until(lambda: len(run.rows) >= 3 and run.is_saved(2))
    held = shared_memory(run)
    assert run.process is not None
    interrupted_s = time.monotonic()
    run.process.send_signal(signal.SIGINT)
    assert run.wait(30) == 130
    while run.processes() or left_in_shm(run, held):
        assert time.monotonic() - interrupted_s < 15, (run.processes(), left_in_shm(run, held))
        time.sleep(0.1)
    assert run.left_in_temp() == []
    assert "ended; the same command continues from version" in run.output
    assert "Traceback" not in run.output
