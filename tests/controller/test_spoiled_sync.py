"""What `megarl check sync` says of servers that take a sync well, badly, or not at all.

Learner and servers are stand-ins: SGLang's checksums come from a table.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import cast

import pytest

from megarl.config.schema import Config
from megarl.controller import spoiled_sync
from megarl.controller.spoiled_sync import SyncCheck, check_checkable, check_sync
from megarl.errors import ConfigError, RolloutError
from megarl.learner.client import LearnerClient
from megarl.rollout.pool import ServerPool
from megarl.types import ServerEndpoint, ServerSync, SyncReport

LOADED = [{"q": "1", "k": "2"}, {"q": "3", "k": "4"}]
SPOILT = [{"q": "x", "k": "x"}, {"q": "x", "k": "x"}]


class Site:
    """Servers whose tensors are `LOADED`, spoiled, then what `written` says; and a learner."""

    def __init__(self, written: list[dict[str, str]], result: ServerSync) -> None:
        self.server = ServerEndpoint("server-0", "http://s", 2, 0)
        self.http = object()
        self.now, self.written, self.result = LOADED, written, result
        self.spoils = True
        self.held: list[ServerEndpoint] = []

    def endpoints(self) -> list[ServerEndpoint]:
        return [self.server]

    def hold(self, endpoints: Sequence[ServerEndpoint]) -> None:
        self.held += endpoints

    async def checksums(self, http: object, server: ServerEndpoint) -> list[dict[str, str]]:
        return self.now

    async def spoil_weights(self, http: object, server: ServerEndpoint) -> None:
        if self.spoils:
            self.now = SPOILT

    async def publish(self, version: int, servers: Sequence[ServerEndpoint]) -> SyncReport:
        assert self.held == [self.server]
        self.now = self.written
        return SyncReport(version, (self.result,), 100, 100, 0.5)


PROVED = ServerSync("server-0", 0, True, probe_max_abs_logprob=2e-6)


def checked(site: Site, monkeypatch: pytest.MonkeyPatch, start_empty: bool = False) -> SyncCheck:
    monkeypatch.setattr(spoiled_sync, "calls", site)
    learner, servers = cast(LearnerClient, site), cast(ServerPool, site)
    return asyncio.run(check_sync(learner, servers, start_empty))


def test_sync_that_restores_what_was_loaded_is_as_it_should_be(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    check = checked(Site(LOADED, PROVED), monkeypatch)
    assert check.wrong == ()
    assert "100 bytes written into 1 server(s)" in check.facts[0]
    assert "all 4 tensors of 2 rank(s)" in check.facts[1] and "within 2e-06 nats" in check.facts[1]


def test_proved_tensor_that_is_not_the_checkpoints_blames_how_the_learner_read_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    check = checked(Site([LOADED[0], {"q": "3", "k": "9"}], PROVED), monkeypatch)
    (line,) = check.wrong
    assert line.startswith("server-0, rank 1: 1 of 2 tensors are not what SGLang itself loads")
    assert ": k. The sync proved them to be the learner's" in line
    assert len(check.facts) == 1


def test_refused_sync_is_told_with_its_reason_and_what_is_still_spoilt(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    refused = ServerSync("server-0", 0, False, "server-0: checksums differ: k of rank 1")
    check = checked(Site([LOADED[0], {"q": "3", "k": "x"}], refused), monkeypatch)
    assert check.wrong[0] == "server-0: checksums differ: k of rank 1"
    assert check.wrong[1].endswith("SGLang itself loads from actor.model: k")


def test_servers_that_start_empty_are_compared_with_nothing_and_that_is_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    other = [{"q": "7", "k": "8"}, {"q": "9", "k": "10"}]
    check = checked(Site(other, PROVED), monkeypatch, start_empty=True)
    assert check.wrong == ()
    assert "proved by the sync alone" in check.facts[1] and "2e-06 nats" in check.facts[1]
    refused = ServerSync("server-0", 0, False, "server-0: checksums differ: k of rank 1")
    assert checked(Site(other, refused), monkeypatch, start_empty=True).wrong == (refused.error,)


def test_server_that_cannot_be_spoiled_proves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    site = Site(LOADED, PROVED)
    site.spoils = False
    with pytest.raises(RolloutError, match="server-0: its weights are the same after"):
        checked(site, monkeypatch)


def test_shared_devices_are_refused_in_words() -> None:
    config = Config.model_validate(
        {"actor": {"model": "m"}, "placement": {"mode": "colocated", "learner_gpus": 1}}
    )
    with pytest.raises(ConfigError, match=r"--placement\.mode disaggregated"):
        check_checkable(config)
