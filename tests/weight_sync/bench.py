"""A learner and its servers that are hurt on purpose, again and again.

Each run publishes new weights with one fault in the middle, sees what every server is said to be
and what it holds, and then has a clean publish repair everything.
"""

from __future__ import annotations

import contextlib
import re
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from operator import gt

from megarl.types import ServerSync, SyncReport
from megarl.weight_sync.probe import Probe
from tests.weight_sync import forked, tiny
from tests.weight_sync.call_faults import ACTIONS, Site, cont, strike
from tests.weight_sync.fake_server import Server
from tests.weight_sync.faults import Fault
from tests.weight_sync.forked import Answers, Learner, Place
from tests.weight_sync.open_files import more
from tests.weight_sync.scenarios import KINDS, LONG_S, SETTINGS, SHORT_S, Scenario

ENDING_S = 15.0  # past the deadline at most, when every learner rank has come back
PROMPT_S = (
    40.0  # at most, where something else than the deadline, LONG_S, ends a sync; on a busy machine
)
WAKE_S = 1.0  # past the deadline, when a stopped learner rank goes on
START_S = 60.0  # of a server's processes, on a busy machine
FLAT_S = 12.0  # for threads to end: one may still be trying to reach a learner that was killed


@dataclass
class Outcome:
    """How one run went: whether the server that was hurt proved the version, and else why not."""

    scenario: Scenario
    is_verified: bool
    error: str
    took_s: float


