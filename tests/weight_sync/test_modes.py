"""Modes `hf` and `disk` with a real SGLang server that lacks megarl's loader, from TP2 x PP2.

What arrives is compared with plain slices (SGLang's own checksums) and, in log-probs, with Hugging
Face. A server that a test has ended is started anew.
"""

from __future__ import annotations

import dataclasses
import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from megarl.actor.shape import ModelShape
from megarl.reshard.mesh import LearnerMesh, ServerMesh
from megarl.types import (
    QuantizationError,
    ServerEndpoint,
    ServerSync,
    SyncReport,
    SyncTimes,
)
from megarl.weight_sync.modes import ModeSettings, merged
from megarl.weight_sync.probe import Probe
from megarl.weight_sync.unproved import GRACE_S
from tests.weight_sync import full_ranks, tiny
from tests.weight_sync.family_models import SHAPES, Oracle
from tests.weight_sync.forked import Ranks
from tests.weight_sync.full_ranks import Fault, Policy
from tests.weight_sync.servers import RealServer

MESH = LearnerMesh(tp=2, pp=2)
MESHES = {"deepseek": LearnerMesh(tp=2, dp=2, ep=2)}  # its three layers are no two stages
TOKENS = (7, 33, 120, 150, 4, 4, 51, 200, 13)
BOUND = 1e-5  # nats, mean, fp32
BUCKET_BYTES = 24 << 10  # less than a layer


@dataclass
class Site:
    """Four learner ranks, a server of one policy, and Hugging Face models of it."""

    model: str
    ranks: Ranks
    server: RealServer
    oracle: Oracle
    version: int = 0
    served: tuple[int, int] = (0, 0)  # the last version that was proved, and its seed

    @property
    def shape(self) -> ModelShape:
        return SHAPES[self.model]

    def logprobs(self, seed: int) -> tuple[float, ...]:
        """Hugging Face's log-probs of TOKENS with the weights of `seed`."""
        return tuple(self.oracle.score(seed, TOKENS[:1], TOKENS[1:]).tolist())

    def tell(
        self,
        seed: int,
        settings: ModeSettings,
        probed: int | None = None,
        fault: Fault | None = None,
    ) -> list[Any]:
        """Every rank's answer to a publish of the next version, the weights of `seed`."""
        self.version += 1
        probe = Probe(TOKENS, self.logprobs(seed if probed is None else probed), BOUND)
        folder = self.oracle.checkpoint(0)
        settings = dataclasses.replace(settings, bucket_bytes=BUCKET_BYTES, model=folder)
        arguments = (settings, self.version, [self.server.endpoint], probe, fault)
        mesh = MESHES.get(self.model, MESH)
        return self.ranks.ask(("publish", Policy(self.shape, mesh, seed), arguments))

    def publish(
        self,
        seed: int,
        settings: ModeSettings,
        probed: int | None = None,
        fault: Fault | None = None,
    ) -> SyncReport:
        """The same where it must end in a report, one on all ranks; the probe is of `probed`."""
        answers = self.tell(seed, settings, probed, fault)
        assert all(isinstance(answer, SyncReport) for answer in answers), answers
        assert all(answer.servers == answers[0].servers for answer in answers)
        report: SyncReport = answers[0]
        if all(server.verified for server in report.servers):
            self.served = self.version, seed
        return report

    def assert_served(self, seed: int) -> None:
        """The server's bytes and label are those of the last publish that was proved."""
        version, last = self.served
        assert last == seed
        tensors, tp = tiny.weights(self.shape, seed), self.server.endpoint.tp
        wanted = tiny.on_mesh(self.shape, ServerMesh(tp), tensors)
        for found, mine in zip(self.server.checksums(), wanted, strict=True):
            assert {name: found[name] for name in mine} == {
                name: tiny.sha256(tensor) for name, tensor in mine.items()
            }
        assert self.server.version() == str(version)
        tokens, _, label = self.server.sample([7, 33, 120], 4)
        assert (len(tokens), label) == (4, str(version))


def made(folder: Path, model: str, tp: int, has_loader: bool) -> Iterator[Site]:
    oracle = Oracle(folder / "models", model)
    log = folder / "server.log"
    server = RealServer("server", oracle.checkpoint(0), tp, log, has_loader=has_loader)
    ranks = full_ranks.start(MESH.size)
    try:
        server.wait()
        yield Site(model, ranks, server, oracle)
    finally:
        ranks.ask(("close", None, ()))
        ranks.kill()
        server.kill()


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    yield from made(tmp_path_factory.mktemp("modes"), "dense", 1, has_loader=False)


@pytest.fixture
def site(shared: Site) -> Site:
    shared.server.revive()
    return shared


@pytest.fixture
def wide(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Site]:
    """A server of TP2 with the loader, of the policy that the test names."""
    yield from made(tmp_path, request.param, 2, has_loader=True)


def assert_verified(report: SyncReport) -> None:
    assert [server.error for server in report.servers] == [""]
    assert [server.verified for server in report.servers] == [True]
    difference = report.servers[0].probe_max_abs_logprob
    assert difference is not None and difference < 10 * BOUND


