"""`megarl train examples/ppo.toml`: a critic and a policy learn the quickstart's task together."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from statistics import fmean

import pytest

from tests.whole.conftest import ROOT, Rows, Run

pytestmark = pytest.mark.slow
PPO = ROOT / "examples" / "ppo.toml"
VERSIONS = 120
APART = ("--critic.ranks", "own")
REWARDED = ("--kl.coef", "0.01", "--kl.where", "reward")


def mean(rows: Rows, name: str) -> float:
    return fmean(row[name] for row in rows)


def test_critic_and_policy_learn_the_quickstart_s_task(quickstart: Callable[..., Run]) -> None:
    run = quickstart("--loop.versions", str(VERSIONS), example=PPO)
    rows = run.finish(timeout_s=1500.0)
    assert len(rows) == VERSIONS
    first, last = rows[:20], rows[-20:]
    assert mean(last, "reward/mean") > mean(first, "reward/mean") + 0.03
    assert mean(last, "value/loss") < 0.9 * rows[0]["value/loss"]
    # 152,000 parameters tell little of what they will get right, but more than a constant does.
    assert rows[0]["value/explained_variance"] == 0.0
    assert mean(last, "value/explained_variance") > 0.005
    assert max(row["mismatch/mean_abs_logprob"] for row in rows) < 1e-4


def test_run_with_a_critic_goes_on_from_its_checkpoint(quickstart: Callable[..., Run]) -> None:
    run = quickstart("--loop.versions", "4", "--checkpoint.every", "2", example=PPO)
    run.finish()
    assert (run.dir / "checkpoints" / "v000004" / "megatron-critic").is_dir()
    run.add("--loop.versions", "6")
    rows = run.finish()
    assert [row["step"] for row in rows] == list(range(6))
    # A critic that began anew would say zero everywhere.
    assert abs(rows[4]["value/mean"]) > 0 and rows[4]["value/explained_variance"] != 0.0


def test_run_whose_critic_gets_ranks_of_its_own_goes_on_in_both_parts(
    quickstart: Callable[..., Run],
) -> None:
    run = quickstart("--loop.versions", "2", "--checkpoint.every", "2", example=PPO)
    assert len(run.finish()) == 2  # with the critic on the learner's ranks
    run.add("--loop.versions", "4", *APART)
    rows = run.finish()
    assert "2 learner ranks, 1 critic ranks and 1 rollout server(s)" in run.output
    assert (run.dir / "checkpoints" / "v000004" / "megatron-critic").is_dir()
    run.add("--loop.versions", "6")
    rows = run.finish()
    assert [row["step"] for row in rows] == list(range(6))
    assert abs(rows[4]["value/mean"]) > 0 and rows[4]["value/explained_variance"] != 0.0
    for row in rows[2:]:
        assert {"loss/policy", "grad_norm", "value/loss", "value/grad_norm"} <= row.keys()
        assert row["memory/critic_score_rss_bytes"] > row["memory/critic_score_predicted_bytes"]
        assert row["mismatch/mean_abs_logprob"] < 1e-4
    assert not run.processes()


def test_killed_rank_of_a_critic_apart_ends_the_run_with_its_name_and_the_same_command_resumes(
    quickstart: Callable[..., Run],
) -> None:
    settings = ("--learner.parallel.tp", "1", "--critic.parallel.tp", "2", *REWARDED)
    run = quickstart(
        "--loop.versions", "6", "--checkpoint.every", "2", *APART, *settings, example=PPO
    )
    run.start()
    run.until(lambda: len(run.rows) >= 3 and run.is_saved(2))
    rank = json.loads((run.dir / "logs" / "critic-rank1.phase").read_text())
    os.kill(rank["pid"], signal.SIGKILL)
    assert run.wait(60) == 1
    last = run.output[-2000:]
    assert "critic rank 1" in last and "SIGKILL" in last and "last phase" in last, last
    assert "learner rank 0" not in last
    assert "Traceback" not in run.output
    assert not run.processes()
    rows = run.finish()
    assert [row["step"] for row in rows] == list(range(6))
    assert "continuing at version" in run.output
