"""Weight sync between nodes, in real processes over real Gloo groups; "nodes" are names.

No Megatron and no SGLang: `test_publish.py` has a real server on another node.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Sequence

import psutil
import pytest

from megarl.errors import RolloutError
from megarl.reshard.mesh import LearnerMesh
from megarl.rollout.client import Completion
from megarl.rollout.proved import ProvedVersions
from megarl.types import SyncReport, VersionSpan
from tests.weight_sync.faults import Fault
from tests.weight_sync.forked import Answers, Learner, Place, Server, distinct_bytes
from tests.weight_sync.worlds import LONG_S, SHORT_S, World, first_error, held, verified

GROWTH_KIB = 1024  # of one rank over twenty syncs, each of which moves 344 KiB
ENDING_S = 20.0  # past the deadline at most: sessions are ended, words are said
BEGUN_S = 12.0  # deadline.sync_s where it is meant to pass with a sync well under way


def wait_until(is_so: Callable[[], bool], limit_s: float) -> None:
    """Until another process has come so far."""
    until = time.monotonic() + limit_s
    while not is_so():
        assert time.monotonic() < until
        time.sleep(0.01)


def on(*nodes: str) -> list[Place]:
    return [Place(node, rank) for rank, node in enumerate(nodes)]


CASES = {
    "apart": (LearnerMesh(tp=2), on("a", "a"), [("b", "b")]),
    "server across two nodes": (LearnerMesh(tp=2), on("a", "a"), [("b", "c")]),
    "one server rank beside the learner": (LearnerMesh(pp=2), on("a", "a"), [("a", "b")]),
    "one learner rank beside the server": (LearnerMesh(tp=2), on("a", "b"), [("b", "b")]),
    "replicas on two nodes": (LearnerMesh(dp=2), on("a", "b"), [("b", "c")]),
    "two servers, one beside": (LearnerMesh(tp=2), on("a", "a"), [("a", "a"), ("b",)]),
    "two servers apart": (LearnerMesh(), on("a"), [("b",), ("c", "d")]),
}


@pytest.mark.parametrize("case", CASES)
def test_weights_arrive_bit_by_bit_and_cross_the_network_once_for_each_node(
    world: World, case: str
) -> None:
    mesh, places, nodes = CASES[case]
    learner = world.learner(mesh, places)
    servers = [world.server(f"server-{i}", mine) for i, mine in enumerate(nodes)]
    plans = [learner.plan(server).traffic for server in servers]
    for version in (1, 2):
        answers = learner.publish(version, version, servers)
        assert verified(answers)
        assert isinstance(answers[0], SyncReport)
        sent = sum(sum(plan.network_out.values()) for plan in plans)
        assert answers[0].network_bytes == sent > 0
        for server, plan in zip(servers, plans, strict=True):
            assert server.holds(version) and server.version == str(version)
            for rank, ack in enumerate(server.acks):
                assert ack is not None
                for link, planned in (
                    ("network", plan.network_in),
                    ("fanout", plan.fanout_in),
                    ("node", plan.node_in),
                    ("local", plan.local),
                ):
                    assert ack.moved_bytes.get(link, 0) == planned.get(rank, 0), link
    if case == "apart":
        assert sum(plans[0].network_out.values()) == distinct_bytes()
        assert plans[0].fanout_in


@pytest.mark.parametrize(
    ("nodes", "shares"),
    [(("b", "b"), False), (("a", "a"), False), (("a", "a"), True), (("a", "b"), True)],
    ids=["apart", "beside", "in place", "across"],
)
def test_twenty_syncs_leave_files_threads_store_and_memory_as_they_were(
    world: World, nodes: tuple[str, str], shares: bool
) -> None:
    learner = world.learner(LearnerMesh(tp=2), on("a", "a"), shares=shares)
    server = world.server("server-0", nodes)
    for version in range(1, 6):
        assert verified(learner.publish(version, version, [server]))

    def open_things() -> tuple[list[object], list[int]]:
        found = [*learner.ranks.ask(("census",)), *server.ranks.ask(("census",))]
        memory = [each.pop("own_kib") for each in found]
        return [*found, sorted(learner.shared)], memory

    before, memory_before = open_things()
    for version in range(6, 26):
        assert verified(learner.publish(version, version, [server]))
    assert server.holds(25)
    after, memory_after = open_things()
    assert after == before
    for kib_before, kib_after in zip(memory_before, memory_after, strict=True):
        assert kib_after - kib_before < GROWTH_KIB, (memory_before, memory_after)


def test_server_that_is_started_anew_gets_a_new_group(world: World) -> None:
    learner, server = world.pair()
    before = held(learner)
    for version in (2, 3):
        server.restart()
        start = time.monotonic()
        assert verified(learner.publish(version, version, [server], limit_s=LONG_S))
        assert time.monotonic() - start < LONG_S / 2  # nobody waited for the old one
        assert server.holds(version)
    assert held(learner) == before


FAULTS: dict[str, tuple[Callable[[Learner, Server], Answers], str]] = {
    "a bit is changed": (
        lambda learner, server: learner.publish(2, 2, [server], Fault("change", 3)),
        "checksums differ",
    ),
    "a bucket is dropped": (
        lambda learner, server: learner.publish(2, 2, [server], Fault("drop", 1), 1),
        "from learner rank 1",  # in time, or: it gave up first, and closed
    ),
    "a bucket is sent twice": (
        lambda learner, server: learner.publish(2, 2, [server], Fault("double", 2), 1),
        "to TP rank",
    ),
    "a server rank is killed": (
        lambda learner, server: _fault_in(learner, server, Fault("kill", 3)),
        "has ended",
    ),
    "a server rank hangs": (
        lambda learner, server: _fault_in(learner, server, Fault("stop", 3)),
        "to TP rank 1",
    ),
}


def _fault_in(learner: Learner, server: Server, fault: Fault) -> Answers:
    server.faults[1] = fault
    answers = learner.publish(2, 2, [server])
    server.restart()
    return answers


@pytest.mark.parametrize("kind", FAULTS)
def test_failed_sync_ends_in_time_names_who_and_the_next_one_succeeds(
    world: World, kind: str
) -> None:
    learner, server = world.pair()
    before = held(learner)
    fail, who = FAULTS[kind]
    start = time.monotonic()
    error = first_error(fail(learner, server))
    assert time.monotonic() - start < SHORT_S + ENDING_S
    assert who in error, error
    start = time.monotonic()
    assert verified(learner.publish(3, 3, [server], limit_s=LONG_S))
    assert time.monotonic() - start < LONG_S / 2
    assert server.holds(3) and server.version == "3"
    assert held(learner) == before


def test_killed_learner_rank_is_named_by_the_server_which_serves_the_next_learner(
    world: World,
) -> None:
    learner, server = world.pair()
    start = time.monotonic()
    answers = learner.publish(2, 2, [server], Fault("kill", 2), 1, limit_s=60.0)
    assert time.monotonic() - start < 15  # nobody waits for the deadline
    assert answers[1] is None and "a learner rank has ended" in str(answers[0])
    assert server.drain(LONG_S)
    errors = [ack.error for ack in server.acks if ack is not None]
    assert len(errors) == 2 and all("learner rank" in error for error in errors), errors
    assert any("from learner rank 1 failed" in error for error in errors), errors
    learner.ranks.kill()
    again = world.learner(LearnerMesh(tp=2), learner.places)
    assert verified(again.publish(3, 3, [server]))
    assert server.holds(3)


def test_learner_rank_that_ends_before_it_sends_holds_up_no_server(world: World) -> None:
    learner, server = world.pair(60.0)
    start = time.monotonic()
    answers = learner.publish(2, 2, [server], Fault("kill early"), 1)
    assert answers[1] is None and "a learner rank has ended" in str(answers[0])
    assert server.drain(15.0) and time.monotonic() - start < 20


def test_learner_rank_that_hangs_is_named_by_the_server_and_the_next_sync_succeeds(
    world: World,
) -> None:
    """The other learner ranks wait for it, until the deadline of the verb ends the learner."""
    learner, server = world.pair()
    server.acks = []
    learner.begin(2, 2, [server], Fault("stop", 2), 1, limit_s=BEGUN_S)
    wait_until(lambda: len(server.acks) == 2, BEGUN_S + ENDING_S)
    errors = [ack.error for ack in server.acks if ack is not None]
    assert len(errors) == 2
    assert any("from learner rank 1 did not end in time" in error for error in errors), errors
    os.kill(learner.ranks.processes[1].pid or 0, signal.SIGCONT)
    assert "learner rank 1" in first_error(learner.ranks.answers())
    assert verified(learner.publish(3, 3, [server], limit_s=LONG_S))
    assert server.holds(3)


def test_killed_learner_holds_no_server_up_for_longer_than_the_deadline(world: World) -> None:
    learner, server = world.pair()
    server.faults[0] = Fault("stop", 2)  # so that the other ranks are in the middle of it
    learner.begin(2, 2, [server], limit_s=BEGUN_S)
    stopped = psutil.Process(server.ranks.processes[0].pid)
    wait_until(lambda: stopped.status() == psutil.STATUS_STOPPED, BEGUN_S)
    learner.ranks.kill()
    wait_until(lambda: 1 in server.ranks.heard, BEGUN_S + ENDING_S)
    assert not server.ranks.heard[1].ok
    server.restart()
    again = world.learner(LearnerMesh(tp=2), learner.places)
    assert verified(again.publish(3, 3, [server]))


@pytest.mark.parametrize("when", ["before", "after"])
def test_update_that_is_delivered_again_changes_nothing_and_holds_nobody_up(
    world: World, when: str
) -> None:
    learner, server = world.pair(30.0)

    def hook(route: str, moment: str, body: dict[str, list[str]]) -> None:
        if (route, moment) == ("/update_weights_from_tensor", when):
            server.deliver(server.payloads[0])  # of the sync before
            server.deliver(body["serialized_named_tensors"])

    server.hook = hook
    start = time.monotonic()
    assert verified(learner.publish(2, 2, [server]))
    assert time.monotonic() - start < 15
    assert server.holds(2) and server.version == "2"


def test_old_update_that_reaches_a_server_started_anew_holds_nobody_up(world: World) -> None:
    learner, server = world.pair(120.0)
    server.restart()  # it knows nothing of what was handed to it before
    server.is_open = True
    start = time.monotonic()
    server.deliver(server.payloads[0])
    assert time.monotonic() - start < 30
    errors = [ack.error for ack in server.acks if ack is not None]
    assert len(errors) == 2
    assert all("the sync that this update is of has ended" in error for error in errors), errors
    server.is_open = False
    assert verified(learner.publish(2, 2, [server]))
    assert server.holds(2)


@pytest.mark.parametrize("nodes", [("b", "b"), ("a", "a")], ids=["apart", "beside"])
def test_second_learner_is_refused_while_the_first_is_at_its_server(
    world: World, nodes: tuple[str, str]
) -> None:
    """It takes the first one's session over, and must not write what the first would label."""
    first, second = (world.learner(LearnerMesh(tp=2), on("a", "a")) for _ in range(2))
    server = world.server("server-0", nodes)
    assert verified(first.publish(1, 1, [server]))
    others: list[Answers] = []

    def hook(route: str, when: str, body: object) -> None:
        if (route, when) == ("/update_weights_from_tensor", "after") and not others:
            others.append([])
            others[0] = second.publish(7, 7, [server])

    server.hook = hook
    results = [first_error(first.publish(2, 2, [server])), first_error(others[0])]
    assert "another learner syncs it; " in results[0]
    assert "is syncing this server to version 2; refused: end one of" in results[1]
    assert server.version == "1" and server.holds(2)
    server.hook = None
    assert verified(second.publish(7, 8, [server]))  # the first has nothing more to do here
    assert server.version == "8" and server.holds(7)


