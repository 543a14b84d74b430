"""Publishing into real SGLang servers: arrival proved, sabotage refused, nobody left hanging.

One TP1 and one TP2 server are shared by all tests; one that a test has killed is started anew.
"""

from __future__ import annotations

import dataclasses
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import requests
import torch
from transformers import AutoModelForCausalLM

from megarl.rollout.command import IN_PLACE_SWITCHES
from megarl.types import ServerEndpoint, ServerSync
from megarl.weight_sync import exchange, server_calls
from megarl.weight_sync.sender import Sender
from megarl.weight_sync.server_calls import PauseMode
from megarl.weight_sync.transport.shared import Arena, ArenaRef
from tests.weight_sync import sabotage, tiny
from tests.weight_sync.learner_ranks import LearnerRanks
from tests.weight_sync.published import (
    BOUND,
    PROMPT,
    Learner,
    Running,
    Site,
    assert_refused,
    assert_serves,
)
from tests.weight_sync.servers import RealServer, make_model
from tests.weight_sync.tiny import SHAPE


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    folder = tmp_path_factory.mktemp("weight_sync")
    model = make_model(folder / "model")
    servers = [RealServer(f"tp{tp}", model, tp, folder / f"tp{tp}.log") for tp in (1, 2)]
    try:
        oracle = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
        for server in servers:
            server.wait()
        yield Site(servers[0], servers[1], oracle)
    finally:
        for server in servers:
            server.kill()


@pytest.fixture
def site(shared: Site) -> Site:
    shared.tp1.revive()
    shared.tp2.revive()
    return shared


@pytest.fixture(scope="module")
def ranks() -> Iterator[LearnerRanks]:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    made = LearnerRanks(2, port)
    yield made
    made.close()


@pytest.fixture
def learner() -> Iterator[Learner]:
    made = Learner()
    yield made
    made.sync.close()


def test_two_publishes_in_a_row_arrive_bit_by_bit_and_are_served(
    site: Site, learner: Learner
) -> None:
    for seed in (1, 2):
        report = learner.publish(seed, site.tp1, site.tp2)
        assert [server.error for server in report.servers] == ["", ""]
        assert all(server.verified for server in report.servers)
        assert report.moved_bytes == report.minimum_bytes > 0
        assert_serves(site, site.tp1, seed, learner.version)
        assert_serves(site, site.tp2, seed, learner.version)


@pytest.mark.parametrize("mesh", [(2, 1, 1), (1, 2, 1), (1, 1, 2)], ids=["tp2", "pp2", "dp2"])
def test_two_learner_ranks_publish_together_to_both_servers(
    site: Site, ranks: LearnerRanks, mesh: tuple[int, int, int]
) -> None:
    seed = 10 + mesh[0] + 2 * mesh[1] + 4 * mesh[2]
    report, same = ranks.publish(mesh, seed, seed, [site.tp1.endpoint, site.tp2.endpoint])
    assert report["servers"] == same["servers"]
    assert [server["error"] for server in report["servers"]] == ["", ""]
    assert_serves(site, site.tp1, seed, seed)
    assert_serves(site, site.tp2, seed, seed)


@pytest.mark.parametrize("nodes", [("b", "b"), ("a", "b")], ids=["apart", "across"])
def test_server_on_another_node_gets_its_weights_by_messages_and_serves_them(
    site: Site, ranks: LearnerRanks, nodes: tuple[str, str]
) -> None:
    seed = 50 + len(set(nodes))
    server = dataclasses.replace(site.tp2.endpoint, nodes=nodes)
    report, _ = ranks.publish((2, 1, 1), seed, seed, [server], bucket_bytes=16 << 10)
    assert [found["error"] for found in report["servers"]] == [""]
    distinct = sum(tensor.numel() for tensor in tiny.weights(SHAPE, seed).values()) * 4
    assert report["moved_bytes"] == report["minimum_bytes"]
    if nodes == ("b", "b"):
        assert report["network_bytes"] == distinct
    else:
        assert 0 < report["network_bytes"] < distinct
    assert_serves(site, site.tp2, seed, seed)


