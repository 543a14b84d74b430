"""The same loop in other layouts: real Megatron ranks, real SGLang servers, three steps each."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.whole.conftest import Run

MODEL_BYTES = 152_256 * 4  # the quickstart model in fp32
LAYOUTS = {
    "learner tp 2 to server tp 2": ["--learner.parallel.tp", "2", "--rollout.parallel.tp", "2"],
    "learner tp 2 pp 2": ["--learner.parallel.pp", "2"],
    "learner dp 2": ["--learner.parallel.tp", "1", "--placement.learner_gpus", "2"],
    "two servers": ["--rollout.servers", "2"],
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_three_steps_agree_on_log_probs_and_every_sync_is_proved(
    quickstart: Callable[..., Run], layout: str
) -> None:
    run = quickstart("--loop.versions", "3", *LAYOUTS[layout])
    rows = run.finish()
    servers = 2 if layout == "two servers" else 1
    assert [row["step"] for row in rows] == [0, 1, 2]
    for row in rows:
        assert row["mismatch/mean_abs_logprob"] < 1e-4
        assert abs(row["mismatch/mean_ratio"] - 1) < 1e-4
        assert row["weight_sync/verified_servers"] == servers
        assert row["weight_sync/bytes"] == row["weight_sync/minimum_bytes"] > 0
        assert row["buffer/samples"] == 256
        assert row["grad_norm"] > 0
    assert rows[0]["weight_sync/bytes"] >= servers * MODEL_BYTES
    assert not run.processes()
