"""The real learner through its service: verbs, checkpoints between layouts, and a killed rank.

One run at TP2 saves; runs at TP1 and at PP2 load what it saved and go on as it did.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import shutil
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from megarl.errors import CheckpointError, LearnerError
from megarl.learner.client import LearnerClient
from megarl.types import Batch, MinibatchPlan
from tests.learner import random_model, recorded
from tests.learner.running import RunningLearner, config_text
from tests.learner.saved_tensors import saved_tensors

SETTINGS = """
[learner.optimizer]
lr = 1e-3
warmup_steps = 8
[kl]
coef = 0.1
"""
SEQUENCES = [((5, 6, 7), (8, 9, 250, 299)), ((1,), (2, 3))]
SAVED, LAST = "v000002", "v000004"


@dataclass(frozen=True)
class Course:
    """What two optimizer steps and the log-probs after them were."""

    steps: list[dict[str, float]]
    logprobs: list[list[float]]


async def two_steps(client: LearnerClient, plan: MinibatchPlan) -> Course:
    steps = []
    for version in range(2):
        await client.score(Batch(version, (plan,), 0, 7))
        steps.append(await client.step(plan))
    return Course(steps, await client.logprobs(SEQUENCES))


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("checkpoints")
    random_model.write(path / "model")
    return path


@pytest.fixture(scope="module")
def plan(folder: Path) -> MinibatchPlan:
    uniform = -math.log(random_model.CONFIG["vocab_size"])
    made = recorded.record(folder, random_model.CONFIG["vocab_size"], lambda sample: [uniform] * 99)
    return recorded.plan([ref for _, ref in made], 1)


@pytest.fixture(scope="module")
def uninterrupted(folder: Path, plan: MinibatchPlan) -> Course:
    """At TP2: two steps, saved, two more steps, saved again."""

    async def course() -> Course:
        async with running.client() as client:
            info = await client.info()
            ones = dict.fromkeys(("pp", "vpp", "cp", "dp", "ep", "etp"), 1)
            assert info == {"tp": 2, **ones, "world_size": 2, "version": 0}
            scores = await client.score(Batch(0, (plan,), 0, 7))
            assert set(scores) >= {"mismatch/mean_abs_logprob", "mismatch/mean_ratio"}
            assert (await client.publish(0, [])).servers == ()
            await two_steps(client, plan)
            await client.save(folder / SAVED, 2)
            found = await two_steps(client, plan)
            await client.save(folder / LAST, 4)
            await client.save(folder / LAST, 4)  # a second save takes the place of the first
            await client.shutdown()
        return found

    text = config_text(str(folder / "model"), tp=2, more=SETTINGS)
    running = RunningLearner(folder / "tp2", text)
    try:
        found = asyncio.run(course())
        assert running.process.wait(10) == 0
        assert not running.left()
    finally:
        running.stop()
    return found


def assert_equal_course(found: Course, expected: Course) -> None:
    for step, wanted in zip(found.steps, expected.steps, strict=True):
        assert step.keys() == wanted.keys()
        assert step["lr"] == wanted["lr"]
        for name in ("loss/policy", "loss/total", "kl/mean"):
            assert step[name] == pytest.approx(wanted[name], rel=1e-6, abs=2e-7), name
        assert step["grad_norm"] == pytest.approx(wanted["grad_norm"], rel=1e-5)
    assert found.steps[0]["kl/mean"] > 1e-5  # the reference is not what was loaded
    for logprobs, wanted_logprobs in zip(found.logprobs, expected.logprobs, strict=True):
        assert logprobs == pytest.approx(wanted_logprobs, abs=5e-6)


def assert_equal_weights(path: Path, expected_path: Path) -> None:
    vocab = random_model.CONFIG["vocab_size"]
    found, expected = saved_tensors(path, vocab), saved_tensors(expected_path, vocab)
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        difference = (tensor - expected[name]).abs().max().item()
        assert difference < 2e-6, (name, difference)


@pytest.fixture
def started(folder: Path) -> Iterator[list[RunningLearner]]:
    running: list[RunningLearner] = []
    yield running
    for each in running:
        each.stop()


async def test_one_rank_goes_on_from_two_tensor_ranks(folder, plan, uninterrupted, started) -> None:
    text = config_text(str(folder / "model"), tp=1, more=SETTINGS)
    running = RunningLearner(folder / "tp1", text)
    started.append(running)
    async with running.client() as client:
        assert await client.load(folder / SAVED) == 2
        assert (await client.info())["version"] == 2
        assert_equal_course(await two_steps(client, plan), uninterrupted)
        left = folder / "again.partial"  # as by a rank that was killed while saving
        left.mkdir()
        (left / "__0_0.distcp").write_bytes(b"half")
        await client.save(folder / "again", 4)
        assert not left.exists()
        assert_equal_weights(folder / "again", folder / LAST)
        broken = shutil.copytree(folder / LAST, folder / "broken")
        for part in broken.glob("*.distcp"):
            os.truncate(part, part.stat().st_size // 2)
        with pytest.raises(CheckpointError, match=r"load: .*broken: . of . files"):
            await client.load(broken)


async def test_two_stages_go_on_from_two_tensor_ranks_and_a_killed_one_is_named(
    folder, plan, uninterrupted, started
) -> None:
    text = config_text(str(folder / "model"), tp=1, pp=2, more=SETTINGS)
    running = RunningLearner(folder / "pp2", text)
    started.append(running)
    async with running.client() as client:
        assert await client.load(folder / SAVED) == 2
        assert_equal_course(await two_steps(client, plan), uninterrupted)
        await client.save(folder / "from_pp2", 4)
        assert_equal_weights(folder / "from_pp2", folder / LAST)
        phase_file = folder / "pp2" / "logs" / "learner-rank1.phase"
        (microbatches,) = plan.schedule
        long = replace(plan, schedule=((*microbatches, *([()] * 500)),))
        step = asyncio.create_task(client.step(long))
        while json.loads(phase_file.read_text())["phase"] != "forward-backward":
            assert not step.done()
            await asyncio.sleep(0.005)
        pid = running.rank_pid(1)
        os.kill(pid, signal.SIGKILL)
        killed_at = time.monotonic()
        with pytest.raises(LearnerError, match=r"step: learner rank 1 .*SIGKILL in step/forward-b"):
            await step
    assert running.process.wait(10) == 1
    assert time.monotonic() - killed_at < 15
    failure = running.failure()
    assert (failure["rank"], failure["signal"], failure["pid"]) == (1, "SIGKILL", pid)
    assert (failure["verb"], failure["phase"]) == ("step", "forward-backward")
    assert not running.left()
