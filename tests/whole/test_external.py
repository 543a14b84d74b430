"""Whole runs on servers that the run has not started, given by URL: with megarl's loader, and as
SGLang alone starts them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.weight_sync.servers import RealServer
from tests.whole.conftest import ROOT, Run

MODEL = ROOT / "examples" / "quickstart" / "model"
LOADERS = {"exact": True, "hf": False}


@pytest.fixture(params=LOADERS)
def mode(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def server(mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RealServer]:
    made = RealServer("outside", MODEL, 1, tmp_path / "server.log", has_loader=LOADERS[mode])
    monkeypatch.setenv("MEGARL_ROLLOUT_API_KEY", made.endpoint.api_key)
    monkeypatch.setenv("MEGARL_ROLLOUT_ADMIN_KEY", made.endpoint.admin_key)
    try:
        made.wait()
        yield made
    finally:
        made.kill()


@pytest.mark.slow
def test_run_trains_on_a_server_by_its_url_and_leaves_it_running(
    quickstart: Callable[..., Run], server: RealServer, mode: str
) -> None:
    urls = json.dumps([server.endpoint.url])
    run = quickstart("--loop.versions", "3", "--rollout.urls", urls)
    rows = run.finish()
    assert [row["step"] for row in rows] == [0, 1, 2]
    for row in rows:
        assert row["mismatch/mean_abs_logprob"] < 1e-4
        assert row["weight_sync/verified_servers"] == 1
        assert row["grad_norm"] > 0
    assert f"mode={mode} " in (run.dir / "logs" / "learner.log").read_text()
    assert "servers by their URLs" in run.output
    assert server.version() == "3"
    assert not run.processes()
    server.call("/health")


@pytest.mark.slow
def test_wrong_tp_ends_the_run_in_words_before_anything_is_trained(
    quickstart: Callable[..., Run], server: RealServer
) -> None:
    urls = json.dumps([server.endpoint.url])
    run = quickstart("--rollout.urls", urls, "--rollout.parallel.tp", "2")
    run.start()
    assert run.wait() == 1
    assert "has tp_size = 1, and rollout.parallel.tp is 2" in run.output
    server.call("/health")