def test_failure_on_one_learner_rank_is_raised_on_all_and_hangs_none(
    site: Site, ranks: LearnerRanks
) -> None:
    answers = ranks.publish((2, 1, 1), 30, 30, [site.tp1.endpoint], broken_rank=1)
    assert all("learner rank 1" in answer["error"] for answer in answers)


def _no_copy(sender: Sender, arena: Arena, route: object) -> None:
    """A sender that stamps its arena and forgets to fill it."""


def _no_stamp(arena: Arena, label: str) -> None:
    """A sender that does not say what its arena holds."""


_copy, _stage = Sender._copy, Sender.stage


def _swapped_copy(sender: Sender, arena: Arena, route: object) -> None:
    """A sender that stages two rows of the first tensor in each other's place."""
    _copy(sender, arena, route)  # type: ignore[arg-type]
    row = SHAPE.hidden_size * 4
    rows = arena.data[: 2 * row].view(2, row)
    rows.copy_(rows[[1, 0]].clone())


def _flipped_copy(sender: Sender, arena: Arena, route: object) -> None:
    """A sender with one flipped bit."""
    _copy(sender, arena, route)  # type: ignore[arg-type]
    arena.data[12345] ^= 1


def _forged_stage(sender: Sender, *args: object) -> ArenaRef:
    """A sender that names an arena of another time."""
    ref = _stage(sender, *args)  # type: ignore[arg-type]
    assert ref is not None
    return dataclasses.replace(ref, nonce="0" * 32)


def _elsewhere_stage(sender: Sender, *args: object) -> ArenaRef:
    """A sender on a host whose shared memory the server does not see."""
    ref = _stage(sender, *args)  # type: ignore[arg-type]
    assert ref is not None
    return dataclasses.replace(ref, name=ref.name.replace("_g", "_g9"), host="elsewhere")


Sabotage = Callable[[pytest.MonkeyPatch], None]
SABOTAGES: dict[str, tuple[Sabotage, str]] = {
    "stale arena": (lambda m: m.setattr(Sender, "_copy", _no_copy), "checksums differ"),
    "unstamped arena": (lambda m: m.setattr(Arena, "stamp", _no_stamp), "of another publish"),
    "rows swapped": (lambda m: m.setattr(Sender, "_copy", _swapped_copy), "checksums differ"),
    "bit flipped": (lambda m: m.setattr(Sender, "_copy", _flipped_copy), "checksums differ"),
    "wrong nonce": (lambda m: m.setattr(Sender, "stage", _forged_stage), "another run"),
    "other host": (lambda m: m.setattr(Sender, "stage", _elsewhere_stage), "another host"),
    "interval skipped": (
        lambda m: m.setattr(exchange, "LOAD_FORMAT", sabotage.LOADERS[0]),
        "checksums differ",
    ),
    "intervals swapped": (
        lambda m: m.setattr(exchange, "LOAD_FORMAT", sabotage.LOADERS[1]),
        "checksums differ",
    ),
}