class Bench:
    """A learner and its servers in one setting, kept over runs."""

    def __init__(self, name: str) -> None:
        self.setting = SETTINGS[name]
        self._version = 0
        self._other: Learner | None = None
        self._other_version = 0
        self._learner = self._new_learner()
        self._servers = [
            self._new_server(f"server-{i}", nodes) for i, nodes in enumerate(self.setting.servers)
        ]
        self._repair()
        self._repair()
        self._flat, self._open = self._census()

    def _new_learner(self) -> Learner:
        places = [Place(node, rank) for rank, node in enumerate(self.setting.learner)]
        made = Learner(self.setting.mesh, places, LONG_S, self.setting.shares)
        made.probe_of = self._probe
        return made

    def _probe(self, seed: int) -> Probe:
        """What servers of these weights must score."""
        return tiny.probe(seed)

    def _new_server(self, name: str, nodes: str) -> Server:
        return forked.Server(name, tuple(nodes))

    def close(self) -> None:
        """End everything."""
        for made in (self._learner, self._other, *self._servers):
            if made is not None:
                made.close()

    def run(self, scenario: Scenario) -> Outcome:
        """One fault and its repair. Raises AssertionError where something does not hold."""
        self._version += 1
        version, released = self._version, threading.Event()
        server = self._servers[scenario.server]
        self._inject(scenario, server, released)
        is_in_learner = KINDS[scenario.kind].where == "learner"
        fault = _fault(scenario) if is_in_learner else None
        rank = scenario.rank % len(self._learner.places)
        timer = threading.Timer(SHORT_S + WAKE_S, self._wake_learner)
        timer.start()
        start = time.monotonic()
        self._learner.begin(version, version, self._servers, fault, rank, scenario.limit_s)
        answers = self._learner.ranks.answers()
        took_s = time.monotonic() - start
        timer.cancel()
        others = self._other.ranks.answers() if self._other_version else []
        self._lift(released)
        outcome = self._check(scenario, version, answers, others, took_s)
        self._mend(outcome, answers)
        self._repair()
        self._check_flat(scenario)
        return outcome

    def _inject(self, scenario: Scenario, server: Server, released: threading.Event) -> None:
        kind = KINDS[scenario.kind]
        self._other_version = 0
        if kind.where == "server":
            server.faults[scenario.rank % server.endpoint.tp] = _fault(scenario)
        if kind.where == "call":
            site = Site(server, self._learner, scenario.rank, scenario.at, released)
            if scenario.kind == "second learner":
                self._other = self._other or self._new_learner()
                site.again = lambda: self._begin_other(server)
            strike(site, ACTIONS[scenario.kind], scenario.route, scenario.moment)

    def _begin_other(self, server: Server) -> None:
        assert self._other is not None
        self._version += 1
        self._other_version = self._version
        self._other.begin(self._version, self._version, [server], None, 0, SHORT_S)

    def _wake_learner(self) -> None:
        cont(self._learner.ranks.processes)

    def _lift(self, released: threading.Event) -> None:
        """End what was injected, and let what is late come to its end."""
        released.set()
        for server in self._servers:
            server.hook = None
            server.faults = [None] * server.endpoint.tp
            if not server.is_dead:
                cont(server.ranks.processes)

    def _check(
        self,
        scenario: Scenario,
        version: int,
        answers: Answers,
        others: Answers,
        took_s: float,
    ) -> Outcome:
        limit_s = scenario.limit_s + ENDING_S if KINDS[scenario.kind].waits else PROMPT_S
        assert took_s < limit_s, f"came back after {took_s:.1f} s: {answers}"
        results = _results(answers)
        others_results = _results(others)
        hurt = self._servers[scenario.server]
        for server in self._servers:
            if scenario.kind in ("server hang", "server stop") and server is hurt:
                continue
            starts = (
                scenario.kind == "server rebooted" and server is hurt
            )  # new processes, in a call
            idle_s = START_S if starts else limit_s
            assert server.drain(idle_s), f"{server.endpoint.name} is held up"
        for server in self._servers:
            claims = {version: results.get(server.endpoint.name)}
            if self._other_version:
                claims[self._other_version] = others_results.get(server.endpoint.name)
            self._check_server(server, {v: claim for v, claim in claims.items() if claim})
        mine = results.get(hurt.endpoint.name)
        said = [str(answer) for answer in answers if isinstance(answer, str)]
        said += [mine.error] if mine else []
        is_verified = mine is not None and mine.verified
        if not is_verified:
            assert re.search(KINDS[scenario.kind].words, "; ".join(said)), said
        for server in self._servers:
            other = results.get(server.endpoint.name)
            if server is not hurt and KINDS[scenario.kind].where == "server":
                assert other and other.verified, f"spoiled another server: {other}"
        return Outcome(scenario, is_verified, "; ".join(said), took_s)

    def _check_server(self, server: Server, claims: dict[int, ServerSync]) -> None:
        """What is said of a server is true, and it is not called what nobody proved."""
        if not _is_alive(server):
            return
        proved = [version for version, claim in claims.items() if claim.verified]
        for claim in claims.values():
            assert claim.verified == (not claim.error), claim
        if proved:
            labels = [claims[version].label for version in proved]
            assert server.label in labels, (server.label, claims)
        if (proved or not server.is_paused) and server.version.isdigit():
            self._check_serves(server, int(server.version))

    def _check_serves(self, server: Server, version: int) -> None:
        """Its bytes are those of the version that it is labelled with."""
        assert server.holds(version), f"{server.endpoint.name} does not hold version {version}"

    def _mend(self, outcome: Outcome, answers: Answers) -> None:
        """Start anew what has ended; of servers that have refused, half are used as they are."""
        scenario = outcome.scenario
        hurt = self._servers[scenario.server]
        for server in self._servers:
            is_given_up = server is hurt and not outcome.is_verified and scenario.at % 2
            if not _is_alive(server) or is_given_up or scenario.kind == "server hang":
                server.restart()
        if None in answers:
            self._learner.close()
            self._learner = self._new_learner()

    def _repair(self) -> None:
        """A clean publish brings every server to new weights, whatever was before."""
        self._version += 1
        answers = self._learner.publish(self._version, self._version, self._servers)
        results = _results(answers)
        assert len(results) == len(self._servers), answers
        for server in self._servers:
            result = results[server.endpoint.name]
            assert result.verified, f"not repaired: {result}"
            assert server.version == str(self._version)
            self._check_serves(server, self._version)

    def _counted(self) -> list[Server]:
        """Servers whose files and threads are looked at."""
        return self._servers

    def _census(self) -> tuple[list[int], list[list[str]]]:
        """Files and threads of every process, and the files by name."""
        found = self._learner.ranks.ask(("census",))
        for server in self._counted():
            found += server.ranks.ask(("census",))
        counts = [count for each in found for count in (each["files"], each["threads"])]
        return counts, [each["open"] for each in found]

    def _check_flat(self, scenario: Scenario) -> None:
        """Files and threads are no more than they were before any fault."""
        if scenario.kind == "learner hang":  # a thread that nothing can end
            self._learner.close()
            self._learner = self._new_learner()
            self._repair()
        until = time.monotonic() + FLAT_S
        while True:
            counts, opened = self._census()
            if not any(map(gt, counts, self._flat)):
                return
            assert time.monotonic() < until, (
                f"{counts} files and threads, were {self._flat}\n{more(opened, self._open)}"
            )


def _fault(scenario: Scenario) -> Fault:
    return Fault(scenario.kind.split(" ", 1)[1], scenario.at, SHORT_S + WAKE_S / 2)


def _is_alive(server: Server) -> bool:
    return not server.is_dead and all(rank.is_alive() for rank in server.ranks.processes)


def _results(answers: Sequence[SyncReport | str | None]) -> dict[str, ServerSync]:
    """What the ranks that have come back say of each server; all must say the same."""
    reports = [answer for answer in answers if isinstance(answer, SyncReport)]
    for report in reports:
        assert report.servers == reports[0].servers
    with contextlib.suppress(IndexError):
        return {result.server: result for result in reports[0].servers}
    return {}
