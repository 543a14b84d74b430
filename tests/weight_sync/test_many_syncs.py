"""Syncs in a row and nothing between them: what one leaves behind would add up."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from megarl.config.render import render_config
from megarl.types import ServerEndpoint
from tests.learner.parity import Case
from tests.learner.running import RunningLearner
from tests.weight_sync import census, family_models
from tests.weight_sync.servers import RealServer

NUM_SYNCS, BASELINE = 140, 80  # allocators fill up over the first fifty or so
SETTINGS = {"weight_sync": {"probe_tokens": 16}}


@pytest.mark.slow
@pytest.mark.parametrize("node", ["a", "b"], ids=["shared", "p2p"])
def test_syncs_add_less_memory_than_a_tenth_of_what_they_move(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, node: str
) -> None:
    monkeypatch.setenv("MEGARL_NODE", "a")
    model = family_models.save(tmp_path / "model", "dense", seed=0)
    config = Case("dense", parallel={"pp": 2}, more=SETTINGS).config(model)
    server = RealServer("server-0", model, 1, tmp_path / "server.log")
    learner = RunningLearner(
        tmp_path / "run", render_config(config), "tests.weight_sync.counted_learner"
    )
    try:
        server.wait()
        asyncio.run(_publish(learner, server, replace(server.endpoint, nodes=(node,))))
    finally:
        learner.stop()
        server.kill()


async def _publish(learner: RunningLearner, server: RealServer, endpoint: ServerEndpoint) -> None:
    async with learner.client(wait_s=300) as client:
        moved = 0
        before: dict[int, int] = {}
        pids = (learner.process.pid, server.process.pid)
        processes = [p for pid in pids for p in census.descendants(pid)]
        for version in range(1, NUM_SYNCS + 1):
            report = await client.publish(version, [endpoint])
            assert report.servers[0].verified, report.servers[0].error
            if version == BASELINE:
                before = {process.pid: census.kib(process.pid) for process in processes}
            elif version > BASELINE:
                moved += report.moved_bytes // 2  # of each learner rank
        for process in processes:
            added_kib = census.kib(process.pid) - before[process.pid]
            print(f"{census.role(process)}: {added_kib:+d} KiB in {NUM_SYNCS - BASELINE} syncs")
            assert added_kib << 10 < moved // 10, census.role(process)
        await client.shutdown()
