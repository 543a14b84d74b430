"""Which servers become routable, and when one is tried again, started anew, or the run ends.

Learner and servers are stand-ins here: only our own handling of their answers is looked at.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import cast

import pytest

from megarl.controller.publisher import Publisher
from megarl.errors import WeightSyncError
from megarl.learner.client import LearnerClient
from megarl.observe.metrics import MetricsLog
from megarl.rollout.pool import ServerPool
from megarl.types import ServerEndpoint, ServerSync, SyncReport


class Learner:
    """Refuses a server as often as `refusals` says; remembers what was asked. Those in `lost` do
    not answer."""

    def __init__(self, lost: Sequence[str] = (), **refusals: int) -> None:
        self.refusals, self.lost = refusals, lost
        self.published: list[tuple[int, list[str]]] = []
        self.may_answer = asyncio.Event()
        self.may_answer.set()

    async def publish(self, version: int, servers: Sequence[ServerEndpoint]) -> SyncReport:
        await self.may_answer.wait()
        self.published.append((version, [server.name for server in servers]))
        results = []
        for server in servers:
            refused = self.refusals.get(server.name, 0) > 0
            self.refusals[server.name] = self.refusals.get(server.name, 0) - 1
            error = "checksums differ" if refused else ""
            if server.name in self.lost:
                refused, error = True, "no answer in time"
            results.append(
                ServerSync(
                    server.name,
                    server.incarnation,
                    not refused,
                    error,
                    is_lost=server.name in self.lost,
                    probe_max_abs_logprob=None if refused else version * 1e-6,
                )
            )
        return SyncReport(version, tuple(results), 100 * len(servers), 100 * len(servers), 0.1)


class Servers:
    """Remembers who was proved and who was started anew."""

    def __init__(self, *names: str) -> None:
        self.alive = [ServerEndpoint(name, f"http://{name}", 1, 0) for name in names]
        self.verified: list[tuple[str, int]] = []
        self.restarted: list[str] = []
        self.held: list[list[str]] = []
        self.on_restart: Callable[[ServerEndpoint], Awaitable[None]] | None = None

    def endpoints(self) -> list[ServerEndpoint]:
        return list(self.alive)

    def hold(self, endpoints: Sequence[ServerEndpoint]) -> None:
        self.held.append([endpoint.name for endpoint in endpoints])

    def mark_verified(self, report: SyncReport) -> None:
        self.verified += [(s.server, report.version) for s in report.servers if s.verified]

    def restart(self, name: str, incarnation: int) -> None:
        assert incarnation == 0
        self.restarted.append(name)


def publisher(learner: Learner, servers: Servers, tmp_path: Path) -> Publisher:
    return Publisher(cast(LearnerClient, learner), cast(ServerPool, servers), MetricsLog(tmp_path))


def events(tmp_path: Path) -> list[str]:
    path = tmp_path / "events.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return [json.loads(line)["event"] for line in lines]


def test_all_servers_get_the_version_in_one_call(tmp_path: Path) -> None:
    learner, servers = Learner(), Servers("a", "b")
    metrics = asyncio.run(publisher(learner, servers, tmp_path).publish(3))
    assert learner.published == [(3, ["a", "b"])]
    assert servers.verified == [("a", 3), ("b", 3)]
    assert metrics["weight_sync/bytes"] == metrics["weight_sync/minimum_bytes"] == 200
    assert metrics["weight_sync/verified_servers"] == 2
    assert metrics["weight_sync/probe_max_abs_logprob"] == pytest.approx(3e-6)


def test_server_that_refused_once_is_tried_again_alone(tmp_path: Path) -> None:
    learner, servers = Learner(b=1), Servers("a", "b")
    metrics = asyncio.run(publisher(learner, servers, tmp_path).publish(3))
    assert learner.published == [(3, ["a", "b"]), (3, ["b"])]
    assert servers.verified == [("a", 3), ("b", 3)]
    assert not servers.restarted
    assert events(tmp_path) == ["weight_sync_refused"]
    assert metrics["weight_sync/bytes"] == 300  # the refused attempt moved bytes too


def test_server_that_refuses_twice_is_started_anew_and_the_run_goes_on(tmp_path: Path) -> None:
    learner, servers = Learner(b=9), Servers("a", "b")
    metrics = asyncio.run(publisher(learner, servers, tmp_path).publish(3))
    assert servers.restarted == ["b"]
    assert servers.verified == [("a", 3)]
    assert metrics["weight_sync/verified_servers"] == 1


def test_server_that_does_not_answer_is_started_anew_at_once(tmp_path: Path) -> None:
    learner, servers = Learner(lost=["b"], c=1), Servers("a", "b", "c")
    metrics = asyncio.run(publisher(learner, servers, tmp_path).publish(3))
    assert learner.published == [(3, ["a", "b", "c"]), (3, ["c"])]
    assert servers.restarted == ["b"]
    assert servers.verified == [("a", 3), ("c", 3)]
    assert metrics["weight_sync/verified_servers"] == 2


def test_servers_are_out_of_routing_before_each_attempt_is_written(tmp_path: Path) -> None:
    learner, servers = Learner(b=1), Servers("a", "b")

    async def play() -> None:
        learner.may_answer.clear()
        publishing = asyncio.create_task(publisher(learner, servers, tmp_path).publish(3))
        await asyncio.wait({publishing}, timeout=0.05)
        assert servers.held == [["a", "b"]] and not learner.published
        learner.may_answer.set()
        await publishing

    asyncio.run(play())
    assert servers.held == [["a", "b"], ["b"]]


def test_only_server_that_fails_later_is_started_anew_and_the_run_goes_on(tmp_path: Path) -> None:
    learner, servers = Learner(), Servers("a")

    async def play() -> None:
        stage = publisher(learner, servers, tmp_path)
        await stage.publish(3)
        learner.refusals["a"] = 2
        assert (await stage.publish(4))["weight_sync/verified_servers"] == 0
        assert servers.restarted == ["a"]
        await stage.rejoin(servers.alive[0])

    asyncio.run(play())
    assert servers.verified == [("a", 3), ("a", 4)]


def test_first_version_that_no_server_proved_ends_the_run_with_the_reasons(tmp_path: Path) -> None:
    learner, servers = Learner(a=9), Servers("a")
    with pytest.raises(WeightSyncError, match=r"version 3 was proved by none.*checksums differ"):
        asyncio.run(publisher(learner, servers, tmp_path).publish(3))
    assert servers.verified == []


def test_restarted_server_rejoins_at_the_current_version(tmp_path: Path) -> None:
    learner, servers = Learner(), Servers("a", "b")

    async def play() -> None:
        stage = publisher(learner, servers, tmp_path)
        await stage.publish(3)
        assert servers.on_restart is not None
        await servers.on_restart(ServerEndpoint("b", "http://b", 1, 1))

    asyncio.run(play())
    assert learner.published[-1] == (3, ["b"])
    assert events(tmp_path) == ["server_rejoined"]


def test_server_restarted_while_the_weights_change_waits_for_the_next_version(
    tmp_path: Path,
) -> None:
    learner, servers = Learner(), Servers("a")

    async def play() -> None:
        stage = publisher(learner, servers, tmp_path)
        await stage.publish(3)
        await stage.leave_version()
        await stage.rejoin(servers.alive[0])
        assert learner.published == [(3, ["a"])]
        await stage.publish(4)

    asyncio.run(play())
    assert servers.verified == [("a", 3), ("a", 4)]


def test_weights_are_not_left_while_a_server_rejoins_at_their_version(tmp_path: Path) -> None:
    learner, servers = Learner(), Servers("a")

    async def play() -> None:
        stage = publisher(learner, servers, tmp_path)
        await stage.publish(3)
        learner.refusals["a"] = 1  # so that the rejoin calls the learner twice
        learner.may_answer.clear()
        rejoin = asyncio.create_task(stage.rejoin(servers.alive[0]))
        leave = asyncio.create_task(stage.leave_version())
        await asyncio.wait({leave}, timeout=0.05)
        assert not leave.done()
        learner.may_answer.set()
        await leave
        assert rejoin.done()
        assert learner.published == [(3, ["a"])] * 3

    asyncio.run(play())