def test_server_that_another_learner_resumed_is_paused_again_before_it_is_written(
    world: World,
) -> None:
    first, second = (world.learner(LearnerMesh(tp=2), on("a", "a")) for _ in range(2))
    server = world.server("server-0", ("a", "a"))
    assert verified(first.publish(1, 1, [server]))
    others: list[Answers] = []

    def hook(route: str, when: str, body: object) -> None:
        if (route, when) == ("/begin_weight_update", "before") and not others:
            others.append([])
            others[0] = second.publish(7, 7, [server])

    server.hook = hook
    paused: list[bool] = []

    def load(payloads: Sequence[str], faults: Sequence[Fault | None]) -> None:
        paused.append(server.is_paused)
        kept(payloads, faults)

    kept, server._load = server._load, load  # type: ignore[method-assign]
    assert verified(first.publish(2, 2, [server])) and verified(others[0])
    assert paused == [True, True] and server.holds(2)


def test_version_of_one_run_is_not_taken_for_that_of_another_at_the_same_server(
    world: World,
) -> None:
    learners = [world.learner(LearnerMesh(tp=2), on("a", "a")) for _ in range(2)]
    server = world.server("server-0", ("a", "a"))
    proved = [ProvedVersions(), ProvedVersions()]
    for seed, (learner, mine) in enumerate(zip(learners, proved, strict=True), start=1):
        report = learner.publish(seed, 5, [server])[0]
        assert isinstance(report, SyncReport) and report.servers[0].verified
        mine.prove(server.endpoint, report.servers[0].label)
    assert server.version == "5" and server.holds(2)
    sampled = Completion((1,), (-1.0,), "length", (VersionSpan(0, 1, 5),), (server.label,))
    proved[1].check(server.endpoint, [sampled], ["a"])
    with pytest.raises(RolloutError, match="which that process never proved to this run"):
        proved[0].check(server.endpoint, [sampled], ["a"])


