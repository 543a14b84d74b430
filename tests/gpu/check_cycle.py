"""The colocated cycle, many times: weights go, come back at another address, and are synced."""

from __future__ import annotations

from tests.gpu.machine import SLACK_BYTES, Machine, Outcome, Peer
from tests.gpu.sides import Learner, Server

MAX_GIGABYTES = 4.0


def run(machine: Machine) -> Outcome:
    small = Machine(machine.dry, min(machine.gigabytes, MAX_GIGABYTES), machine.cycles)
    outcome = Outcome()
    server = Server(small, 1)
    for way in ("direct", "staged"):
        learner = Peer(small, Learner, "released")
        _warm_up(learner, server, way == "direct")
        baseline, addresses, stale = small.free_bytes(), set(), ""
        for cycle in range(small.cycles):
            addresses.add(learner.ask("load", cycle, (1 + cycle % 3) * (24 << 20)))
            text = learner.ask("message", 1, cycle, way == "direct")
            if stale:
                late = server.receive(stale)
                assert not late.ok and "arena" in late.error, f"stale message: {late}"
            ack = server.receive(text)
            wrong = server.differences(ack, learner.ask("sums")[0])
            assert not wrong, f"cycle {cycle}: {wrong[:3]}"
            learner.ask("withdraw")
            learner.ask("unload")
            stale = text
            lost = baseline - small.free_bytes()
            assert lost <= SLACK_BYTES, f"cycle {cycle}: {lost} bytes were not given back"
        outcome.want(f"{way}_addresses", len(addresses), low=1 if machine.dry else 2)
        outcome.want(f"{way}_lost_bytes", max(baseline - small.free_bytes(), 0), high=SLACK_BYTES)
        learner.close()
    outcome.figures["cycles"] = small.cycles
    return outcome


def _warm_up(learner: Peer, server: Server, direct: bool) -> None:
    """One sync, for what CUDA, Triton and torch take once."""
    learner.ask("load", 0)
    ack = server.receive(learner.ask("message", 1, 0, direct))
    assert ack.ok, ack.error
    learner.ask("sums")
    learner.ask("withdraw")
    learner.ask("unload")
