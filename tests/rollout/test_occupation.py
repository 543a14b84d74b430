"""Servers' memory by tags: what is released is known, and no server is asked what would end it."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from megarl.errors import RolloutError
from megarl.linux import tree_rss_bytes
from megarl.rollout import calls
from megarl.rollout.occupation import TAGS, TagLedger
from megarl.types import ServerEndpoint
from tests.rollout.running import fake_pool, make_config

SERVER = ServerEndpoint("server-0", "", tp=1, incarnation=0)
ALL_BUT_WEIGHTS = TAGS - {"weights"}


def test_tag_that_was_not_released_cannot_be_resumed() -> None:
    ledger = TagLedger()
    ledger.release(SERVER, {"kv_cache"})
    with pytest.raises(RolloutError, match="weights is not released; SGLang would end"):
        ledger.resume(SERVER, {"kv_cache", "weights"})
    assert ledger.held(SERVER) == TAGS - {"kv_cache"}  # nothing of the refused call counts
    ledger.resume(SERVER, {"kv_cache"})
    with pytest.raises(RolloutError, match="kv_cache is not released"):
        ledger.resume(SERVER, {"kv_cache"})


def test_tag_cannot_be_released_twice() -> None:
    ledger = TagLedger()
    ledger.release(SERVER, TAGS)
    with pytest.raises(RolloutError, match="incarnation 0: kv_cache is released already"):
        ledger.release(SERVER, {"kv_cache"})


def test_unknown_tag_is_refused() -> None:
    with pytest.raises(RolloutError, match=r"\['kv'\] are no memory tags; use \['cuda_graph'"):
        TagLedger().release(SERVER, {"kv"})


def test_new_incarnation_holds_everything() -> None:
    ledger = TagLedger()
    ledger.release(SERVER, TAGS)
    assert ledger.held(ServerEndpoint("server-0", "", tp=1, incarnation=1)) == TAGS
    assert ledger.held(ServerEndpoint("server-1", "", tp=1, incarnation=0)) == TAGS


async def test_memory_is_given_by_idle_servers_and_taken_once(tmp_path: Path) -> None:
    async with fake_pool(tmp_path, make_config(rollout={"servers": 2})) as (pool, fleet):
        assert await pool.occupation.give(keep=frozenset({"weights"})) == ALL_BUT_WEIGHTS
        assert await pool.occupation.give(keep=frozenset({"weights"})) == frozenset()
        assert await pool.occupation.give(keep=frozenset()) == {"weights"}
        assert await pool.occupation.take(frozenset({"weights"})) == {"weights"}
        assert await pool.occupation.take(TAGS) == ALL_BUT_WEIGHTS
        assert await pool.occupation.take(TAGS) == frozenset()
        for server in fleet.servers:
            assert server.memory_calls == [
                "flush",
                "release cuda_graph kv_cache",
                "flush",
                "release weights",
                "resume weights",
                "resume cuda_graph kv_cache",
            ]
            assert not server.released


async def test_busy_server_is_ended_before_the_call_returns_and_the_other_goes_on(
    tmp_path: Path,
) -> None:
    async with fake_pool(tmp_path, make_config(rollout={"servers": 2})) as (pool, fleet):
        busy, idle = fleet.servers[:2]
        busy.inflight = 1
        await pool.hold_starts()
        await pool.occupation.give(keep=frozenset())
        assert busy.memory_calls == ["flush"]
        assert busy._status.done()  # its memory is free before others take it
        assert idle.released == TAGS
        assert [endpoint.name for endpoint in pool.endpoints()] == ["server-1"]


async def test_server_that_died_while_released_waits_and_comes_back_with_all_its_memory(
    tmp_path: Path,
) -> None:
    async with fake_pool(tmp_path, make_config()) as (pool, fleet):
        await pool.hold_starts()
        await pool.occupation.give(keep=frozenset())
        fleet.servers[0].kill()
        await asyncio.sleep(0.3)
        assert len(fleet.servers) == 1  # others have the devices
        assert not pool.endpoints()
        await pool.allow_starts()
        async with asyncio.timeout(10):
            while not pool.endpoints():
                await asyncio.sleep(0.02)
        assert pool.endpoints()[0].incarnation == 1
        assert await pool.occupation.take(TAGS) == frozenset()
        assert fleet.servers[1].memory_calls == []


async def test_starts_are_held_only_once_those_under_way_have_ended(tmp_path: Path) -> None:
    async with fake_pool(tmp_path, make_config()) as (pool, fleet):
        fleet.servers[0].kill()
        async with asyncio.timeout(10):
            while len(fleet.servers) < 2:
                await asyncio.sleep(0.01)
            await pool.hold_starts()
        assert [endpoint.incarnation for endpoint in pool.endpoints()] == [1]


async def test_server_in_doubt_is_settled_before_its_memory_may_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with fake_pool(tmp_path, make_config()) as (pool, _):
        settled = asyncio.Event()

        async def asked(*args: object) -> bool:
            await settled.wait()
            return True

        monkeypatch.setattr(calls, "is_healthy", asked)
        pool.report_trouble(pool.endpoints()[0], RolloutError("no answer"))
        holding = asyncio.create_task(pool.hold_starts())
        await asyncio.sleep(0.1)
        assert not holding.done()
        settled.set()
        async with asyncio.timeout(5):
            await holding


def test_memory_of_a_tree_is_that_of_its_processes() -> None:
    assert tree_rss_bytes([]) == 0
    assert tree_rss_bytes([os.getpid()]) > 10 << 20
