"""Twenty syncs in a row from real Megatron-Core ranks into real SGLang servers, over every link.

Between syncs the learner takes an optimizer step, and the servers' weights are spoiled. What they
then serve is compared with Hugging Face's models, whose weights come from the learner's checkpoints
by Megatron-Core's own gathering (`saved_weights`): not by the code of the sync.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import psutil
import pytest
import torch
from transformers import AutoModelForCausalLM

from megarl.launch import cleanup
from megarl.learner.client import LearnerClient
from megarl.reshard.mesh import ServerMesh
from megarl.types import Batch, SyncReport
from megarl.weight_sync.server_calls import ServerCalls
from tests.weight_sync import census, family_models, saved_weights, tiny
from tests.weight_sync.census import Held
from tests.weight_sync.family_models import SHAPES
from tests.weight_sync.matrix import CASES, Case, ServerKind
from tests.weight_sync.servers import RealServer

pytestmark = pytest.mark.slow

NUM_SYNCS, BASELINE = 20, 5
COMPARED = (1, 2, 10, 20)
MEAN, MOST = 1e-5, 1e-4  # nats, fp32
PROMPTS = ([7, 33, 120, 299, 4, 4, 51], [250, 1, 18])
# More in one process after fifteen rounds of step and sync, two saves among them. 11 MiB was seen
# in learner ranks; `test_many_syncs.py` bounds what syncs alone may add.
GROWTH_KIB = 16 << 10


class Family:
    """The weights of one family at the start, and its servers, each of which serves many cases."""

    def __init__(self, folder: Path, name: str) -> None:
        self._folder, self.name = folder / name, name
        self.model = family_models.save(self._folder / "model", name, seed=0)
        self._running: dict[str, RealServer] = {}

    def start(self, kinds: Sequence[ServerKind]) -> list[RealServer]:
        """The servers of these kinds, those that do not run yet starting."""
        for kind in kinds:
            if kind.name not in self._running:
                log = self._folder / f"{kind.name}.log"
                name = f"{self.name}-{kind.name}"
                self._running[kind.name] = RealServer(name, self.model, kind.tp, log, kind.ep)
        return [self._running[kind.name] for kind in kinds]

    def kill(self) -> None:
        for server in self._running.values():
            server.kill()


class Families:
    """One family at a time: its cases are neighbors."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._now: Family | None = None

    def of(self, name: str) -> Family:
        if self._now is None or self._now.name != name:
            self.kill()
            self._now = Family(self._folder, name)
        return self._now

    def kill(self) -> None:
        if self._now is not None:
            self._now.kill()


@pytest.fixture(scope="module")
def families(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Families]:
    made = Families(tmp_path_factory.mktemp("twenty"))
    yield made
    made.kill()


@dataclass(frozen=True)
class Weights:
    """The learner's at one version, gathered by Megatron-Core, and a model that holds them."""

    tensors: saved_weights.Tensors
    oracle: torch.nn.Module

    def logprobs(self, tokens: Sequence[int]) -> torch.Tensor:
        """Of every token but the first, in nats."""
        with torch.no_grad():
            logits = self.oracle(torch.tensor([list(tokens)])).logits[0].float()
        scored = torch.log_softmax(logits, -1)[:-1]
        return scored[torch.arange(len(scored)), torch.tensor(list(tokens)[1:])]


def fixed_sequences(vocab_size: int) -> list[list[int]]:
    draw = random.Random(5)
    return [[draw.randrange(vocab_size - 1) for _ in range(size)] for size in (24, 40, 17, 31)]


