"""Scoring in processes: values, failures, timeouts, retries, and a step without any reward."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import textwrap
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from megarl.config.schema import ActorConfig, Config, DeadlineConfig, RewardConfig, RolloutConfig
from megarl.errors import ConfigError, RewardError
from megarl.reward.scorer import Scorer
from megarl.types import Group, Prompt, Reward, Sample

USER_CODE = '''
import asyncio, os, signal, time
from pathlib import Path

def score(response, answer, facts):
    """What the response asks for."""
    if response == "raise":
        raise KeyError("no such key")
    if response == "hang":
        while True:
            pass
    if response == "swallow":  # what catches everything cannot keep the process
        while True:
            try:
                time.sleep(60)
            except BaseException:
                pass
    if response == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    if response == "exit":
        os._exit(3)
    if response == "none":
        return None
    if response == "nan":
        return float("nan")
    if response.startswith("flaky"):
        tries = Path(facts["folder"]) / response
        tries.write_text(tries.read_text() + "x" if tries.exists() else "x")
        if len(tries.read_text()) < 2:
            raise ValueError("not yet")
    if response.startswith("slow"):
        time.sleep(0.3)
    facts["spoiled"] = True  # a copy: the next score must not see it
    return float(response == answer) + len(facts.get("bonus", ""))

async def later(response, answer, facts):
    if response == "hang":
        await asyncio.sleep(60)
    if response == "block":
        time.sleep(60)
    if response == "raise":
        raise KeyError("no such key")
    await asyncio.sleep(0.2)
    return response == answer

def broken(response, answer, facts):
    raise RuntimeError("the judge is down")
'''


def group(
    responses: Sequence[str], answer: str = "yes", facts: dict[str, object] | None = None
) -> Group:
    prompt = Prompt("p", (1,), "q", answer, facts or {})
    samples = tuple(Sample(f"s{i}", "g", "p", (1,), text=t) for i, t in enumerate(responses))
    return Group("g", prompt, samples)


def config(kind: str, deadline_s: float = 30.0, samples: int = 256, **reward: Any) -> Config:
    return Config(
        actor=ActorConfig(model="m"),
        reward=RewardConfig(kind=kind, **reward),  # type: ignore[arg-type]
        rollout=RolloutConfig(prompts_per_step=1, samples_per_prompt=samples),
        deadline=DeadlineConfig(reward_s=deadline_s),
    )


def states(scored: Group) -> list[str]:
    return [sample.reward.state for sample in scored.samples if sample.reward is not None]


def values(scored: Group) -> list[float | None]:
    return [sample.reward.value for sample in scored.samples if sample.reward is not None]


@pytest.fixture
def user_file(tmp_path: Path) -> Path:
    path = tmp_path / "mine.py"
    path.write_text(USER_CODE)
    return path


async def test_step_of_exact_scores_takes_milliseconds() -> None:
    groups = [group([f"{i}"] * 8 + ["no"] * 8, answer=f"{i}") for i in range(16)]
    async with Scorer(config("exact")) as scorer:
        took_s = []
        for _ in range(5):
            started = time.perf_counter()
            scored = await asyncio.gather(*(scorer.score(g) for g in groups))
            took_s.append(time.perf_counter() - started)
    assert [values(g) for g in scored] == [[1.0] * 8 + [0.0] * 8] * 16
    assert min(took_s) < 0.2, took_s  # about 5 ms where the core is not shared


async def test_number_and_reasoning_gym_kinds_score_in_processes() -> None:
    async with Scorer(config("number")) as scorer:
        scored = await scorer.score(group([r"\boxed{1,042}", "1043"], answer="#### 1042"))
    assert values(scored) == [1.0, 0.0]
    entry: dict[str, object] = {"answer": "-4", "metadata": {"source_dataset": "chain_sum"}}
    async with Scorer(config("reasoning_gym")) as scorer:
        scored = await scorer.score(group(["<answer>-4</answer>", "4"], "-4", entry))
    assert values(scored) == [1.0, 0.0]


async def test_hung_failing_and_dying_scores_are_states_and_leave_the_others_alone(
    user_file: Path,
) -> None:
    asked = ["yes", "hang", "no", "raise", "die", "yes", "exit", "none", "nan", "swallow", "yes"]
    settings = config("function", 0.5, function=f"{user_file}:score", workers=2, attempts=1)
    async with Scorer(settings) as scorer:
        scored = await scorer.score(group(asked))
    expected = {"hang": "timeout", "swallow": "timeout", "yes": "value", "no": "value"}
    assert states(scored) == [expected.get(name, "failed") for name in asked]
    rewards = dict(zip(asked, (s.reward for s in scored.samples), strict=True))
    reasons = {name: reward.reason for name, reward in rewards.items() if reward}
    assert (rewards["yes"], rewards["no"]) == (Reward("value", 1.0), Reward("value", 0.0))
    assert "deadline.reward_s = 0.5 s" in reasons["hang"]
    assert "KeyError: 'no such key'" in reasons["raise"] and "mine.py:8" in reasons["raise"]
    assert "signal SIGKILL" in reasons["die"] and "exit status 3" in reasons["exit"]
    assert reasons["none"].endswith("returned None, a NoneType, not a number")
    assert "returned nan" in reasons["nan"]


async def test_failing_score_is_tried_again(user_file: Path, tmp_path: Path) -> None:
    facts: dict[str, object] = {"folder": str(tmp_path)}
    settings = config("function", function=f"{user_file}:score", attempts=2)
    async with Scorer(settings) as scorer:
        scored = await scorer.score(group(["flaky1", "flaky2", "raise"], "flaky2", facts))
    assert states(scored) == ["value", "value", "failed"] and values(scored)[1] == 1.0
    assert (tmp_path / "flaky1").read_text() == "xx"


async def test_deadline_is_of_one_score_and_not_of_the_group(user_file: Path) -> None:
    settings = config("function", 0.5, function=f"{user_file}:score")
    async with Scorer(settings) as scorer:
        scored = await scorer.score(group([f"slow{i}" for i in range(4)]))
    assert states(scored) == ["value"] * 4


async def test_function_may_change_its_facts_without_harm(user_file: Path) -> None:
    async with Scorer(config("function", function=f"{user_file}:score")) as scorer:
        scored = await scorer.score(group(["yes", "yes"], facts={"bonus": "++"}))
    assert values(scored) == [3.0, 3.0]


async def test_async_function_scores_a_group_at_one_time(user_file: Path) -> None:
    settings = config("function", 1.0, function=f"{user_file}:later", attempts=1)
    async with Scorer(settings) as scorer:
        started = time.perf_counter()
        scored = await scorer.score(group(["yes", "no"] * 8))
        took_s = time.perf_counter() - started
        lost = await scorer.score(group(["yes", "hang", "raise"]))
    assert values(scored) == [1.0, 0.0] * 8 and took_s < 1.6
    assert states(lost) == ["value", "timeout", "failed"]


async def test_async_function_that_blocks_its_loop_is_found_alone(user_file: Path) -> None:
    settings = config("function", 0.7, function=f"{user_file}:later", attempts=2)
    async with Scorer(settings) as scorer:
        scored = await scorer.score(group(["yes", "block", "no"]))
    assert states(scored) == ["value", "timeout", "value"]


async def test_step_without_any_reward_ends_the_run_with_count_and_first_reason(
    user_file: Path,
) -> None:
    settings = config("function", function=f"{user_file}:broken", samples=6)
    async with Scorer(settings) as scorer:
        await scorer.score(group(["a"] * 4))
        with pytest.raises(RewardError, match=r"6 samples.*6 failed.*the judge is down"):
            await scorer.score(group(["a"] * 4))


async def test_lost_rewards_are_told_of_with_their_reasons_without_flooding(
    user_file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    settings = config("function", function=f"{user_file}:score", attempts=1)
    async with Scorer(settings) as scorer:
        await scorer.score(group(["yes", "raise", *["none"] * 9]))
    told = [record.getMessage() for record in caplog.records]
    assert [text.partition("lost_so_far=")[2].split()[0] for text in told] == ["1", "2", "4", "8"]
    assert "state=failed" in told[0] and "KeyError: 'no such key' (" in told[0]
    assert "returned None" in told[3]


async def test_one_value_in_a_step_keeps_the_run_going(user_file: Path) -> None:
    settings = config("function", function=f"{user_file}:score", samples=3, attempts=1)
    async with Scorer(settings) as scorer:
        for _ in range(3):
            await scorer.score(group(["raise", "raise", "yes"]))


@pytest.mark.parametrize("function", ["absent.py:score", "mine.py:absent"])
async def test_unfit_function_is_a_config_error_at_start(user_file: Path, function: str) -> None:
    settings = config("function", function=f"{user_file.parent}/{function}")
    with pytest.raises(ConfigError, match=r"reward.function = .*absent"):
        await Scorer(settings).start()


async def test_cancelled_score_does_not_spoil_the_next(user_file: Path) -> None:
    async with Scorer(config("function", 0.5, function=f"{user_file}:score")) as scorer:
        task = asyncio.create_task(scorer.score(group(["hang", "no"])))
        await asyncio.sleep(0.2)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert values(await scorer.score(group(["yes", "yes"]))) == [1.0, 1.0]


def test_scoring_process_dies_with_its_controller(user_file: Path) -> None:
    code = f"""
    import asyncio, os, signal
    from tests.reward.test_scorer import config, group
    from megarl.reward.scorer import Scorer

    async def main():
        scorer = Scorer(config("function", function="{user_file}:score"))
        await scorer.start()
        print(scorer._pool._processes[0]._process.pid, flush=True)
        task = asyncio.create_task(scorer.score(group(["swallow"])))
        await asyncio.sleep(0.3)
        os.kill(os.getpid(), signal.SIGKILL)

    if __name__ == "__main__":
        asyncio.run(main())
    """
    script = user_file.parent / "controller.py"
    script.write_text(textwrap.dedent(code))
    root = Path(__file__).parents[2]
    found = subprocess.run(
        [sys.executable, str(script)],
        env={**os.environ, "PYTHONPATH": str(root)},
        capture_output=True,
        text=True,
        check=False,
    )
    pid = int(found.stdout)
    deadline = time.monotonic() + 5
    while Path(f"/proc/{pid}").exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not Path(f"/proc/{pid}").exists()
