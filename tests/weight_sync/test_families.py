"""Families with routed experts in real SGLang servers: new weights from two learner ranks, served
as Hugging Face's models compute them.

Each server starts with the weights of seed 0; a sync over shared memory and one over the network
follow, the second into poisoned memory. Learner ranks hold plain tensors in Megatron's layout.
"""

from __future__ import annotations

import dataclasses
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from megarl.reshard.engine_tensors import float32_on_server
from megarl.reshard.mesh import ServerMesh
from megarl.reshard.sglang import sglang_layout
from megarl.weight_sync.control import WIRE_DTYPES
from tests.weight_sync import sabotage, tiny
from tests.weight_sync.family_models import SHAPES, Oracle
from tests.weight_sync.learner_ranks import LearnerRanks
from tests.weight_sync.servers import RealServer

PROMPTS = ([7, 33, 120, 299, 4, 4, 51], [250, 1, 18])
NUM_TOKENS = 16
MEAN, MOST = 1e-5, 1e-4  # nats, fp32


@dataclass(frozen=True)
class Case:
    """A policy, a server of it, and how the two learner ranks hold it."""

    model: str
    tp: int = 1
    ep: int = 1
    attention_dp: int = 1
    mesh: tuple[tuple[str, int], ...] = (("tp", 2), ("ep", 2))
    forms: tuple[str, str] = ("te", "per_expert")
    dtype: str = "fp32"

    def __str__(self) -> str:
        sizes = [f"{name}{size}" for name in ("tp", "ep") if (size := getattr(self, name)) > 1]
        dp = [f"dp{self.attention_dp}"] if self.attention_dp > 1 else []
        return "-".join([self.model, *(sizes or ["tp1"]), *dp, self.dtype])

    @property
    def server_mesh(self) -> ServerMesh:
        return ServerMesh(self.tp, cpu=False, ep=self.ep, attention_dp=self.attention_dp)


SPREAD = (("dp", 2), ("ep", 2))
QUICK = [
    Case("qwen3_moe", mesh=SPREAD),
    Case("deepseek", forms=("local", "per_expert")),
]
SLOW = [
    Case("qwen3_moe", tp=2, forms=("te", "sequential")),
    Case("qwen3_moe", tp=2, ep=2, mesh=SPREAD),
    Case("qwen3_moe", tp=2, attention_dp=2, mesh=SPREAD),
    Case("deepseek", tp=2),
    Case("deepseek", tp=2, ep=2, mesh=SPREAD, forms=("local", "sequential")),
    Case("glm", tp=2),
    Case("glm", tp=2, ep=2, mesh=(("dp", 2), ("etp", 2))),
]
IN_BFLOAT16 = [Case("glm", tp=2, dtype="bf16"), Case("deepseek", dtype="bf16")]
DTYPES = {"fp32": "float32", "bf16": "bfloat16"}


class Fleet:
    """Servers of the cases: the quick ones together, since they start at the same time."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._servers: dict[Case, RealServer] = {}
        self.synced: set[Case] = set()
        self._oracles: dict[str, Oracle] = {}

    def oracle(self, model: str) -> Oracle:
        if model not in self._oracles:
            self._oracles[model] = Oracle(self._folder / model, model)
        return self._oracles[model]

    def server(self, case: Case) -> RealServer:
        if case not in self._servers:
            self.kill()
            for each in QUICK if case in QUICK else [case]:
                self._servers[each] = RealServer(
                    str(each),
                    self.oracle(each.model).checkpoint(0),
                    each.tp,
                    self._folder / f"{each}.log",
                    each.ep,
                    each.attention_dp,
                    DTYPES[each.dtype],
                )
        self._servers[case].wait()
        return self._servers[case]

    def fresh(self, case: Case) -> None:
        """See to it that the server of a case has the weights that it starts with."""
        if case in self.synced:
            self._servers[case].kill()
            self._servers[case].revive()
            self.synced.remove(case)

    def kill(self) -> None:
        for server in self._servers.values():
            server.kill()
        self._servers.clear()
        self.synced.clear()


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    made = Fleet(tmp_path_factory.mktemp("families"))
    yield made
    made.kill()


@pytest.fixture(scope="module")
def ranks() -> Iterator[LearnerRanks]:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    made = LearnerRanks(2, port)
    yield made
    made.close()


def gaps(fleet: Fleet, case: Case, seed: int) -> torch.Tensor:
    """Absolute differences of log-probs [tokens] between a server and Hugging Face, in nats."""
    found = []
    for prompt in PROMPTS:
        tokens, logprobs, _ = fleet.server(case).sample(prompt, NUM_TOKENS)
        expected = fleet.oracle(case.model).score(seed, prompt, tokens)
        found.append((expected - torch.tensor(logprobs)).abs())
    return torch.cat(found)


def assert_serves(fleet: Fleet, case: Case, seed: int, version: str) -> None:
    """The server computes as Hugging Face's model with the weights of `seed` does."""
    found = gaps(fleet, case, seed)
    print(f"{case} seed={seed} mean={found.mean():.2g} max={found.max():.2g} nats")
    assert found.mean() <= MEAN and found.max() <= MOST, (found.mean(), found.max())
    assert fleet.server(case).version() == version


