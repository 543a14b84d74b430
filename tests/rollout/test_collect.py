"""Every group comes once, whole, at the expected version, within the bound on samples in flight."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from megarl.buffer.groupfile import read_group
from megarl.errors import RolloutError
from megarl.rollout import pool as pool_module
from megarl.rollout.client import NO_VERSION
from megarl.rollout.collect import Collector
from megarl.rollout.pool import ServerPool
from megarl.types import Group
from tests.rollout.running import (
    Answer,
    Body,
    FakeServer,
    Fleet,
    NumberVocabulary,
    answer_well,
    fake_pool,
    good_reply,
    make_config,
    make_prompts,
    verified,
)


@asynccontextmanager
async def collecting(
    tmp_path: Path, **groups: Any
) -> AsyncIterator[tuple[Collector, ServerPool, Fleet]]:
    config = make_config(**groups)
    async with fake_pool(tmp_path, config) as (pool, fleet):
        collector = Collector(config, pool, tmp_path, NumberVocabulary())
        try:
            yield collector, pool, fleet
        finally:
            await collector.close()


async def collected(collector: Collector, count: int, version: int = 0) -> list[Group]:
    return [group async for group in collector.collect(make_prompts(count), version)]


async def test_each_prompt_gives_one_group_in_its_file(tmp_path: Path) -> None:
    async with collecting(tmp_path) as (collector, _, _):
        groups = await collected(collector, 5)
    assert sorted(g.group_id for g in groups) == [f"v000000-{i:04d}" for i in range(5)]
    for group in groups:
        stored = read_group(group.path)
        assert stored.sample_ids == tuple(s.sample_id for s in group.samples)
        row, sample = stored.sample(3), group.samples[3]
        assert tuple(row.tokens) == sample.prompt_ids + sample.response_ids
        assert list(row.versions[row.prompt_length :]) == [0] * 3
        assert Path(group.path).parent == tmp_path / "rollouts" / "v000000"


async def test_samples_in_flight_reach_their_bound_and_never_exceed_it(tmp_path: Path) -> None:
    async with collecting(tmp_path) as (collector, _, fleet):
        await collected(collector, 9)
        assert fleet.servers[0].most_inflight == 8


async def test_two_servers_share_the_groups(tmp_path: Path) -> None:
    async with collecting(tmp_path, rollout={"servers": 2}) as (collector, _, fleet):
        await collected(collector, 8)
        assert [len(server.requests) for server in fleet.servers] == [4, 4]


async def test_groups_of_a_dead_server_are_issued_again_and_come_once(tmp_path: Path) -> None:
    async with collecting(tmp_path) as (collector, pool, fleet):

        async def hook(endpoint: Any) -> None:
            pool.mark_verified(verified([endpoint], 0))

        async def dies(server: FakeServer, body: Body) -> web.StreamResponse:
            server.kill()
            await asyncio.sleep(5)
            raise AssertionError

        pool.on_restart = hook
        fleet.answers += [answer_well, answer_well, dies]
        groups = await collected(collector, 8)
        assert sorted(g.group_id for g in groups) == [f"v000000-{i:04d}" for i in range(8)]
        rids = [rid for server in fleet.servers for body in server.requests for rid in body["rid"]]
        assert len(rids) == len(set(rids)), "a request id was used twice"
        assert len(fleet.servers) == 2


async def test_server_that_fails_a_group_again_and_again_ends_the_rollout(tmp_path: Path) -> None:
    async def fails(server: FakeServer, body: Body) -> web.StreamResponse:
        return web.Response(status=500, text="no memory")

    async with collecting(tmp_path) as (collector, _, fleet):
        fleet.answers += [fails] * 3
        with pytest.raises(RolloutError, match="failed it 3 times.*no memory"):
            await collected(collector, 1)


async def test_tokens_of_another_version_are_refused_naming_the_sample(tmp_path: Path) -> None:
    async def mixed(server: FakeServer, body: Body) -> web.StreamResponse:
        reply = good_reply(server, body)
        reply[2]["meta_info"]["weight_versions"] = [
            {"version": "0", "start": 0, "end": 2},
            {"version": "1", "start": 2, "end": 3},
        ]
        return web.json_response(reply)

    async with collecting(tmp_path) as (collector, pool, fleet):
        pool.mark_verified(verified(pool.endpoints(), 1))
        pool.mark_verified(verified(pool.endpoints(), 0))  # both are proved; only one is asked for
        fleet.answers.append(mixed)
        with pytest.raises(RolloutError, match=r"v000000-0000-02: sampled from .*\[0, 1\]"):
            await collected(collector, 1)


def labelled(label: str) -> Answer:
    """An answer whose last sample ends with a token of another label."""

    async def answer(server: FakeServer, body: Body) -> web.StreamResponse:
        reply = good_reply(server, body)
        reply[-1]["meta_info"]["weight_versions"] = [
            {"version": "0", "start": 0, "end": 2},
            {"version": label, "start": 2, "end": 3},
        ]
        return web.json_response(reply)

    return answer


@pytest.mark.parametrize(
    ("label", "words"),
    [
        ("7", "version 7, which that"),
        ("0.7e57", r"version 0\.7e57, which that"),  # by another run, or by an earlier attempt
        ("default", "the weights it was started with, which that"),
    ],
)
async def test_token_of_a_version_that_its_server_never_proved_is_an_error_naming_all(
    tmp_path: Path, label: str, words: str
) -> None:
    async with collecting(tmp_path) as (collector, _, fleet):
        fleet.answers.append(labelled(label))
        where = r"v000000-0000-03\.\w+ from server-0, incarnation 0: tokens 2 to 3"
        with pytest.raises(
            RolloutError, match=rf"{where} were sampled from {words}.*last proved: 0\)"
        ):
            await collected(collector, 1)


async def test_version_that_another_server_proved_is_not_enough(tmp_path: Path) -> None:
    async with collecting(tmp_path, rollout={"servers": 2}) as (collector, pool, fleet):
        pool.mark_verified(verified(pool.endpoints()[1:], 1))
        fleet.answers.append(labelled("1"))  # by the first server, the only one at version 0
        with pytest.raises(RolloutError, match="from server-0.*never proved"):
            await collected(collector, 1)


async def test_version_that_an_earlier_incarnation_proved_is_not_enough(tmp_path: Path) -> None:
    async with collecting(tmp_path) as (collector, pool, fleet):
        pool.mark_verified(verified(pool.endpoints(), 1))

        async def hook(endpoint: Any) -> None:
            pool.mark_verified(verified([endpoint], 0))

        pool.on_restart = hook
        pool.restart("server-0")
        fleet.answers.append(labelled("1"))
        with pytest.raises(RolloutError, match=r"incarnation 1: .*version 1.*proved: 0\)"):
            await collected(collector, 1)


async def test_start_weights_may_be_scored_until_a_version_is_proved(tmp_path: Path) -> None:
    config = make_config()
    fleet = Fleet()
    pool = ServerPool(config, tmp_path, fleet.spawn, "cpu")
    await pool.start()
    collector = Collector(config, pool, tmp_path, NumberVocabulary())
    try:
        fleet.servers[0].version = "default"
        (server,) = pool.endpoints()
        (sample,) = await collector.probe(server, make_prompts(1), 4)
        assert sample.oldest_version == NO_VERSION
        pool.mark_verified(verified([server], 0))
        with pytest.raises(RolloutError, match="the weights it was started with"):
            await collector.probe(server, make_prompts(1), 4)
    finally:
        await collector.close()
        await pool.aclose()


async def test_response_that_ends_before_the_report_of_its_sync_waits_for_it(
    tmp_path: Path,
) -> None:
    async with collecting(tmp_path) as (collector, pool, fleet):
        (server,) = pool.endpoints()
        pool.hold([server])
        fleet.servers[0].version = 1
        asked = asyncio.create_task(collector.probe(server, make_prompts(1), 4))
        await asyncio.wait({asked}, timeout=0.3)
        assert not asked.done() and fleet.servers[0].requests
        pool.mark_verified(verified([server], 1))
        assert (await asked)[0].oldest_version == 1


async def test_group_held_by_a_paused_server_is_issued_again_once_that_is_synced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool_module, "SUSPECT_S", 0.2)

    async def paused(server: FakeServer, body: Body) -> web.StreamResponse:
        pool.hold(pool.endpoints())
        server.is_healthy = False  # a paused server does not answer when it is asked for health
        await asyncio.sleep(30)
        raise AssertionError

    async with collecting(tmp_path, deadline={"generate_s": 0.3}) as (collector, pool, fleet):
        fleet.answers.append(paused)
        asked = asyncio.create_task(collected(collector, 1))
        await asyncio.wait({asked}, timeout=1.5)
        assert not asked.done()
        pool.mark_verified(verified(pool.endpoints(), 0))
        assert len(await asked) == 1
        assert pool.num_restarts == 0


async def test_failure_of_one_group_aborts_the_others(tmp_path: Path) -> None:
    async def late(server: FakeServer, body: Body) -> web.StreamResponse:
        await asyncio.sleep(30)
        raise AssertionError

    async def refuses(server: FakeServer, body: Body) -> web.StreamResponse:
        await asyncio.sleep(0.2)
        return web.Response(status=400, text="too long")

    async with collecting(tmp_path) as (collector, _, fleet):
        fleet.answers += [late, refuses]
        with pytest.raises(RolloutError, match="too long"):
            await collected(collector, 2)
        assert len(fleet.servers[0].aborted) == 4


async def test_server_that_hangs_is_started_again_and_its_groups_come_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool_module, "SUSPECT_S", 0.3)

    async def hangs(server: FakeServer, body: Body) -> web.StreamResponse:
        server.is_healthy = False
        await asyncio.sleep(30)
        raise AssertionError

    async with collecting(tmp_path, deadline={"generate_s": 3.0}) as (collector, pool, fleet):

        async def hook(endpoint: Any) -> None:
            pool.mark_verified(verified([endpoint], 0))

        pool.on_restart = hook
        fleet.answers += [hangs, hangs]
        groups = await collected(collector, 4)
        assert sorted(g.group_id for g in groups) == [f"v000000-{i:04d}" for i in range(4)]
        assert len(fleet.servers) == 2


async def test_late_group_of_a_server_that_answers_ends_the_rollout(tmp_path: Path) -> None:
    async def late(server: FakeServer, body: Body) -> web.StreamResponse:
        await asyncio.sleep(30)
        raise AssertionError

    async with collecting(tmp_path, deadline={"generate_s": 0.5}) as (collector, _, fleet):
        fleet.answers.append(late)
        with pytest.raises(RolloutError, match=r"deadline\.generate_s=0\.5"):
            await collected(collector, 1)
        assert len(fleet.servers) == 1


async def test_room_of_cancelled_groups_is_free_again(tmp_path: Path) -> None:
    async def late(server: FakeServer, body: Body) -> web.StreamResponse:
        await asyncio.sleep(30)
        raise AssertionError

    async with collecting(tmp_path) as (collector, _, fleet):
        fleet.answers += [late, late]
        task = asyncio.create_task(collected(collector, 6))
        await asyncio.sleep(0.2)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert len(await collected(collector, 3)) == 3


async def test_evaluation_is_greedy_with_one_sample_per_prompt_in_order(tmp_path: Path) -> None:
    async with collecting(tmp_path) as (collector, _, fleet):
        prompts = make_prompts(5)
        samples = await collector.evaluate(prompts, 0)
        assert [s.prompt_id for s in samples] == [p.prompt_id for p in prompts]
        assert len({s.sample_id for s in samples}) == 5
        asked = [body["sampling_params"]["temperature"] for body in fleet.servers[0].requests]
        assert asked == [0.0] * 5
        assert not (tmp_path / "rollouts").exists()


async def test_stop_texts_and_end_tokens_are_sent_as_ids(tmp_path: Path) -> None:
    rollout = {"sampling": {"stop": ["17"], "temperature": 0.7, "max_new_tokens": 5}}
    async with collecting(tmp_path, rollout=rollout) as (collector, _, fleet):
        await collected(collector, 1)
        asked = fleet.servers[0].requests[0]["sampling_params"]
        assert asked["stop_token_ids"] == [2, 17]
        assert (asked["temperature"], asked["top_p"], asked["top_k"]) == (0.7, 1.0, -1)
