"""The same loop in other layouts: real Megatron ranks, real SGLang servers, three steps each."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.whole.conftest import Run

MODEL_BYTES = 152_256 * 4  # the quickstart model in fp32
ONE_TP = ["--learner.parallel.tp", "1"]
LAYOUTS = {
    "learner tp 2 to server tp 2": ["--learner.parallel.tp", "2", "--rollout.parallel.tp", "2"],
    "learner tp 2 pp 2": ["--learner.parallel.pp", "2"],
    "learner dp 2": [*ONE_TP, "--placement.learner_gpus", "2"],
    "learner pp 2 vpp 2": [*ONE_TP, "--learner.parallel.pp", "2", "--learner.parallel.vpp", "2"],
    "learner cp 2": [*ONE_TP, "--learner.parallel.cp", "2"],
    "two servers": ["--rollout.servers", "2"],
}


SLOW = ("learner dp 2", "learner pp 2 vpp 2", "learner cp 2")  # test_colocated.py has the first


@pytest.mark.parametrize(
    "layout",
    [pytest.param(name, marks=pytest.mark.slow if name in SLOW else ()) for name in LAYOUTS],
)
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


@pytest.mark.slow
def test_three_steps_with_learner_and_server_on_different_nodes(
    quickstart: Callable[..., Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MEGARL_NODE", "a,b")  # this machine stands for both
    run = quickstart("--loop.versions", "3", "--rollout.parallel.tp", "2")
    rows = run.finish()
    assert "learner on a, servers on b" in run.output
    for row in rows:
        assert row["mismatch/mean_abs_logprob"] < 1e-4
        assert row["weight_sync/verified_servers"] == 1
        assert row["weight_sync/network_bytes"] == MODEL_BYTES  # copies are made on the node
        assert row["weight_sync/bytes"] > MODEL_BYTES
    assert not run.processes()
