"""Where learner rank 0 listens."""

from __future__ import annotations

import pytest

from megarl.learner.addresses import listen_address


def test_rank_0_listens_where_the_launcher_says_that_other_nodes_reach_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("MEGARL_LEARNER_ADDRESS", "10.0.0.1")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    assert listen_address() == "10.0.0.1"


def test_rank_0_listens_on_loopback_where_nobody_says_and_all_is_on_one_machine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("MEGARL_LEARNER_ADDRESS", "SLURM_JOB_ID", "GROUP_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    assert listen_address() == "127.0.0.1"