def test_one_bad_server_does_not_hold_up_the_others(world: World) -> None:
    learner, good = world.pair()
    bad = world.server("bad", ("z",))
    bad.faults[0] = Fault("drop", 0)
    start = time.monotonic()
    report = learner.publish(2, 2, [bad, good])[0]
    assert isinstance(report, SyncReport)
    results = {server.server: server for server in report.servers}
    assert results["server-0"].verified and not results["bad"].verified
    assert time.monotonic() - start < SHORT_S + ENDING_S
    assert good.holds(2)


def test_server_that_refuses_is_told_of_at_once_and_nobody_waits(world: World) -> None:
    learner, server = world.pair(30.0)
    server.hook = lambda route, when, body: (500, "no")
    start = time.monotonic()
    assert "500" in first_error(learner.publish(2, 2, [server]))
    assert time.monotonic() - start < 15
    server.hook = None
    assert verified(learner.publish(3, 3, [server]))


def test_arenas_are_made_for_servers_of_the_node_alone_and_removed_at_the_end(
    world: World,
) -> None:
    learner, server = world.pair()
    assert learner.shared == []
    beside = world.server("beside", ("a",))
    assert verified(learner.publish(2, 2, [server, beside]))
    assert len(learner.shared) == 2  # one for each learner rank
    learner.ranks.ask(("close",))
    assert learner.shared == []