def assert_holds(fleet: Fleet, case: Case, seed: int) -> None:
    """SGLang's own checksum of every parameter is that of plain slices of the weights."""
    shape, policy = SHAPES[case.model], WIRE_DTYPES[case.dtype]
    layout = sglang_layout(shape, case.server_mesh)
    weights = tiny.as_sent(tiny.weights(shape, seed), policy)
    wanted = tiny.on_mesh(shape, case.server_mesh, weights)
    for rank, (found, mine) in enumerate(zip(fleet.server(case).checksums(), wanted, strict=True)):
        wide = float32_on_server(shape, layout, rank)
        assert {name: found[name] for name in mine} == {
            name: tiny.sha256(tensor if name in wide else tensor.to(policy))
            for name, tensor in mine.items()
        }


def publish(
    fleet: Fleet, ranks: LearnerRanks, case: Case, seed: int, **more: Any
) -> dict[str, Any]:
    """Rank 0's report of one publish of the weights of `seed` as version `seed`."""
    nodes = tuple(more.pop("nodes", ()))
    endpoint = dataclasses.replace(fleet.server(case).endpoint, nodes=nodes)
    fleet.synced.add(case)
    report, _ = ranks.publish(
        dict(case.mesh),
        seed,
        seed,
        [endpoint],
        model=case.model,
        forms=case.forms,
        dtype=case.dtype,
        **more,
    )
    assert [server["error"] for server in report.get("servers", [report])] == [""]
    return report


@pytest.mark.parametrize(
    "case", [*QUICK, *(pytest.param(case, marks=pytest.mark.slow) for case in SLOW)], ids=str
)
def test_two_syncs_in_a_row_are_served_as_hugging_face_computes_them(
    fleet: Fleet, ranks: LearnerRanks, case: Case
) -> None:
    fleet.fresh(case)
    assert_serves(fleet, case, 0, "default")
    report = publish(fleet, ranks, case, 1)
    assert report["moved_bytes"] == report["minimum_bytes"] > report["network_bytes"] == 0
    assert_holds(fleet, case, 1)
    assert_serves(fleet, case, 1, "1")
    fleet.server(case).call("/weights_checker", {"action": "reset_tensors"})
    report = publish(fleet, ranks, case, 2, nodes=("b",) * case.tp, bucket_bytes=16 << 10)
    assert report["moved_bytes"] == report["minimum_bytes"] >= report["network_bytes"] > 0
    assert_holds(fleet, case, 2)
    assert_serves(fleet, case, 2, "2")


@pytest.mark.slow
@pytest.mark.parametrize("case", IN_BFLOAT16, ids=str)
def test_bfloat16_policy_arrives_bit_by_bit_and_what_is_float32_stays_so(
    fleet: Fleet, ranks: LearnerRanks, case: Case
) -> None:
    publish(fleet, ranks, case, 1)
    assert_holds(fleet, case, 1)
    fleet.server(case).call("/weights_checker", {"action": "reset_tensors"})
    publish(fleet, ranks, case, 2, nodes=("b",) * case.tp, bucket_bytes=16 << 10)
    assert_holds(fleet, case, 2)


def test_latent_attention_is_stale_where_the_model_does_not_derive_its_weights_anew(
    fleet: Fleet, ranks: LearnerRanks
) -> None:
    """What the test above would not see if SGLang's last step were not needed."""
    case = QUICK[1]
    publish(fleet, ranks, case, 3, load_format=sabotage.WITHOUT_DERIVED)
    assert_holds(fleet, case, 3)
    assert gaps(fleet, case, 3).mean() > 0.1
    publish(fleet, ranks, case, 4)
    assert_serves(fleet, case, 4, "4")
