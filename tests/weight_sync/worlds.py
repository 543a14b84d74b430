"""What the tests of syncs between processes start, and how they read the answers."""

from __future__ import annotations

from collections.abc import Sequence

from megarl.reshard.mesh import LearnerMesh
from megarl.types import SyncReport
from tests.weight_sync.forked import Learner, Place, Server, apart

SHORT_S = 4.0  # deadline.sync_s where it is meant to pass
LONG_S = 60.0  # where it is not, however busy the machine is


class World:
    """What a test has started."""

    def __init__(self) -> None:
        self._made: list[Learner | Server] = []

    def learner(
        self,
        mesh: LearnerMesh,
        places: Sequence[Place],
        limit_s: float = 30.0,
        shares: bool = False,
    ) -> Learner:
        made = Learner(mesh, places, limit_s, shares)
        self._made.append(made)
        return made

    def server(self, name: str, nodes: Sequence[str]) -> Server:
        made = Server(name, nodes)
        self._made.append(made)
        return made

    def pair(self, limit_s: float = SHORT_S) -> tuple[Learner, Server]:
        """Two learner ranks on one node, a server of two ranks on another, with a sync behind."""
        places, (nodes,) = apart(2, 2)
        learner = self.learner(LearnerMesh(tp=2), places, limit_s)
        server = self.server("server-0", nodes)
        assert verified(learner.publish(1, 1, [server], limit_s=LONG_S))
        return learner, server

    def close(self) -> None:
        for made in self._made:
            made.close()


def verified(answers: Sequence[SyncReport | str | None]) -> bool:
    """Whether every rank reports that every server has proved the version."""
    reports = [answer for answer in answers if isinstance(answer, SyncReport)]
    assert len(reports) == len(answers), answers
    assert [s.error for r in reports for s in r.servers if s.error] == []
    return all(server.verified for report in reports for server in report.servers)


def first_error(answers: Sequence[SyncReport | str | None]) -> str:
    """What rank 0 reports of the one server, which must not have proved anything."""
    report = answers[0]
    assert isinstance(report, SyncReport) and not report.servers[0].verified
    return report.servers[0].error


def held(learner: Learner) -> list[tuple[int, ...]]:
    """Files and threads of each learner rank."""
    found = learner.ranks.ask(("census",))
    return [tuple(each[name] for name in ("files", "threads")) for each in found]
