"""The quickstart as a job on a real Slurm: the product's own sbatch script, the real engines."""

import json
import os
import signal
from pathlib import Path

import pytest

from megarl.launch.process import processes
from tests.launch.waiting import until
from tests.slurm.conftest import Cluster

pytestmark = pytest.mark.slurm
NUM_STEPS = 3


def words_of_all_processes() -> list[str]:
    """Command line and environment of everything that runs here."""
    texts = []
    for pid in processes():
        try:
            facts = [Path(f"/proc/{pid}/{name}").read_bytes() for name in ("cmdline", "environ")]
        except OSError:
            continue
        texts.append(b"\0".join(facts).decode(errors="replace"))
    return texts


def test_quickstart_runs_with_the_learner_on_one_node_and_the_server_on_the_other(
    cluster: Cluster, tmp_path: Path
) -> None:
    run = tmp_path / "runs" / "quickstart"
    log = tmp_path / "job.log"
    job = cluster.submit(
        f"--output={log}",
        "--nodes=2",  # between which weights travel by messages, though they are of one host
        "slurm/train.sbatch",
        "examples/quickstart.toml",
        *("--run.dir", str(run.parent)),
        *("--loop.versions", str(NUM_STEPS)),
        *("--eval.max_prompts", "16"),
        *("--observe.wandb", "off"),
    )
    try:
        until(lambda: not cluster.jobs(), limit_s=600)
    finally:
        cluster.cancel_all()
    output = log.read_text()
    assert cluster.exit_code(job) == "0:0", output
    steps = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [step["step"] for step in steps] == list(range(NUM_STEPS)), output
    assert all(step["mismatch/mean_abs_logprob"] < 1e-4 for step in steps)
    assert all(step["weight_sync/network_bytes"] == step["weight_sync/bytes"] for step in steps)
    phases = [json.loads(path.read_text()) for path in (run / "logs").glob("*.phase")]
    assert {phase["host"] for phase in phases} == {"n1"}
    assert "learner on n1, servers on n2" in (run / "logs" / "controller.log").read_text()
    assert not [text for text in words_of_all_processes() if str(run) in text]
    run_id = json.loads((run / "run.lock").read_text())["run_id"]
    assert not list(Path("/dev/shm").glob(f"megarl_{run_id}_*"))


def test_critic_with_ranks_of_its_own_is_a_step_of_the_job_and_its_death_ends_it(
    cluster: Cluster, tmp_path: Path
) -> None:
    run, log = tmp_path / "runs" / "ppo", tmp_path / "job.log"
    settings = ("--critic.ranks", "own", "--observe.wandb", "off", "--eval.max_prompts", "16")
    job = cluster.submit(
        f"--output={log}",
        "--nodes=2",
        *("slurm/train.sbatch", "examples/ppo.toml", "--run.dir", str(run.parent), *settings),
    )
    metrics = run / "metrics.jsonl"
    try:
        until(lambda: metrics.exists() and len(metrics.read_text().splitlines()) >= 2, limit_s=300)
        rank = json.loads((run / "logs" / "critic-rank0.phase").read_text())
        assert rank["host"] == "n1"
        os.kill(rank["pid"], signal.SIGKILL)
        until(lambda: not cluster.jobs(), limit_s=120)
    finally:
        cluster.cancel_all()
    output = log.read_text()
    assert cluster.exit_code(job) == "1:0", output
    assert "critic rank 0 (host n1" in output and "SIGKILL" in output
    steps = [json.loads(line) for line in metrics.read_text().splitlines()]
    assert all({"value/loss", "loss/policy"} <= step.keys() for step in steps)
    placed = "learner on n1, critic on n1, servers on n2"
    assert placed in (run / "logs" / "controller.log").read_text()
    assert not [text for text in words_of_all_processes() if str(run) in text]
