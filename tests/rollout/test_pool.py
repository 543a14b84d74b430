"""A server is asked only at a version it proved; a dead one comes back as a new incarnation."""

from __future__ import annotations

import asyncio
import socket
import time
from pathlib import Path

import pytest

from megarl.errors import ConfigError, RolloutError, WeightSyncError
from megarl.rollout import pool as pool_module
from megarl.rollout.pool import ServerPool
from megarl.types import ServerEndpoint, ServerSync, SyncReport
from tests.rollout.running import Fleet, fake_pool, make_config, verified


def refusal(endpoint: ServerEndpoint, version: int) -> SyncReport:
    proof = ServerSync(endpoint.name, endpoint.incarnation, verified=False, error="checksum of q")
    return SyncReport(version, (proof,), 0, 0, 0.0)


async def acquired(pool: ServerPool, version: int, within_s: float = 5.0) -> ServerEndpoint:
    async with asyncio.timeout(within_s), pool.acquire(version) as endpoint:
        return endpoint


async def test_server_is_routable_only_at_the_version_it_proved(tmp_path: Path) -> None:
    async with fake_pool(tmp_path, make_config()) as (pool, _):
        assert (await acquired(pool, 0)).incarnation == 0
        with pytest.raises(TimeoutError):
            await acquired(pool, 1, within_s=0.2)
        pool.mark_verified(verified(pool.endpoints(), 1))
        assert (await acquired(pool, 1)).name == "server-0"
        with pytest.raises(TimeoutError):
            await acquired(pool, 0, within_s=0.2)


async def test_wait_for_a_version_that_never_comes_ends_naming_the_servers(tmp_path: Path) -> None:
    config = make_config(deadline={"server_start_s": 0.2, "sync_s": 0.1})
    async with fake_pool(tmp_path, config) as (pool, _):
        with pytest.raises(RolloutError, match=r"version 7 within 0.3 s.*routable at version 0"):
            await acquired(pool, 7)


async def test_refused_version_is_never_acquired_and_the_reason_is_given(tmp_path: Path) -> None:
    config = make_config(deadline={"server_start_s": 0.2, "sync_s": 0.1})
    async with fake_pool(tmp_path, config) as (pool, _):
        pool.mark_verified(refusal(pool.endpoints()[0], 1))
        for version in (0, 1):
            with pytest.raises(RolloutError, match="refused: checksum of q"):
                await acquired(pool, version)


async def test_waiting_outlasts_a_refusal_that_is_followed_by_a_proof(tmp_path: Path) -> None:
    async with fake_pool(tmp_path, make_config()) as (pool, _):
        waiting = asyncio.create_task(acquired(pool, 1))
        await asyncio.sleep(0.05)
        pool.mark_verified(refusal(pool.endpoints()[0], 1))
        await asyncio.sleep(0.05)
        pool.mark_verified(verified(pool.endpoints(), 1))
        assert (await waiting).incarnation == 0


async def test_least_loaded_server_is_acquired(tmp_path: Path) -> None:
    config = make_config(rollout={"servers": 2})
    async with fake_pool(tmp_path, config) as (pool, _):
        async with (
            pool.acquire(0, num_samples=4) as first,
            pool.acquire(0, num_samples=2) as second,
            pool.acquire(0) as third,
        ):
            assert {first.name, second.name} == {"server-0", "server-1"}
            assert third == second
        assert len({e.url for e in pool.endpoints()}) == 2


async def test_dead_server_comes_back_and_waits_for_its_sync(tmp_path: Path) -> None:
    async with fake_pool(tmp_path, make_config()) as (pool, fleet):
        restarted: list[ServerEndpoint] = []

        async def hook(endpoint: ServerEndpoint) -> None:
            restarted.append(endpoint)
            await asyncio.sleep(0.1)
            pool.mark_verified(verified([endpoint], 0))

        pool.on_restart = hook
        old = pool.endpoints()[0]
        fleet.servers[0].kill()
        new = await acquired_new(pool)
        assert new.incarnation == old.incarnation + 1
        assert restarted == [new]
        assert pool.num_restarts == 1
        pool.mark_verified(verified([old], 5))  # late news of a process that is gone
        assert await acquired(pool, 0) == new


