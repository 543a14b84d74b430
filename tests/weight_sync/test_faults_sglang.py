"""Weight sync into real SGLang servers under drawn faults: tokens are of the weights that a server
is labelled with, or it is out.

MEGARL_FAULT_SEED draws other faults.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from megarl.weight_sync.probe import Probe
from tests.weight_sync import tiny
from tests.weight_sync.bench import Bench, Outcome
from tests.weight_sync.fake_server import Server
from tests.weight_sync.proxied import ProxiedServer
from tests.weight_sync.scenarios import KINDS, Scenario, scenarios
from tests.weight_sync.servers import make_model
from tests.weight_sync.tiny import SHAPE

SEED = int(os.environ.get("MEGARL_FAULT_SEED", "20"))
RUNS = 30
DEADLY = 2  # runs that end a server, which takes half a minute or more to come back
PROMPT = [7, 33, 120, 299, 4, 4, 51]
BOUND = 1e-4  # nats, fp32
LETHAL = ("kill", "dies", "rebooted", "hang", "swap", "short", "long", "stop")
NOT_HERE = ("live weight poisoned",)  # nobody reaches into SGLang's memory but the loader


class RealBench(Bench):
    """The same with SGLang's servers, whose tokens are looked at too."""

    def __init__(self, name: str, folder: Path) -> None:
        self._folder = folder
        self._model = make_model(folder / "model")
        self._oracle = AutoModelForCausalLM.from_pretrained(self._model, dtype=torch.float32)
        super().__init__(name)

    def _new_server(self, name: str, nodes: str) -> Server:
        return ProxiedServer(name, tuple(nodes), self._model, self._folder)

    def _counted(self) -> list[Server]:
        return []  # SGLang's own threads and files come and go

    def _probe(self, seed: int) -> Probe:
        scored = self._score(tiny.PROBE_TOKENS[:1], tiny.PROBE_TOKENS[1:], seed)
        return Probe(tiny.PROBE_TOKENS, tuple(scored.tolist()), BOUND)

    def _score(self, prompt: Sequence[int], response: Sequence[int], seed: int) -> torch.Tensor:
        """Log-probs of the response, by Hugging Face's model with the weights of `seed`."""
        self._oracle.load_state_dict(tiny.weights(SHAPE, seed))
        with torch.no_grad():
            logits = self._oracle(torch.tensor([[*prompt, *response]])).logits[0].float()
        scored = torch.log_softmax(logits, -1)[len(prompt) - 1 : -1]
        return scored[torch.arange(len(response)), torch.tensor(response)]

    def _check_serves(self, server: Server, version: int) -> None:
        super()._check_serves(server, version)
        assert isinstance(server, ProxiedServer)
        tokens, logprobs, label = server.real.sample(PROMPT)
        assert label == str(version)
        expected = self._score(PROMPT, tokens, version)
        assert (expected - torch.tensor(logprobs)).abs().max() < BOUND


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealBench]:
    made = RealBench("one beside, one apart", tmp_path_factory.mktemp("faults"))
    yield made
    made.close()


def is_deadly(scenario: Scenario) -> bool:
    """Whether it ends a server."""
    where = KINDS[scenario.kind].where
    return where != "learner" and any(word in scenario.kind for word in LETHAL)


def drawn() -> list[Scenario]:
    """RUNS of them, of which DEADLY end a server."""
    found = [s for s in scenarios("one beside, one apart", 400, SEED) if s.kind not in NOT_HERE]
    mild = [scenario for scenario in found if not is_deadly(scenario)]
    deadly = [scenario for scenario in found if is_deadly(scenario)]
    return [*mild[: RUNS - DEADLY], *deadly[:DEADLY]]


@pytest.mark.slow
def test_no_fault_makes_a_real_server_give_tokens_of_other_weights_than_its_label_says(
    bench: RealBench, capsys: pytest.CaptureFixture[str]
) -> None:
    outcomes: list[Outcome] = []
    for scenario in drawn():
        try:
            outcomes.append(bench.run(scenario))
        except AssertionError as error:
            raise AssertionError(f"MEGARL_FAULT_SEED={SEED} {scenario}: {error}") from error
        with capsys.disabled():
            print(f"\n{outcomes[-1].took_s:5.1f} s {outcomes[-1].is_verified!s:5} {scenario}")
    assert len(outcomes) == RUNS and sum(not outcome.is_verified for outcome in outcomes) > RUNS / 2