@pytest.mark.parametrize("kind", SABOTAGES)
def test_sabotaged_publish_is_refused_and_the_next_one_repairs(
    site: Site, learner: Learner, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    assert learner.publish(3, site.tp1).servers[0].verified
    served = site.tp1.version()
    sabotaged, reason = SABOTAGES[kind]
    with monkeypatch.context() as patch:
        sabotaged(patch)
        report = learner.publish(4, site.tp1)
        assert_refused(report, reason)
        assert not report.servers[0].is_lost  # it is tried once more
    assert site.tp1.version() == served
    assert learner.publish(4, site.tp1).servers[0].verified
    assert_serves(site, site.tp1, 4, learner.version)


def test_publish_in_another_number_format_is_refused_and_changes_nothing(site: Site) -> None:
    good, other = Learner(), Learner("bf16")
    assert good.publish(5, site.tp1).servers[0].verified
    assert_refused(other.publish(6, site.tp1), "torch.float32 on the server")
    site.tp1.call("/continue_generation", {})  # a refused server stays paused
    assert_serves(site, site.tp1, 5, good.version)
    for made in (good, other):
        made.sync.close()


def test_session_that_a_dead_sender_left_open_is_ended_first(site: Site, learner: Learner) -> None:
    site.tp1.call("/begin_weight_update", {})
    assert learner.publish(7, site.tp1).servers[0].verified
    assert_serves(site, site.tp1, 7, learner.version)


def test_one_bad_server_does_not_spoil_the_others(site: Site, learner: Learner) -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    gone = ServerEndpoint("gone", f"http://127.0.0.1:{port}", 1, 0)
    locked = dataclasses.replace(site.tp1.endpoint, name="locked", admin_key="wrong")
    start = time.monotonic()
    results = {s.server: s for s in learner.publish(8, gone, locked, site.tp2).servers}
    assert time.monotonic() - start < 30  # half its deadline
    assert results["tp2"] == ServerSync("tp2", 0, True, label=site.tp2.label())
    assert "has ended or is unreachable" in results["gone"].error
    assert "401" in results["locked"].error
    assert_serves(site, site.tp2, 8, learner.version)


def test_success_without_an_acknowledgement_is_no_success(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    learner = Learner(deadline_s=1.0)
    monkeypatch.setattr(exchange, "LOAD_FORMAT", sabotage.LOADERS[2])
    report = learner.publish(9, site.tp2)
    assert_refused(report, "no acknowledgement from TP rank 0, TP rank 1")
    assert report.servers[0].is_lost  # asked again, it would take the deadline again
    learner.sync.close()


def test_hanging_server_is_given_up_at_the_deadline_and_repaired_later(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    learner = Learner()
    assert learner.publish(20, site.tp1).servers[0].verified
    with monkeypatch.context() as patch:
        patch.setattr(exchange, "LOAD_FORMAT", sabotage.LOADERS[3])
        patch.setattr(learner.sync, "_deadline_s", 2.0)
        start = time.monotonic()
        assert_refused(learner.publish(21, site.tp1), "did not answer within")
        assert time.monotonic() - start < 2.0 + server_calls.CLOSING_S + 20.0
    assert learner.publish(22, site.tp1).servers[0].verified
    assert_serves(site, site.tp1, 22, learner.version)
    entries = [path.name for path in Path("/dev/shm").glob(f"megarl_publish{os.getpid()}_*")]
    assert len(entries) == 1 and "_g1_" in entries[0]  # the one still being read was not reused
    learner.sync.close()


def assert_kept_to_versions(site: Site, server: RealServer, pause: PauseMode) -> None:
    """Requests that run while `server` is synced end as `pause` says, and the log-prob of each
    token is that of the version which the token names."""
    old, new, total = 60, 61, 100
    learner = Learner(pause=pause, site=site)
    assert learner.publish(old, server).servers[0].error == ""
    running = [Running(server, total).started() for _ in range(3)]
    (result,) = learner.publish(new, server).servers
    assert (result.verified, result.error) == (True, "")
    assert result.probe_max_abs_logprob is not None and result.probe_max_abs_logprob < BOUND
    for request in running:
        tokens = PROMPT + request.ended().tokens
        switch = request.spans[0][1]
        if pause == "abort":
            assert request.reason == "abort"
            assert request.spans == [(0, switch, "1")] and 0 < switch < total
        else:
            assert request.reason == "length"
            assert request.spans == [(0, switch, "1"), (switch, total, "2")]
        at = len(PROMPT) - 1  # the first log-prob of a response
        expected = site.logprobs(old, tokens)[at : at + switch]
        if pause == "retract":  # the keys and values of the older tokens were computed anew
            expected = torch.cat([expected, site.logprobs(new, tokens)[at + switch :]])
        if pause == "in_place":  # they stayed as they were; the last token had none yet
            rest = site.logprobs(new, tokens, cached=(old, at + switch))
            expected = torch.cat([expected, rest])
        assert (expected - request.logprobs).abs().max() < BOUND
    learner.sync.close()


@pytest.mark.parametrize("pause", ["retract", "abort"])
def test_requests_in_flight_keep_to_the_version_that_each_token_names(
    site: Site, pause: PauseMode
) -> None:
    assert_kept_to_versions(site, site.tp1, pause)


@pytest.mark.slow
def test_requests_that_keep_their_keys_and_values_keep_to_the_version_too(
    site: Site, tmp_path: Path
) -> None:
    model = make_model(tmp_path / "model")
    server = RealServer("kept", model, 1, tmp_path / "log", switches=IN_PLACE_SWITCHES)
    try:
        server.wait()
        assert_kept_to_versions(site, server, "in_place")
    finally:
        server.kill()


def test_server_that_would_mix_keys_of_two_versions_is_not_synced_in_place(site: Site) -> None:
    learner = Learner(pause="in_place")
    served = site.tp1.version()
    report = learner.publish(60, site.tp1)
    assert_refused(report, "runs without disable_radix_cache and disable_overlap_schedule")
    assert site.tp1.version() == served
    learner.sync.close()


def test_request_to_a_refused_server_gets_no_token_until_a_good_publish(
    site: Site, learner: Learner, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert learner.publish(62, site.tp1).servers[0].verified
    with monkeypatch.context() as patch:
        patch.setattr(exchange, "LOAD_FORMAT", sabotage.LOADERS[0])
        assert_refused(learner.publish(63, site.tp1), "checksums differ")
    waiting = Running(site.tp1, 10)
    assert not waiting.has_token(within_s=1.0)
    assert site.tp1.version() == "1"
    assert learner.publish(63, site.tp1).servers[0].verified
    assert waiting.ended().spans == [(0, 10, "3")]
    expected = site.logprobs(63, PROMPT + waiting.tokens)[len(PROMPT) - 1 :]
    assert (expected - waiting.logprobs).abs().max() < BOUND


def test_wrong_value_that_no_checksum_sees_is_caught_by_the_probe(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    learner = Learner(site=site)
    assert learner.publish(64, site.tp1).servers[0].verified
    running = Running(site.tp1, 100).started()
    with monkeypatch.context() as patch:
        patch.setattr(exchange, "LOAD_FORMAT", sabotage.TURN_ROTARY)
        report = learner.publish(65, site.tp1)
        assert_refused(report, "its log-probs are not the learner's: they differ by")
        assert site.tp1.version() == "2-refused"
        assert running.ended().reason == "abort"  # it may have tokens of the wrong weights
        waiting = Running(site.tp1, 10)
        assert not waiting.has_token(within_s=1.0)
        assert learner.publish(65, site.tp1).servers[0].verified  # turned back by the same loader
    assert waiting.ended().spans == [(0, 10, "3")]
    assert_serves(site, site.tp1, 65, learner.version)
    learner.sync.close()


def test_server_killed_in_the_middle_of_a_publish_is_reported_at_once(
    site: Site, learner: Learner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exchange, "LOAD_FORMAT", sabotage.LOADERS[3])
    killer = threading.Timer(sabotage.STALL_S / 4, site.tp1.kill)
    killer.start()
    start = time.monotonic()
    report = learner.publish(40, site.tp1)
    assert time.monotonic() - start < 30  # half its deadline
    assert_refused(report, "has ended or is unreachable")
    killer.join()
    with pytest.raises(requests.ConnectionError):
        site.tp1.call("/health")