async def acquired_new(pool: ServerPool) -> ServerEndpoint:
    """The endpoint acquired once the death has been seen."""
    await until(lambda: pool.num_restarts > 0)
    return await acquired(pool, 0)


async def until(holds: object, within_s: float = 5.0) -> None:
    async with asyncio.timeout(within_s):
        while not holds():  # type: ignore[operator]
            await asyncio.sleep(0.01)


async def test_server_whose_sync_fails_after_restart_is_started_again(tmp_path: Path) -> None:
    async with fake_pool(tmp_path, make_config()) as (pool, fleet):

        async def hook(endpoint: ServerEndpoint) -> None:
            if endpoint.incarnation < 3:
                raise WeightSyncError("arena is stale")
            pool.mark_verified(verified([endpoint], 0))

        pool.on_restart = hook
        fleet.servers[0].kill()
        assert (await acquired_new(pool)).incarnation == 3


async def test_pool_gives_up_after_the_last_restart_with_the_end_of_the_log(tmp_path: Path) -> None:
    config = make_config(launch={"max_restarts": 2})
    async with fake_pool(tmp_path, config) as (pool, fleet):
        fleet.failing_starts = 9
        fleet.servers[0].kill()
        await until(lambda: pool.num_restarts > 0)
        with pytest.raises(RolloutError, match="max_restarts=2") as error:
            await acquired(pool, 0)
        assert "no kernel image is available" in str(error.value)
        assert len(fleet.servers) == 3


async def test_error_of_the_restart_hook_itself_reaches_those_who_wait(tmp_path: Path) -> None:
    async with fake_pool(tmp_path, make_config()) as (pool, fleet):

        async def hook(endpoint: ServerEndpoint) -> None:
            raise KeyError("a bug")

        pool.on_restart = hook
        fleet.servers[0].kill()
        await until(lambda: pool.num_restarts > 0)
        with pytest.raises(RolloutError, match="a bug"):
            await acquired(pool, 0)


async def test_restart_of_an_earlier_incarnation_does_nothing(tmp_path: Path) -> None:
    async with fake_pool(tmp_path, make_config()) as (pool, fleet):
        pool.restart("server-0", incarnation=0)
        await until(lambda: len(pool.endpoints()) == 1 and pool.endpoints()[0].incarnation == 1)
        pool.restart("server-0", incarnation=0)
        await asyncio.sleep(0.1)
        assert len(fleet.servers) == 2


async def test_server_in_doubt_is_asked_again_once_it_answers(tmp_path: Path) -> None:
    async with fake_pool(tmp_path, make_config()) as (pool, fleet):
        fleet.servers[0].is_healthy = False
        pool.report_trouble(pool.endpoints()[0], RuntimeError("reset"))
        with pytest.raises(TimeoutError):
            await acquired(pool, 0, within_s=0.3)
        fleet.servers[0].is_healthy = True
        assert (await acquired(pool, 0)).incarnation == 0


async def test_server_in_doubt_that_stays_silent_is_started_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool_module, "SUSPECT_S", 0.3)
    async with fake_pool(tmp_path, make_config()) as (pool, fleet):
        fleet.servers[0].is_healthy = False
        pool.report_trouble(pool.endpoints()[0], RuntimeError("reset"))
        await until(lambda: pool.num_restarts == 1)


async def test_refusal_while_in_doubt_is_not_forgotten(tmp_path: Path) -> None:
    async with fake_pool(tmp_path, make_config()) as (pool, fleet):
        fleet.servers[0].is_healthy = False
        pool.report_trouble(pool.endpoints()[0], RuntimeError("reset"))
        pool.mark_verified(refusal(pool.endpoints()[0], 1))
        fleet.servers[0].is_healthy = True
        with pytest.raises(TimeoutError):
            await acquired(pool, 0, within_s=0.5)


async def test_doubt_that_ends_while_a_newer_version_is_written_does_not_route(
    tmp_path: Path,
) -> None:
    async with fake_pool(tmp_path, make_config()) as (pool, fleet):
        fleet.servers[0].is_healthy = False
        pool.report_trouble(pool.endpoints()[0], RuntimeError("reset"))
        pool.hold(pool.endpoints())
        fleet.servers[0].is_healthy = True
        for version in (0, 1):
            with pytest.raises(TimeoutError):
                await acquired(pool, version, within_s=0.5)
        pool.mark_verified(verified(pool.endpoints(), 1))
        assert (await acquired(pool, 1)).incarnation == 0


