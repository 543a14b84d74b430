"""One learner rank of this process and a server of another node, in another: what a session keeps.

Servers load without SGLang, as in `test_p2p.py`.
"""

from __future__ import annotations

import os

import pytest
import torch

from megarl.errors import WeightSyncError
from megarl.reshard.mesh import LearnerMesh
from megarl.weight_sync import session
from megarl.weight_sync.control import SourceSpec
from megarl.weight_sync.session import WeightSync
from tests.weight_sync import tiny
from tests.weight_sync.faults import Fault, in_learner_rank
from tests.weight_sync.forked import Place, Server
from tests.weight_sync.tiny import SHAPE
from tests.weight_sync.worlds import World


def synced(world: World, run: str) -> tuple[WeightSync, Server, dict[str, torch.Tensor]]:
    """A learner, a server of another node that it has synced once, and its parameters."""
    spec, server = SourceSpec(SHAPE, LearnerMesh()), world.server("server-0", ("b",))
    parameters = tiny.on_learner(spec, tiny.weights(SHAPE, 1))[0]
    sync = WeightSync(
        f"{run}{os.getpid()}", spec, 0, parameters, "fp32",
        cpu_servers=True, deadline_s=30.0, place=Place("a", 0), bucket_bytes=16 << 10,
    )  # fmt: skip
    assert sync.publish(1, [server.endpoint]).servers[0].verified
    return sync, server, parameters


def test_message_let_go_after_its_sync_was_given_up_does_not_end_the_next_sync(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session, "_GRACE_S", 0.5)
    sync, server, parameters = synced(world, "late")
    with in_learner_rank(Fault("late", 1, for_s=2.5), parameters):
        sync._deadline_s = 0.8
        assert not sync.publish(2, [server.endpoint]).servers[0].verified
    server.drain()
    server.faults, sync._deadline_s = [Fault("late", 3, for_s=2.5)], 30.0  # still sending when
    report = sync.publish(3, [server.endpoint])  # the message of the sync before is let go
    assert report.servers[0].verified, report
    assert sync.sender.peers("server-0")._group is not None  # nobody has dropped it meanwhile
    sync.close()


def test_learner_that_cannot_sum_its_weights_says_so_and_vouches_for_no_server(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    sync, server, _ = synced(world, "nosum")

    def broken() -> dict[str, int]:
        raise WeightSyncError("as it was meant to")

    with monkeypatch.context() as patched:
        patched.setattr(sync.sender, "checksums", broken)
        with pytest.raises(WeightSyncError, match="as it was meant to"):
            sync.publish(2, [server.endpoint])
    assert server.version != "2"
    assert sync.publish(3, [server.endpoint]).servers[0].verified and server.holds(1)
    sync.close()


def test_groups_with_servers_are_left_when_the_sync_is_closed(world: World) -> None:
    sync, _, _ = synced(world, "left")
    peers = sync.sender.peers("server-0")
    assert peers._group is not None
    sync.close()
    assert peers._group is None
