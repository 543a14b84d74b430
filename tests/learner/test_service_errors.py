"""How the service ends and what it says, shown with a learner without a model (toy_service.py)."""

import os
import signal
import socket
import time
from pathlib import Path

import pytest

from megarl.config.schema import DeadlineConfig
from megarl.errors import CheckpointError, LearnerError
from megarl.types import Batch, MinibatchPlan
from tests.learner.running import RunningLearner, config_text
from tests.learner.toy_service import FAILS_AFTER, FAILS_ALONE, HANGS

EMPTY = MinibatchPlan(schedule=((), ()), microbatch_tokens=1, num_loss_tokens=1)


def batch(version: int) -> Batch:
    return Batch(version=version, minibatches=(), worst_staleness=0, num_samples=0)


@pytest.fixture
def toy(tmp_path: Path):
    started: list[RunningLearner] = []

    def start(more: str = "", options: tuple[str, ...] = ()) -> RunningLearner:
        running = RunningLearner(
            tmp_path / "run", config_text(more=more), "tests.learner.toy_ranks", options
        )
        started.append(running)
        return running

    yield start
    for running in started:
        running.stop()


async def test_service_answers_survives_errors_before_weights_change_and_ends_at_step(toy) -> None:
    running = toy()
    async with running.client() as client:
        assert (await client.info())["world_size"] == 2
        scores = await client.score(batch(0))
        assert scores["mismatch/mean_ratio"] == 2.0 and scores["mismatch/k3_kl"] != 0.0
        assert await client.logprobs([((1, 2), (3, 4))]) == [[-0.5, -0.5]]
        with pytest.raises(LearnerError, match=r"score: learner rank 1 .* in score/together: Val"):
            await client.score(batch(FAILS_AFTER))
        with pytest.raises(CheckpointError, match=r"save: .*/x: the toy saves nothing"):
            await client.save("/x", 3)
        assert await client.health() == {"state": "idle"}
        client._headers["Authorization"] = "Bearer wrong"
        await client.close()
        with pytest.raises(LearnerError, match="API key"):
            await client.info()
    async with running.client() as client:
        with pytest.raises(LearnerError, match="the toy cannot step"):
            await client.step(EMPTY)
    assert running.process.wait(10) == 1
    failure = running.failure()
    assert "the toy cannot step" in failure["text"] and failure["verb"] == "step"
    assert not running.left()


async def test_error_of_one_rank_reaches_client_while_the_others_wait_for_it(toy) -> None:
    running = toy()
    async with running.client() as client:
        with pytest.raises(
            LearnerError, match=r"score: learner rank 1 .*score/together.*toy fails"
        ):
            await client.score(batch(FAILS_ALONE))
    assert running.process.wait(10) == 1
    failure = running.failure()
    assert (failure["rank"], failure["exitcode"]) == (1, 1), failure
    assert not running.left()


async def test_late_verb_names_the_rank_that_has_not_finished(toy) -> None:
    running = toy("[deadline]\nlearner_verb_s = 1.0\n")
    async with running.client(DeadlineConfig(learner_verb_s=1.0)) as client:
        pid = running.rank_pid(1)
        with pytest.raises(LearnerError, match=rf"deadline.*rank 1 \(host .*pid {pid}.*score/toge"):
            await client.score(batch(HANGS))
    assert running.process.wait(10) == 1
    assert not running.left()


async def test_verb_is_late_too_where_a_rank_hung_before_it(toy) -> None:
    running = toy("[deadline]\nlearner_verb_s = 1.0\n")
    async with running.client(DeadlineConfig(learner_verb_s=1.0)) as client:
        await client.score(batch(0))
        pid = running.idle_rank_pid(1)
        os.kill(pid, signal.SIGSTOP)
        with pytest.raises(LearnerError, match=rf"deadline of . s.*rank 1 \(.*pid {pid}, in idle"):
            await client.score(batch(0))
        os.kill(pid, signal.SIGCONT)  # else torch's launcher waits 30 s for it to take SIGTERM
    assert running.process.wait(10) == 1
    assert not running.left()


async def test_killed_rank_is_named_with_signal_and_phase(toy) -> None:
    running = toy()
    async with running.client() as client:
        pid = running.idle_rank_pid(1)
        started_at = time.monotonic()
        os.kill(pid, signal.SIGKILL)
        failure = running.failure()
        assert time.monotonic() - started_at < 15
        assert failure["rank"] == 1 and failure["signal"] == "SIGKILL" and failure["pid"] == pid
        assert failure["phase"] == "idle" and failure["memory"]["rss_bytes"] > 1 << 20
        with pytest.raises(
            LearnerError, match=r"score: learner rank 1 .* ended by SIGKILL in idle"
        ):
            await client.score(batch(0))
    assert running.process.wait(5) == 1
    assert not running.left()


def test_sigterm_to_the_launcher_ends_every_rank_within_five_seconds(toy) -> None:
    running = toy()
    running.client()
    started_at = time.monotonic()
    running.process.send_signal(signal.SIGTERM)
    assert running.process.wait(5) == 128 + signal.SIGTERM
    assert time.monotonic() - started_at < 5 and not running.left()
    assert not running.failure_file.exists()


def test_ranks_die_with_a_killed_launcher(toy) -> None:
    running = toy()
    running.client()
    running.process.kill()
    running.process.wait()
    deadline = time.monotonic() + 5
    while running.left() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not running.left()


def test_rank_that_dies_while_starting_is_named(toy, monkeypatch) -> None:
    monkeypatch.setenv("TOY_DIES_EARLY", "1")
    running = toy()
    failure = running.failure(60)
    assert (failure["rank"], failure["exitcode"]) == (1, 9)


async def test_two_nodes_share_one_learner_and_the_cause_is_named_wherever_it_was(toy) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    nodes = [
        toy(options=("--nnodes", "2", "--node-rank", str(k), "--rdzv", f"127.0.0.1:{port}"))
        for k in range(2)
    ]
    async with nodes[0].client() as client:
        nodes[1].look()
        assert (await client.score(batch(0)))["mismatch/mean_ratio"] == 2.0
        pid = nodes[0].rank_pid(1)
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(LearnerError, match=rf"info: learner rank 1 .*pid {pid}.*SIGKILL"):
            await client.info()
    for node in nodes:
        assert node.process.wait(10) == 1
        assert not node.left()
