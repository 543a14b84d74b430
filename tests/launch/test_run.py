"""run_training with stand-ins for both engines: what it does about signals and a dead learner."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from megarl.launch.process import descendants
from tests.launch.waiting import are_gone, until

STAND_IN = str(Path(__file__).with_name("stand_in.py"))


class Run:
    """A controller in a process of its own."""

    def __init__(self, run_dir: Path, behavior: str) -> None:
        self.run_dir = run_dir
        self.process = subprocess.Popen(
            [sys.executable, STAND_IN, str(run_dir), behavior],
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def until_running(self) -> list[int]:
        """The pids of all below the controller, once the loop runs: two wardens, two engines."""
        until(lambda: (self.run_dir / "training").exists(), limit_s=30)
        until(lambda: len(descendants(self.process.pid)) >= 4)
        return [proc.pid for proc in descendants(self.process.pid)]

    def end(self, limit_s: float) -> tuple[int, str]:
        _, stderr = self.process.communicate(timeout=limit_s)
        return self.process.returncode, stderr


@pytest.fixture
def run(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Run]:
    started = Run(tmp_path / "run", getattr(request, "param", "wait"))
    yield started
    started.process.kill()
    started.process.wait()


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_signal_ends_the_run_and_everything_of_it(run: Run, signum: int) -> None:
    below = run.until_running()
    run.process.send_signal(signum)
    status, stderr = run.end(limit_s=15)
    assert status == 128 + signum
    assert "ended; the same command starts anew, as no checkpoint was saved" in stderr
    assert are_gone(below)
    assert not list(Path("/dev/shm").glob(f"megarl_{run_id(run)}_*"))


@pytest.mark.parametrize("run", ["stubborn"], indirect=True)
def test_second_ctrl_c_ends_the_run_at_once(run: Run) -> None:
    below = run.until_running()
    run.process.send_signal(signal.SIGINT)
    time.sleep(0.5)
    run.process.send_signal(signal.SIGINT)
    status, _ = run.end(limit_s=3)
    assert status == 130
    until(lambda: are_gone(below), limit_s=3)


def test_killed_controller_takes_everything_with_it(run: Run) -> None:
    below = run.until_running()
    run.process.kill()
    until(lambda: are_gone(below), limit_s=6)
    until(lambda: not list(Path("/dev/shm").glob(f"megarl_{run_id(run)}_*")), limit_s=1)


@pytest.mark.parametrize("run", ["wrong reward"], indirect=True)
def test_reward_function_that_is_not_there_ends_the_run_before_an_engine_starts(run: Run) -> None:
    status, stderr = run.end(limit_s=60)
    assert status != 0
    assert "ConfigError: reward.function" in stderr and "no 'nope'" in stderr
    assert not (run.run_dir / "logs" / "learner.log").exists()


@pytest.mark.parametrize("run", ["no server"], indirect=True)
def test_url_without_a_server_ends_the_run_before_the_learner_starts(run: Run) -> None:
    status, stderr = run.end(limit_s=60)
    assert status == 1
    assert "server-0, http://127.0.0.1:9 (rollout.urls) does not answer within" in stderr
    assert "deadline.server_answer_s = 0.5" in stderr
    assert not (run.run_dir / "logs" / "learner.log").exists()


@pytest.mark.parametrize("run", ["learner dies"], indirect=True)
def test_dead_learner_ends_the_run_with_its_account(run: Run) -> None:
    status, stderr = run.end(limit_s=30)
    assert status == 1
    assert (
        "LaunchError: learner rank 1 (host h, pid 7) was ended by SIGKILL in step/forward" in stderr
    )
    assert "last phase: step/forward" in stderr
    assert "continues from the last checkpoint" in stderr


@pytest.mark.parametrize("run", ["learner dies silently"], indirect=True)
def test_learner_that_dies_without_an_account_is_told_from_its_log(run: Run) -> None:
    status, stderr = run.end(limit_s=30)
    assert status == 1
    assert "ended with status 9 without an account" in stderr
    assert "last words" in stderr


def test_account_of_an_earlier_start_is_not_told_as_this_ones(tmp_path: Path) -> None:
    failure = tmp_path / "run" / "logs" / "learner-failure.json"
    failure.parent.mkdir(parents=True)
    failure.write_text(json.dumps({"text": "of old", "verb": "step", "phase": "forward"}))
    status, stderr = Run(tmp_path / "run", "learner dies silently").end(limit_s=60)
    assert status == 1
    assert "without an account" in stderr and "of old" not in stderr


@pytest.mark.parametrize("run", ["disk full"], indirect=True)
def test_full_disk_is_told_with_the_folder_and_what_to_do(run: Run) -> None:
    status, stderr = run.end(limit_s=30)
    assert status == 1
    assert f"LaunchError: {run.run_dir}: cannot be used: No space left on device" in stderr
    assert "continues from the last checkpoint" in stderr


@pytest.mark.parametrize("run", ["done"], indirect=True)
def test_finished_run_ends_with_status_0_and_leaves_nothing(run: Run) -> None:
    status, stderr = run.end(limit_s=30)
    assert status == 0
    told = [line.split(" after ")[0] for line in stderr.splitlines()]
    assert told[0].startswith("starting 1 learner ranks")
    assert sorted(told[1:]) == ["learner ready", "rollout servers ready"]
    assert json.loads((run.run_dir / "run.lock").read_text())["pid"] == run.process.pid
    assert (run.run_dir / "config.toml").exists()


def test_usr1_ends_the_run_early_with_a_status_of_its_own(run: Run) -> None:
    below = run.until_running()
    run.process.send_signal(signal.SIGUSR1)
    status, stderr = run.end(limit_s=15)
    assert status == os.EX_TEMPFAIL
    assert "ended early: SIGUSR1" in stderr
    assert are_gone(below)


def test_run_ends_early_before_the_nearer_of_its_time_limits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURM_JOB_END_TIME", str(int(time.time()) + 100_000))
    status, stderr = Run(tmp_path / "run", "time limit").end(limit_s=30)
    assert status == os.EX_TEMPFAIL
    assert "ended early: the time limit is 300 s away (checkpoint.before_end_s)" in stderr


@pytest.mark.parametrize("run", ["starts slowly"], indirect=True)
def test_run_that_is_to_end_while_its_engines_start_does_not_wait_for_them(run: Run) -> None:
    until(lambda: (run.run_dir / "starting").exists(), limit_s=30)
    below = [proc.pid for proc in descendants(run.process.pid)]
    while run.process.poll() is None:  # to its very end more of them change nothing
        run.process.send_signal(signal.SIGUSR1)
        time.sleep(0.01)  # or it would do nothing but receive them
    status, stderr = run.end(limit_s=15)
    assert status == os.EX_TEMPFAIL
    assert "ended early: SIGUSR1" in stderr
    assert are_gone(below)


@pytest.mark.parametrize("run", ["reads slowly"], indirect=True)
def test_usr1_before_there_are_engines_ends_the_run_without_any(run: Run) -> None:
    until(lambda: (run.run_dir / "reading").exists(), limit_s=30)
    run.process.send_signal(signal.SIGUSR1)
    (run.run_dir / "read").touch()
    status, stderr = run.end(limit_s=15)
    assert status == os.EX_TEMPFAIL
    assert "ended early: SIGUSR1" in stderr
    assert not (run.run_dir / "logs" / "learner.log").exists()


@pytest.mark.parametrize("run", ["no time"], indirect=True)
def test_no_engine_is_started_where_the_time_limit_is_too_near_already(run: Run) -> None:
    status, stderr = run.end(limit_s=30)
    assert status == os.EX_TEMPFAIL
    assert "ended early: the time limit is 300 s away" in stderr
    assert not (run.run_dir / "logs" / "learner.log").exists()


def test_job_that_is_shorter_than_its_end_needs_is_refused_and_not_requeued(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = int(time.time())
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURM_JOB_START_TIME", str(now))
    monkeypatch.setenv("SLURM_JOB_END_TIME", str(now + 300))
    status, stderr = Run(tmp_path / "run", "wait").end(limit_s=30)
    assert status not in (0, os.EX_TEMPFAIL)
    assert "the time limit of the Slurm job is 300 s" in stderr
    assert not (tmp_path / "run" / "logs" / "learner.log").exists()


def run_id(run: Run) -> str:
    return str(json.loads((run.run_dir / "run.lock").read_text())["run_id"])


def test_stand_ins_leave_no_shared_memory() -> None:
    assert not [name for name in os.listdir("/dev/shm") if name.startswith("stand_in_")]
