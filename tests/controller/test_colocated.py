"""Whose turn it is: give before take, in every order of stages; who may sync in between.

Learner and servers are stand-ins that refuse what the real ones refuse.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megarl.config.schema import Config, ParityConfig
from megarl.controller.colocated import (
    ColocatedTurn,
    kept_at_start,
    make_turn,
    stages,
)
from megarl.controller.memory import MIB
from megarl.controller.turn import StageName
from megarl.errors import DeviceMemoryError, WeightSyncError
from megarl.learner.client import LearnerClient
from megarl.learner.verbs import PARTS
from megarl.observe.metrics import MetricsLog
from megarl.rollout.occupation import TAGS
from megarl.rollout.pool import ServerPool
from megarl.types import ServerEndpoint

STAGES: tuple[StageName, ...] = get_args(StageName)


class Devices:
    """Both sides on one GPU, and every state that it was in. `leak` bytes stay at each floor."""

    def __init__(self, leak: int = 0) -> None:
        self.learner, self.servers = set(PARTS), {"weights"}
        self.log: list[str] = []
        self.starts_held = True
        self.num_routable = 0
        self.rss_bytes = 0
        self.leak = leak
        self.occupation = self

    def look(self) -> None:
        """The rule that no optimizer state or gradient is ever beside a KV cache."""
        beside = self.learner & {"optimizer", "gradients"}
        assert not ("kv_cache" in self.servers and beside), (self.servers, self.learner)
        assert self.starts_held or not beside  # a server that starts takes all it finds

    async def offload(self, parts: Sequence[str]) -> None:
        assert set(parts) <= self.learner
        await asyncio.sleep(0)
        self.learner -= set(parts)
        self.log.append(f"learner gives {' '.join(parts)}")

    async def onload(self, parts: Sequence[str]) -> None:
        assert not set(parts) & self.learner
        self.learner |= set(parts)
        self.log.append(f"learner takes {' '.join(parts)}")
        self.look()
        await asyncio.sleep(0)

    async def memory(self) -> dict[str, int]:
        self.look()
        self.rss_bytes += self.leak
        return {"learner_state_bytes": len(self.learner)}

    async def give(self, keep: frozenset[str]) -> frozenset[str]:
        gone = frozenset(self.servers - keep)
        await asyncio.sleep(0)
        self.servers &= keep
        if gone:
            self.log.append(f"servers give {' '.join(sorted(gone))}")
        return gone

    async def take(self, wanted: frozenset[str]) -> frozenset[str]:
        new = frozenset(wanted - self.servers)
        self.servers |= wanted
        if new:
            self.log.append(f"servers take {' '.join(sorted(new))}")
        self.look()
        await asyncio.sleep(0)
        return new

    async def hold_starts(self) -> None:
        self.starts_held = True

    async def allow_starts(self) -> None:
        self.starts_held = False

    def endpoints(self) -> list[ServerEndpoint]:
        return [ServerEndpoint("server-0", "", 1, 0)]


def config(**placement: Any) -> Config:
    return Config.model_validate(
        {"actor": {"model": "m"}, "placement": {"mode": "colocated", **placement}}
    )


def turn_of(devices: Devices, folder: Path, **placement: Any) -> ColocatedTurn:
    return ColocatedTurn(
        config(**placement),
        cast(LearnerClient, devices),
        cast(ServerPool, devices),
        MetricsLog(folder),
    )


async def cycle(turn: ColocatedTurn) -> dict[str, Any]:
    """One pass of the loop, from "generating" to "generating"; its figures."""
    figures: dict[str, Any] = {}
    for stage in ("learning", "syncing", "generating"):
        figures |= await turn.to(stage)
    return figures


async def test_one_cycle_goes_in_the_written_order(tmp_path: Path) -> None:
    devices = Devices()
    turn = turn_of(devices, tmp_path)
    await turn.to("generating")
    devices.log.clear()
    await cycle(turn)
    assert devices.log == [
        "servers give cuda_graph kv_cache weights",
        "learner takes gradients optimizer weights",
        "learner gives gradients optimizer",
        "servers take weights",
        "learner gives weights",
        "servers take cuda_graph kv_cache",
    ]


async def test_weights_that_stay_are_not_moved(tmp_path: Path) -> None:
    devices = Devices()
    turn = turn_of(devices, tmp_path, offload_learner_weights=False, release_server_weights=False)
    await turn.to("generating")
    devices.log.clear()
    await cycle(turn)
    assert devices.log == [
        "servers give cuda_graph kv_cache",
        "learner takes gradients optimizer",
        "learner gives gradients optimizer",
        "servers take cuda_graph kv_cache",
    ]


@given(st.lists(st.sampled_from(STAGES), max_size=8), st.booleans(), st.booleans())
def test_no_order_of_stages_puts_optimizer_or_gradients_beside_a_kv_cache(
    tmp_path_factory: pytest.TempPathFactory,
    visited: list[StageName],
    offload: bool,
    release: bool,
) -> None:
    async def play() -> None:
        devices = Devices()
        turn = turn_of(
            devices,
            tmp_path_factory.getbasetemp(),
            offload_learner_weights=offload,
            release_server_weights=release,
        )
        for name in visited:
            await turn.to(name)
            wanted = stages(
                config(offload_learner_weights=offload, release_server_weights=release).placement
            )[name]
            assert devices.learner == wanted.learner
            assert devices.servers == wanted.servers
            assert devices.starts_held == (name != "generating")

    asyncio.run(play())


async def test_visit_returns_to_the_stage_it_came_from(tmp_path: Path) -> None:
    devices = Devices()
    turn = turn_of(devices, tmp_path)
    await turn.to("generating")
    async with turn.visit("saving"):
        assert devices.learner == {"optimizer", "weights"}
        assert devices.servers == {"weights"}  # not released: nothing need be synced afterwards
    assert (devices.learner, devices.servers) == (set(), set(TAGS))


async def test_every_change_is_an_event_and_every_stage_has_its_figures(tmp_path: Path) -> None:
    turn = turn_of(Devices(), tmp_path)
    await turn.to("generating")
    figures = await cycle(turn)
    lines = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    assert [line["stage"] for line in lines] == ["generating", "learning", "syncing", "generating"]
    assert lines[1]["servers_gave"] == "cuda_graph kv_cache weights"
    assert lines[1]["learner_took"] == "gradients optimizer weights"
    for stage in ("generating", "floor", "learning", "syncing"):
        assert f"memory/{stage}_learner_state_bytes" in figures
        assert f"memory/{stage}_servers_rss_bytes" in figures
    assert figures["memory/floor_learner_state_bytes"] == 0
    assert figures["memory/learning_learner_state_bytes"] == 3
    assert {"time/to_learning_s", "time/to_syncing_s", "time/to_generating_s"} <= set(figures)


async def test_memory_that_grows_from_cycle_to_cycle_ends_the_run(tmp_path: Path) -> None:
    devices = Devices(leak=MIB)
    turn = turn_of(devices, tmp_path, memory_tolerance_mib=20)
    await turn.to("generating")
    with pytest.raises(DeviceMemoryError, match="the servers' processes did not return"):
        for _ in range(20):
            await cycle(turn)


async def test_restarted_server_is_synced_between_only_where_no_other_generates(
    tmp_path: Path,
) -> None:
    devices = Devices()
    turn = turn_of(devices, tmp_path)
    await turn.to("generating")
    devices.num_routable = 1
    async with turn.rejoining() as can_rejoin:
        assert not can_rejoin
    devices.num_routable = 0
    async with turn.rejoining() as can_rejoin:
        assert can_rejoin
        assert (devices.learner, devices.servers) == ({"weights"}, {"weights"})
    assert (devices.learner, devices.servers) == (set(), set(TAGS))


async def test_restarted_server_is_synced_at_once_where_the_learners_weights_are_there(
    tmp_path: Path,
) -> None:
    devices = Devices()
    turn = turn_of(devices, tmp_path, offload_learner_weights=False)
    await turn.to("generating")
    devices.num_routable = 1
    devices.log.clear()
    async with turn.rejoining() as can_rejoin:
        assert can_rejoin
    assert devices.log == []


@pytest.mark.parametrize("stage", ["starting", "learning", "syncing", "saving"])
async def test_restarted_server_waits_for_the_next_sync_in_every_other_stage(
    tmp_path: Path, stage: StageName
) -> None:
    turn = turn_of(Devices(), tmp_path)
    await turn.to(stage)
    async with turn.rejoining() as can_rejoin:
        assert not can_rejoin


async def test_failed_sync_of_a_restarted_server_leaves_the_devices_to_the_servers(
    tmp_path: Path,
) -> None:
    devices = Devices()
    turn = turn_of(devices, tmp_path)
    await turn.to("generating")
    with pytest.raises(WeightSyncError):
        async with turn.rejoining():
            raise WeightSyncError("server-0: no answer")
    assert (devices.learner, devices.servers) == (set(), set(TAGS))
    assert not devices.starts_held


async def test_turn_waits_for_a_server_that_rejoins(tmp_path: Path) -> None:
    devices = Devices()
    turn = turn_of(devices, tmp_path)
    await turn.to("generating")
    async with turn.rejoining():
        going = asyncio.create_task(turn.to("learning"))
        await asyncio.sleep(0.01)
        assert not going.done()
        assert "optimizer" not in devices.learner
    await going
    assert devices.learner == set(PARTS)


def test_servers_keep_their_weights_at_start_only_to_be_compared_with_the_learner() -> None:
    assert kept_at_start(config(), is_resumed=False) == {"weights"}
    assert kept_at_start(config(), is_resumed=True) == frozenset()
    unchecked = config().model_copy(update={"parity": ParityConfig(enabled=False)})
    assert kept_at_start(unchecked, is_resumed=False) == frozenset()


async def test_disaggregated_run_moves_nothing(tmp_path: Path) -> None:
    devices = Devices()
    plain = Config.model_validate({"actor": {"model": "m"}})
    turn = make_turn(
        plain, cast(LearnerClient, devices), cast(ServerPool, devices), MetricsLog(tmp_path)
    )
    assert await turn.to("learning") == {}
    async with turn.visit("saving"), turn.rejoining() as can_rejoin:
        assert can_rejoin
    assert devices.log == []
    assert not (tmp_path / "events.jsonl").exists()
