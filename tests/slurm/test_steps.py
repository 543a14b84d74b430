"""Roles as steps of a real Slurm job, with stand-ins for the engines."""

import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.launch.waiting import are_gone, until
from tests.slurm.conftest import REPOSITORY, Cluster

pytestmark = pytest.mark.slurm
DRIVER = Path(__file__).with_name("driver.py")


@pytest.fixture
def out(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder whose name no other test uses: it names shared memory."""
    folder = tmp_path_factory.mktemp(f"steps{os.getpid()}")
    yield folder
    cluster.cancel_all()
    for path in shared_memory(folder):
        path.unlink()


def shared_memory(out: Path) -> list[Path]:
    return list(Path("/dev/shm").glob(f"{out.name}_*"))


def submit(cluster: Cluster, out: Path, action: str, *options: str) -> str:
    """A job of two nodes that runs the driver."""
    script = out / "job.sh"
    script.write_text(f"#!/bin/bash\nexec {sys.executable} {DRIVER} {out} '{action}'\n")
    log = f"--output={out}/job.log"
    return cluster.submit("--nodes=2", "--exclusive", log, *options, str(script))


def stand_in(out: Path, role: str, node: str) -> dict[str, object]:
    path = out / f"{role}-{node}.json"
    until(path.exists, limit_s=30)
    facts: dict[str, object] = json.loads(path.read_text())
    return facts


def pids_of(*facts: dict[str, object]) -> list[int]:
    return [pid for one in facts for pid in one["pids"]]  # type: ignore[attr-defined]


def words_after(facts: dict[str, object], flag: str) -> str:
    argv = facts["argv"]
    assert isinstance(argv, list)
    return str(argv[argv.index(flag) + 1])


def ended(cluster: Cluster, job: str, limit_s: float = 30) -> str:
    until(lambda: job not in cluster.jobs(), limit_s)
    return cluster.exit_code(job)


def test_learner_and_server_run_on_different_nodes_and_leave_nothing(
    cluster: Cluster, out: Path
) -> None:
    job = submit(cluster, out, "end")
    learner, server = stand_in(out, "learner", "n1"), stand_in(out, "server", "n2")
    assert ended(cluster, job) == "3:0", (out / "job.log").read_text()
    assert learner["run_id"] == server["run_id"] == "r1"
    assert (learner["key"], server["key"]) == (None, "k")
    assert server["cwd"] == str(REPOSITORY)
    assert float((out / "ended").read_text()) < 5
    assert are_gone(pids_of(learner, server))
    assert not shared_memory(out)


def test_roles_in_a_gpu_job_see_only_their_own_gpus(cluster: Cluster, out: Path) -> None:
    job = submit(cluster, out, "end", "--gres=gpu:2")
    learner, server = stand_in(out, "learner", "n1"), stand_in(out, "server", "n2")
    assert ended(cluster, job) == "3:0", (out / "job.log").read_text()
    assert (learner["gpus"], server["gpus"]) == ("0", "0")


def test_killed_server_step_leaves_nothing_on_its_node(cluster: Cluster, out: Path) -> None:
    job = submit(cluster, out, "kill server")
    server = stand_in(out, "server", "n2")
    assert ended(cluster, job) == "3:0", (out / "job.log").read_text()
    assert (out / "learner-runs").read_text() == "True"
    assert are_gone(pids_of(server))
    assert not shared_memory(out)


def test_learner_on_two_nodes_ends_on_both_when_one_fails(cluster: Cluster, out: Path) -> None:
    job = submit(cluster, out, "learner on two nodes")
    nodes = ("n1", "n2")
    learners = [stand_in(out, "learner", node) for node in nodes]
    ranks = [words_after(facts, "--node-rank") for facts in learners]
    meetings = {words_after(facts, "--rdzv") for facts in learners}
    until((out / "pids").exists)
    time.sleep(2.5)  # a warden looks at /dev/shm every 2 s
    (out / "fail-learner-n2").touch()
    assert ended(cluster, job) == "3:0", (out / "job.log").read_text()
    assert ranks == ["0", "1"]
    assert len(meetings) == 1
    assert meetings.pop().startswith("127.0.0.1:")
    assert int((out / "returncode").read_text()) != 0
    assert are_gone(pids_of(*learners))
    assert not shared_memory(out)


def test_cancelled_job_leaves_no_process(cluster: Cluster, out: Path) -> None:
    job = submit(cluster, out, "hold")
    facts = stand_in(out, "learner", "n1"), stand_in(out, "server", "n2")
    until((out / "pids").exists)
    cluster.run("scancel", job)
    ended(cluster, job)
    until(lambda: are_gone(pids_of(*facts)), limit_s=15)


def test_killed_controller_ends_the_job_with_all_its_steps(cluster: Cluster, out: Path) -> None:
    job = submit(cluster, out, "hold")
    facts = stand_in(out, "learner", "n1"), stand_in(out, "server", "n2")
    until((out / "pids").exists)
    controller = int((out / "pids").read_text().split()[0])
    os.kill(controller, signal.SIGKILL)
    assert ended(cluster, job) == "0:9"
    until(lambda: are_gone(pids_of(*facts)), limit_s=15)
