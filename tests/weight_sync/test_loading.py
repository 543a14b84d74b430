"""Modes `hf` and `disk` without SGLang: one learner rank, and servers that load as it does."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pytest
import torch

from megarl.config.served import model_overrides
from megarl.errors import WeightSyncError
from megarl.float8 import BlockScaling
from megarl.reshard.mesh import LearnerMesh
from megarl.types import ServerEndpoint, ServerSync, SyncReport
from megarl.weight_sync.control import LOAD_FORMAT, SourceSpec
from megarl.weight_sync.full import FullBucket, FullTensor
from megarl.weight_sync.modes import ModalSync, ModeSettings
from megarl.weight_sync.probe import Probe
from megarl.weight_sync.session import WeightSync
from megarl.weight_sync.stock import _Line
from megarl.weight_sync.stock_routes import RequestRoute
from megarl.weight_sync.unproved import Publish
from tests.reshard.models import tiny_shape
from tests.reshard.test_sglang_loaders import QWEN3, large
from tests.weight_sync import tiny
from tests.weight_sync.full_ranks import stored
from tests.weight_sync.loading_server import LoadingServer, fingerprint

SHAPE = tiny_shape("DeepseekV3ForCausalLM")  # of two precisions
TOKENS = (5, 3, 8, 1, 298)
BUCKET_BYTES = 4096  # a few for each layer
BLOCK = BlockScaling(128, 128)

Via = Literal["broadcast", "request"]


class Learner:
    """One learner rank in this process, whose weights are those of the seed it publishes."""

    def __init__(self, settings: ModeSettings, float8: BlockScaling | None = None) -> None:
        self.shape = SHAPE if float8 is None else large(QWEN3)
        self.float8, self.version = float8, 0
        self.dtype = "fp32" if float8 is None else "bf16"
        self.source = SourceSpec(self.shape, LearnerMesh(), float8=float8)
        self.parameters = tiny.on_learner(self.source, tiny.weights(self.shape, 0))[0]
        self.probed = 0  # the seed whose log-probs servers must have
        exact = WeightSync(f"loading{id(self)}", self.source, 0, self.parameters, self.dtype)
        self.sync = ModalSync(
            exact, self.source, 0, self.parameters, self.dtype, group=None, host="127.0.0.1",
            settings=settings, score=self.probe,
        )  # fmt: skip

    def wanted(self, seed: int) -> dict[str, torch.Tensor]:
        """The checkpoint of `seed` as servers must hold it, by plain indexing, or by numpy."""
        return stored(self.shape, seed, self.dtype, float8=self.float8 is not None)

    def probe(self) -> Probe:
        scored = tiny.logprobs(fingerprint(self.wanted(self.probed)), TOKENS)
        return Probe(TOKENS, tuple(scored[1:]), bound=1e-4)

    def publish(
        self, seed: int, *servers: LoadingServer | ServerEndpoint, probed: int | None = None
    ) -> SyncReport:
        """The next version, the weights of `seed`; the probe is of `probed`."""
        self.version += 1
        self.probed = seed if probed is None else probed
        new = tiny.on_learner(self.source, tiny.weights(self.shape, seed))[0]
        for name, tensor in self.parameters.items():
            tensor.copy_(new[name])
        endpoints = [s.endpoint if isinstance(s, LoadingServer) else s for s in servers]
        return self.sync.publish(self.version, endpoints)


@pytest.fixture
def learner() -> Iterator[Callable[..., Learner]]:
    made: list[Learner] = []

    def make(settings: ModeSettings, float8: BlockScaling | None = None) -> Learner:
        made.append(Learner(replace(settings, bucket_bytes=BUCKET_BYTES, deadline_s=60.0), float8))
        return made[-1]

    yield make
    for each in made:
        each.sync.close()


@pytest.fixture
def serve() -> Iterator[Callable[..., LoadingServer]]:
    made: list[LoadingServer] = []

    def make(name: str = "server-0", tp: int = 1, **info: Any) -> LoadingServer:
        made.append(LoadingServer(name, tp, **info))
        return made[-1]

    yield make
    for each in made:
        each.close()


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text('{"torch_dtype": "bfloat16"}')
    return folder


def assert_served(server: LoadingServer, learner: Learner, seed: int, result: ServerSync) -> None:
    """It holds the weights of `seed`, proved by the probe, under the label of this publish."""
    assert (result.error, result.verified) == ("", True)
    assert result.probe_max_abs_logprob == 0.0
    assert server.holds(learner.wanted(seed))
    assert server.label == result.label and tiny.version_of(server.label) == str(learner.version)
    assert not server.is_paused and not server.is_open


def routes(server: LoadingServer, *left_out: str) -> list[str]:
    return [route for route in server.web.routes if not route.startswith(left_out or "-")]


@pytest.mark.parametrize(("via", "tp"), [("request", 1), ("request", 2), ("broadcast", 1)])
def test_policy_arrives_bucket_by_bucket_and_is_counted_once_for_each_rank(
    learner: Any, serve: Any, via: Via, tp: int
) -> None:
    mine, server = learner(ModeSettings("hf", hf_via=via)), serve(tp=tp)
    for seed in (1, 2):
        report = mine.publish(seed, server)
        assert_served(server, mine, seed, *report.servers)
        size = sum(tensor.nbytes for tensor in mine.wanted(seed).values())
        assert (report.moved_bytes, report.minimum_bytes) == (tp * size, size)
    updates = len(server.flushes) // 2
    assert updates > 4 and server.flushes == 2 * [*[False] * (updates - 1), True]
    begun = ["pause retract", "begin_weight_update", "pause retract"]
    ended = ["end_weight_update", f"update {server.label}", "continue_generation", "generate"]
    last = routes(server, "init", "server")[-(updates + 7) :]
    assert last[:3] == begun and last[-4:] == ended
    assert len(server.groups) == (via == "broadcast")  # joined once


def test_weights_come_from_disk_and_older_folders_go(
    learner: Any, serve: Any, model: Path, tmp_path: Path
) -> None:
    mine = learner(ModeSettings("disk", disk=tmp_path / "run", model=model))
    server = serve()
    for seed in (1, 2):
        assert_served(server, mine, seed, *mine.publish(seed, server).servers)
        (folder,) = (tmp_path / "run").iterdir()
        assert folder.name.startswith(f"v{seed:06d}-")
        assert json.loads((folder / "config.json").read_text()) == {"torch_dtype": "float32"}
    assert server.flushes == [True, True]


@pytest.mark.parametrize("via", ["request", "broadcast"])
def test_float8_arrives_as_numpy_makes_it_and_its_loss_is_reported(
    learner: Any, serve: Any, via: Via, caplog: pytest.LogCaptureFixture
) -> None:
    server = serve(json_model_override_args=model_overrides((128, 128)))
    mine = learner(ModeSettings("hf", hf_via=via), BLOCK)
    with caplog.at_level("INFO", "megarl.weight_sync.quantized"):
        report = mine.publish(3, server)
    assert sum("weights quantized layer=" in text for text in caplog.messages) == 2
    assert_served(server, mine, 3, *report.servers)
    assert 0.01 < report.quantization.mean <= report.quantization.largest < 0.06  # 3 bits


def test_groups_with_servers_are_left_when_the_sync_is_closed(learner: Any, serve: Any) -> None:
    servers = [serve("server-0"), serve("server-1")]
    mine = learner(ModeSettings("hf", hf_via="broadcast"))
    assert all(found.verified for found in mine.publish(1, *servers).servers)
    groups = [group for _, group in mine.sync._stock._groups.values()]
    assert [group.is_open for group in groups] == [True, True]
    mine.sync.close()
    assert [group.is_open for group in groups] == [False, False]


def test_auto_takes_sglangs_calls_where_there_is_no_loader_and_exact_refuses(
    learner: Any, serve: Any
) -> None:
    server = serve()
    refused = learner(ModeSettings("exact")).publish(1, server)
    assert "without --custom-weight-loader" in refused.servers[0].error
    assert (refused.moved_bytes, refused.minimum_bytes) == (0, 0)
    assert routes(server) == ["server_info"]
    mine = learner(ModeSettings("auto"))
    assert_served(server, mine, 2, *mine.publish(2, server).servers)


@pytest.mark.parametrize("mode", ["exact", "auto"])
def test_server_with_the_loader_is_sent_the_loaders_own_messages(
    learner: Any, serve: Any, mode: Literal["exact", "auto"]
) -> None:
    """Which this one, that has none in truth, refuses."""
    server = serve(custom_weight_loader=[LOAD_FORMAT])
    (result,) = learner(ModeSettings(mode)).publish(1, server).servers
    assert not result.verified and "not one payload for each rank" in result.error
    assert "update_weights_from_tensor" in routes(server)


def test_server_is_asked_what_it_is_once_for_each_incarnation(learner: Any, serve: Any) -> None:
    mine, server = learner(ModeSettings("hf")), serve()
    for incarnation in (0, 0, 1):
        server.endpoint = replace(server.endpoint, incarnation=incarnation)
        assert mine.publish(1, server).servers[0].verified
    assert routes(server).count("server_info") == 2


def test_mode_is_logged_once_for_each_incarnation(
    learner: Any, serve: Any, caplog: pytest.LogCaptureFixture
) -> None:
    mine, server = learner(ModeSettings("hf")), serve()
    told = []
    with caplog.at_level("INFO", "megarl.weight_sync.modes"):
        for incarnation in (0, 0, 1):
            server.endpoint = replace(server.endpoint, incarnation=incarnation)
            mine.publish(1, server)
            told.append(sum("weight sync mode server=" in text for text in caplog.messages))
    assert told == [1, 1, 2]


@pytest.mark.parametrize("via", ["request", "broadcast"])
def test_wrong_log_probs_stop_a_server_and_the_next_sync_repairs_it_in_a_new_group(
    learner: Any, serve: Any, via: Via
) -> None:
    mine, server = learner(ModeSettings("hf", hf_via=via)), serve()
    (result,) = mine.publish(1, server, probed=2).servers
    assert "log-probs are not the learner's" in result.error and not result.verified
    assert "left out without a word" in result.error  # what to suspect
    assert server.is_paused and tiny.version_of(server.label) == "1-refused"
    for seed in (2, 3):
        assert_served(server, mine, seed, *mine.publish(seed, server).servers)
    assert len(server.groups) == (2 if via == "broadcast" else 0)


@pytest.mark.parametrize("via", ["request", "broadcast"])
def test_server_that_refuses_an_update_spoils_no_other_and_is_left_paused(
    learner: Any, serve: Any, via: Via
) -> None:
    mine, good, bad = learner(ModeSettings("hf", hf_via=via)), serve("good"), serve("bad")
    with socket.create_server(("127.0.0.1", 0)) as probe:
        nowhere = f"http://127.0.0.1:{probe.getsockname()[1]}"
    gone = ServerEndpoint("gone", nowhere, 1, 0)
    bad.refused = {"/update_weights_from_tensor", "/update_weights_from_distributed"}
    report = mine.publish(1, bad, gone, good)
    results = {result.server: result for result in report.servers}
    assert list(results) == ["bad", "gone", "good"]
    assert_served(good, mine, 1, results["good"])
    assert "answered 400: refused" in results["bad"].error and not results["bad"].is_lost
    assert bad.is_paused and not bad.is_open and bad.label == "default"
    assert "has ended or is unreachable" in results["gone"].error and results["gone"].is_lost
    bad.refused = set()
    assert_served(bad, mine, 2, *mine.publish(2, bad).servers)


def test_learner_that_lost_a_weight_says_so_and_closes_the_servers_session(
    learner: Any, serve: Any
) -> None:
    mine, server = learner(ModeSettings("hf")), serve()
    assert mine.publish(1, server).servers[0].verified
    name, lost = mine.parameters.popitem()
    publish = mine.sync.publish
    with pytest.raises(WeightSyncError, match="learner rank 0"):
        publish(2, [server.endpoint])
    mine.parameters[name] = lost
    assert_served(server, mine, 3, *mine.publish(3, server).servers)


def test_server_is_brought_a_bucket_as_late_as_the_deadline_allows(serve: Any) -> None:
    data = torch.arange(8, dtype=torch.float32)
    bucket = FullBucket(0, (FullTensor("w", (2, 4), torch.float32),))
    for late, within_s in ((False, 30.0), (True, 0.3)):
        server = serve()
        publish = Publish(1, "retract", time.monotonic() + within_s)
        publish.probe.settle(None)
        line = _Line(server.endpoint, publish, RequestRoute(1))
        line.start()
        if not late:
            time.sleep(1.3)
            line.give(bucket, data.view(torch.uint8), is_last=True)
        line.join(30.0)
        assert line.result.verified != late
        assert server.is_paused == late
        if late:
            assert "did not bring the next tensors in time" in line.result.error
        else:
            assert server.holds({"w": data.view(2, 4)})


def test_bucket_for_a_server_that_is_over_is_dropped(serve: Any) -> None:
    server = serve()
    server.refused = {"/pause_generation"}
    line = _Line(server.endpoint, Publish(1, "retract", time.monotonic() + 30.0), RequestRoute(1))
    assert not line.is_open
    line.start()
    line.join(30.0)
    bucket = FullBucket(0, (FullTensor("w", (4,), torch.uint8),))
    line.give(bucket, torch.zeros(4, dtype=torch.uint8), is_last=True)
    assert not line.is_open and "answered 400: refused" in line.result.error


@pytest.mark.parametrize("float8", [None, BLOCK], ids=["bf16", "float8"])
def test_publish_to_no_server_moves_nothing(learner: Any, float8: BlockScaling | None) -> None:
    report = learner(ModeSettings("hf"), float8).publish(1)
    assert report.servers == () and report.moved_bytes == report.minimum_bytes == 0
