"""`megarl train examples/ppo.toml`: a critic and a policy learn the quickstart's task together."""

from __future__ import annotations

from collections.abc import Callable
from statistics import fmean

import pytest

from tests.whole.conftest import ROOT, Rows, Run

pytestmark = pytest.mark.slow
PPO = ROOT / "examples" / "ppo.toml"
VERSIONS = 120


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