class Twenty:
    """One case at work."""

    def __init__(
        self, case: Case, servers: list[RealServer], folder: Path, client: LearnerClient
    ) -> None:
        self.case, self.servers, self.folder, self.client = case, servers, folder, client
        self.endpoints = case.endpoints([server.endpoint for server in servers])
        self.plan = case.minibatch(folder / "groups")
        self.reports: list[SyncReport] = []
        self.added_kib: Counter[int] = Counter()  # by syncs, in each process

    async def weights(self, version: int) -> Weights:
        """What the learner holds now."""
        saved = self.folder / f"saved{version}"
        await self.client.save(saved, version)
        name = self.case.family
        tensors = saved_weights.read(saved, SHAPES[name])
        written = family_models.write(self.folder / f"hf{version}", name, tensors)
        oracle = AutoModelForCausalLM.from_pretrained(written, dtype=torch.float32)
        return Weights(tensors, oracle)

    async def step(self, version: int) -> None:
        """One optimizer step."""
        await self.client.score(Batch(version, (self.plan,), 0, 7))
        metrics = await self.client.step(self.plan)
        assert metrics["grad_norm"] > 0.01, metrics

    def spoil(self) -> None:
        for server in self.servers:
            server.call("/weights_checker", {"action": "reset_tensors"})

    async def publish(self, version: int, processes: Sequence[psutil.Process]) -> None:
        before = {process.pid: census.kib(process.pid) for process in processes}
        report = await self.client.publish(version, self.endpoints)
        assert [server.error for server in report.servers] == [""] * len(self.servers)
        assert all(server.verified for server in report.servers)
        assert report.moved_bytes == report.minimum_bytes > 0
        self.reports.append(report)
        if version > BASELINE:
            self.added_kib.update({pid: census.kib(pid) - kib for pid, kib in before.items()})

    def assert_holds(self, version: int, weights: Weights) -> None:
        """SGLang's own checksum of every parameter is that of plain slices of the weights."""
        shape = SHAPES[self.case.family]
        for server, endpoint in zip(self.servers, self.endpoints, strict=True):
            mesh = ServerMesh(endpoint.tp, ep=endpoint.ep)
            wanted = tiny.on_mesh(shape, mesh, weights.tensors)
            for found, mine in zip(server.checksums(), wanted, strict=True):
                assert {name: found[name] for name in mine} == {
                    name: tiny.sha256(tensor) for name, tensor in mine.items()
                }
            assert server.version() == str(version)

    def gaps(self, server: RealServer, weights: Weights) -> torch.Tensor:
        """Absolute differences of log-probs: of fixed tokens, and of tokens that it samples."""
        calls, found = ServerCalls(server.endpoint, time.monotonic() + 60), []
        for tokens in fixed_sequences(SHAPES[self.case.family].vocab_size):
            found.append(torch.tensor(calls.score(tokens)) - weights.logprobs(tokens))
        calls.close()
        for prompt in PROMPTS:
            tokens, logprobs, _ = server.sample(prompt, 16)
            expected = weights.logprobs([*prompt, *tokens])[len(prompt) - 1 :]
            found.append(torch.tensor(logprobs) - expected)
        return torch.cat(found).abs()

    def processes(self, learner: psutil.Process) -> list[psutil.Process]:
        pids = [learner.pid, *(server.process.pid for server in self.servers)]
        return [process for pid in pids for process in census.descendants(pid)]

    async def held(self, learner: psutil.Process) -> tuple[dict[str, int], dict[str, Held]]:
        """What the learner's stores and all processes hold."""
        info = await self.client.info()
        return {k: v for k, v in info.items() if k.endswith("keys")}, census.take(
            self.processes(learner)
        )


@pytest.mark.parametrize("case", CASES, ids=str)
def test_twenty_syncs_are_served_as_hugging_face_computes_them_and_leave_nothing_behind(
    families: Families, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: Case
) -> None:
    monkeypatch.setenv("MEGARL_NODE", ",".join(case.learner_nodes))
    family = families.of(case.family)
    learner = case.start(tmp_path / "learner", family.model)
    try:
        servers = family.start(case.servers)
        for server in servers:
            server.wait()
        client = learner.client(wait_s=300)
        asyncio.run(_twenty(case, family, servers, tmp_path, client, learner.process.pid))
        assert learner.process.wait(30) == 0
        left = [f.path for f in cleanup.present() if f"_pid{learner.process.pid}_" in f.path]
        assert left == []
    finally:
        learner.stop()


async def _twenty(
    case: Case,
    family: Family,
    servers: list[RealServer],
    folder: Path,
    client: LearnerClient,
    launcher: int,
) -> None:
    async with client:
        work, main = Twenty(case, servers, folder, client), psutil.Process(launcher)
        network_bytes = case.network_bytes(family.model, work.endpoints)
        processes, weights = work.processes(main), await work.weights(0)
        first = tiny.weights(SHAPES[case.family], 0)
        assert weights.tensors.keys() == first.keys()
        assert all(torch.equal(weights.tensors[name], first[name]) for name in first)
        for version in range(1, NUM_SYNCS + 1):
            await work.step(version)
            work.spoil()
            await work.publish(version, processes)
            assert work.reports[-1].network_bytes == network_bytes
            if version in COMPARED:
                stale, weights = weights, await work.weights(version)
                assert all(not torch.equal(weights.tensors[n], t) for n, t in stale.tensors.items())
                work.assert_holds(version, weights)
                for server in work.servers:
                    found, before = work.gaps(server, weights), work.gaps(server, stale)
                    print(
                        f"{case} {server.endpoint.name} version {version}: mean {found.mean():.2g}"
                        f" max {found.max():.2g} nats; stale {before.mean():.2g}"
                    )
                    assert found.mean() <= MEAN and found.max() <= MOST
                    assert before.mean() > 100 * MEAN
            if version == BASELINE:
                keys_before, before_all = await work.held(main)
        keys_after, after_all = await work.held(main)
        assert keys_after == keys_before
        assert after_all.keys() == before_all.keys()
        print(f"{case} {network_bytes=} of {work.reports[-1].minimum_bytes} {keys_after}")
        for name, now in after_all.items():
            then, by_syncs = before_all[name], work.added_kib[int(name.split()[0])]
            print(
                f"{case} {name}: {now.files} files {now.threads} threads {len(now.shared)} shared, "
                f"{now.kib} KiB: {by_syncs:+d} by syncs, {now.kib - then.kib:+d} in all"
            )
        for name, now in after_all.items():
            then = before_all[name]
            assert replace(now, kib=0) == replace(then, kib=0), (name, then)
            assert now.kib - then.kib <= GROWTH_KIB, name
        await client.shutdown()