@pytest.mark.parametrize("is_refused", [False, True])
async def test_server_that_a_sync_has_paused_is_not_killed_for_its_silence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_refused: bool
) -> None:
    monkeypatch.setattr(pool_module, "SUSPECT_S", 0.2)
    async with fake_pool(tmp_path, make_config()) as (pool, fleet):
        fleet.servers[0].is_healthy = False
        pool.report_trouble(pool.endpoints()[0], RuntimeError("reset"))
        pool.hold(pool.endpoints())
        if is_refused:
            pool.mark_verified(refusal(pool.endpoints()[0], 1))
        await asyncio.sleep(0.5)
        assert pool.num_restarts == 0 and len(fleet.servers) == 1


async def test_held_server_is_in_no_version_until_its_report(tmp_path: Path) -> None:
    async with fake_pool(tmp_path, make_config()) as (pool, _):
        (server,) = pool.endpoints()
        pool.hold([server])
        assert not pool.is_routable(server)
        with pytest.raises(TimeoutError):
            await acquired(pool, 0, within_s=0.2)
        assert pool.endpoints() == [server]  # alive, so that the next publish reaches it
        pool.mark_verified(verified([server], 1))
        assert pool.is_routable(server)


async def test_doubt_that_outlasts_a_sync_ends_at_the_newer_version(tmp_path: Path) -> None:
    async with fake_pool(tmp_path, make_config()) as (pool, fleet):
        fleet.servers[0].is_healthy = False
        pool.report_trouble(pool.endpoints()[0], RuntimeError("reset"))
        pool.mark_verified(verified(pool.endpoints(), 1))
        pool.report_trouble(pool.endpoints()[0], RuntimeError("reset again"))
        fleet.servers[0].is_healthy = True
        assert (await acquired(pool, 1)).incarnation == 0


async def test_taken_port_is_an_error_naming_port_and_setting(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        pool = ServerPool(
            make_config(launch={"rollout_port": port}), tmp_path, Fleet().spawn, "cpu"
        )
        with pytest.raises(ConfigError, match=rf"port {port} .*launch\.rollout_port"):
            await pool.start()
        await pool.aclose()


async def test_server_that_ends_at_its_start_shows_the_end_of_its_log(tmp_path: Path) -> None:
    fleet = Fleet()
    fleet.failing_starts = 1
    pool = ServerPool(make_config(), tmp_path, fleet.spawn, "cpu")
    with pytest.raises(RolloutError, match=r"(?s)ended with status 1 .*no kernel image"):
        await pool.start()
    await pool.aclose()


async def test_server_that_is_late_is_ended_naming_the_deadline(tmp_path: Path) -> None:
    fleet = Fleet()
    config = make_config(deadline={"server_start_s": 0.5})

    async def silent(*args: object) -> object:
        server = await fleet.spawn(*args)  # type: ignore[arg-type]
        server.is_healthy = False
        return server

    pool = ServerPool(config, tmp_path, silent, "cpu")  # type: ignore[arg-type]
    started = time.monotonic()
    with pytest.raises(RolloutError, match=r"deadline\.server_start_s=0\.5"):
        await pool.start()
    assert time.monotonic() - started < 5
    assert await fleet.servers[0].wait() == -9
    await pool.aclose()


async def test_server_that_does_not_take_its_own_key_is_ended(tmp_path: Path) -> None:
    fleet = Fleet()

    async def foreign(*args: object) -> object:
        server = await fleet.spawn(*args)  # type: ignore[arg-type]
        server.api_key = "another"
        return server

    pool = ServerPool(make_config(), tmp_path, foreign, "cpu")  # type: ignore[arg-type]
    with pytest.raises(RolloutError, match=r"not as it should.*HTTP 401"):
        await pool.start()
    assert await fleet.servers[0].wait() == -9
    await pool.aclose()


async def test_closing_ends_every_server(tmp_path: Path) -> None:
    async with fake_pool(tmp_path, make_config(rollout={"servers": 2})) as (pool, fleet):
        pass
    assert [await server.wait() for server in fleet.servers] == [-9, -9]
    assert pool.endpoints() == []