def test_one_report_of_several_modes_keeps_what_each_of_them_measured() -> None:
    """Seconds and losses to float8 were once left out, so that a run's metrics had zeros."""
    server = ServerEndpoint("s", "http://127.0.0.1:1", 1, 0)
    times, lost = SyncTimes(1.0, 2.0, 3.0, 4.0, 5.0), QuantizationError(0.03, 0.02, "layer.1")
    exact = SyncReport(3, (ServerSync("s", 0, True),), 10, 10, 1.0, 7, lost, times)
    for reports in ([SyncReport(3, (), 0, 0, 0.0), exact], [exact, SyncReport(3, (), 0, 0, 0.0)]):
        found = merged(3, [server], reports)
        assert dataclasses.replace(found, took_s=1.0) == exact


HF = ModeSettings("hf")


@pytest.mark.parametrize("via", ["broadcast", "request"])
def test_server_without_the_loader_gets_the_policy_by_sglangs_own_calls(
    site: Site, via: Any
) -> None:
    for seed in (1, 2):  # the second time the group is there already
        report = site.publish(seed, dataclasses.replace(HF, hf_via=via))
        assert_verified(report)
        assert report.moved_bytes == report.minimum_bytes > 4 * BUCKET_BYTES
        site.assert_served(seed)


def test_auto_takes_hf_where_there_is_no_loader(site: Site) -> None:
    assert_verified(site.publish(3, ModeSettings("auto")))
    site.assert_served(3)


def test_exact_is_refused_in_words_where_there_is_no_loader(site: Site) -> None:
    assert_verified(site.publish(3, ModeSettings("auto")))
    (found,) = site.publish(4, ModeSettings("exact")).servers
    assert not found.verified
    assert "without --custom-weight-loader" in found.error
    site.assert_served(3)  # nothing was touched


def test_server_reads_the_policy_from_disk_and_older_folders_go(site: Site, tmp_path: Path) -> None:
    for seed in (5, 6):
        assert_verified(site.publish(seed, ModeSettings("disk", disk=tmp_path / "run")))
        site.assert_served(seed)
        (folder,) = (tmp_path / "run").iterdir()
        assert folder.name.startswith(f"v{site.version:06d}-")


def test_wrong_weights_fail_the_probe_and_the_next_sync_repairs(site: Site) -> None:
    (found,) = site.publish(7, HF, probed=8).servers
    assert not found.verified
    assert "log-probs are not the learner's" in found.error
    assert site.server.version() == f"{site.version}-refused"
    assert_verified(site.publish(8, HF))
    site.assert_served(8)


def test_failure_on_a_learner_rank_is_raised_on_all_and_the_next_sync_works(site: Site) -> None:
    answers = site.tell(9, HF, fault=Fault("break", 0, rank=2))
    assert all("learner rank 2" in answer for answer in answers)
    assert_verified(site.publish(9, HF))
    site.assert_served(9)


@pytest.mark.slow
@pytest.mark.parametrize("via", ["broadcast", "request"])
def test_stopped_server_is_given_up_at_the_deadline(site: Site, via: Any) -> None:
    settings = dataclasses.replace(HF, hf_via=via, deadline_s=4.0)
    fault = Fault("stop", 1, pid=site.server.process.pid)
    report = site.publish(10, settings, fault=fault)
    os.killpg(site.server.process.pid, signal.SIGCONT)
    (found,) = report.servers
    assert not found.verified and found.is_lost, found
    assert report.took_s < 4.0 + GRACE_S


def test_server_killed_between_begin_and_update_is_reported_at_once(site: Site) -> None:
    site.server.call("/health")
    fault = Fault("kill", 0, pid=site.server.process.pid)
    report = site.publish(11, dataclasses.replace(HF, deadline_s=60.0), fault=fault)
    (found,) = report.servers
    assert report.took_s < 20.0
    assert not found.verified and found.is_lost, found
    (found,) = site.publish(12, dataclasses.replace(HF, deadline_s=60.0)).servers
    assert "has ended or is unreachable" in found.error


@pytest.mark.slow
@pytest.mark.parametrize("wide", ["dense", "qwen2", "llama"], indirect=True)
def test_hf_and_disk_leave_in_a_tp2_server_what_exact_leaves(wide: Site, tmp_path: Path) -> None:
    assert_verified(wide.publish(1, ModeSettings("exact")))
    wide.assert_served(1)
    exact = wide.server.checksums()
    for settings in (
        ModeSettings("hf", hf_via="broadcast"),
        ModeSettings("hf", hf_via="request"),
        ModeSettings("disk", disk=tmp_path / "run"),
    ):
        assert_verified(wide.publish(2, ModeSettings("exact")))
        assert wide.server.checksums() != exact
        assert_verified(wide.publish(1, settings))
        assert wide.server.checksums() == exact


@pytest.mark.slow
@pytest.mark.parametrize("wide", ["qwen3_moe", "deepseek"], indirect=True)
def test_experts_and_latent_attention_arrive_in_every_mode(wide: Site, tmp_path: Path) -> None:
    for seed, settings in enumerate(
        (
            ModeSettings("hf", hf_via="broadcast"),
            ModeSettings("hf", hf_via="request"),
            ModeSettings("disk", disk=tmp_path / "run"),
        ),
        start=1,
    ):
        assert_verified(wide.publish(seed, settings))
        wide.assert_served(seed)
