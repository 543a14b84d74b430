"""A learner in this process that publishes to real servers, and what those then serve."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import requests
import torch
from transformers import PreTrainedModel

from megarl.config.bounds import PROBE_CONTEXT
from megarl.reshard.mesh import LearnerMesh
from megarl.types import ServerEndpoint, SyncReport
from megarl.weight_sync.control import SourceSpec
from megarl.weight_sync.probe import Probe, probe_tokens
from megarl.weight_sync.server_calls import PauseMode
from megarl.weight_sync.session import WeightSync
from tests.weight_sync import tiny
from tests.weight_sync.servers import RealServer
from tests.weight_sync.tiny import SHAPE

PROMPT = [7, 33, 120, 299, 4, 4, 51]
BOUND = 1e-4  # nats, fp32
Span = tuple[int, int, str]


@dataclass
class Site:
    """The two servers and a Hugging Face model beside them."""

    tp1: RealServer
    tp2: RealServer
    oracle: PreTrainedModel

    def logprobs(self, seed: int, tokens: list[int], cached: Any = None) -> torch.Tensor:
        """Log-probs of every token but the first under the weights of `seed`, by Hugging Face.

        `cached` (seed, number of tokens): the keys and values of the first ones are of another
        seed, and the log-probs are those of what comes after them.
        """
        past, start = None, 0
        with torch.no_grad():
            if cached is not None:
                other, start = cached
                self.oracle.load_state_dict(tiny.weights(SHAPE, other))
                past = self.oracle(torch.tensor([tokens[:start]]), use_cache=True).past_key_values
            self.oracle.load_state_dict(tiny.weights(SHAPE, seed))
            logits = self.oracle(torch.tensor([tokens[start:]]), past_key_values=past).logits[0]
        scored = torch.log_softmax(logits.float(), -1)[:-1]
        return scored[torch.arange(len(scored)), torch.tensor(tokens[start + 1 :])]


class Learner:
    """A learner of one rank in this process, whose weights are replaced in place.

    With `site`, servers are probed for what its Hugging Face model scores.
    """

    def __init__(
        self,
        dtype: str = "fp32",
        deadline_s: float = 60.0,
        pause: PauseMode = "retract",
        site: Site | None = None,
    ) -> None:
        self.spec = SourceSpec(SHAPE, LearnerMesh())
        self.parameters = tiny.on_learner(self.spec, tiny.weights(SHAPE, 0))[0]
        self.version, self.seed = 0, 0
        self.sync = WeightSync(
            f"publish{os.getpid()}_{id(self)}",
            self.spec,
            0,
            self.parameters,
            dtype,
            cpu_servers=True,
            deadline_s=deadline_s,
            pause=pause,
            probe=self._probe(site) if site else None,
        )

    def _probe(self, site: Site) -> Callable[[], Probe]:
        tokens = probe_tokens(16, SHAPE.vocab_size, seed=0)

        def score() -> Probe:
            found = site.logprobs(self.seed, list(tokens))
            return Probe(tokens, tuple(found.tolist()[PROBE_CONTEXT - 1 :]), BOUND)

        return score

    def publish(self, seed: int, *servers: RealServer | ServerEndpoint) -> SyncReport:
        """Learn the weights of `seed` and publish them as the next version."""
        for name, tensor in tiny.on_learner(self.spec, tiny.weights(SHAPE, seed))[0].items():
            self.parameters[name].copy_(tensor)
        self.version += 1
        self.seed = seed
        endpoints = [s.endpoint if isinstance(s, RealServer) else s for s in servers]
        return self.sync.publish(self.version, endpoints)


@dataclass
class Running:
    """One request that is being answered, from the side of its caller."""

    server: RealServer
    num_tokens: int
    prompt: list[int] = field(default_factory=lambda: list(PROMPT))
    reply: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._started = threading.Event()
        self._thread = threading.Thread(target=self._ask, daemon=True)
        self._thread.start()

    def _ask(self) -> None:
        body = {
            "input_ids": self.prompt,
            "return_logprob": True,
            "stream": True,
            "sampling_params": {
                "temperature": 1.0,
                "max_new_tokens": self.num_tokens,
                "ignore_eos": True,
            },
        }
        headers = {"Authorization": f"Bearer {self.server.endpoint.api_key}"}
        url = f"{self.server.endpoint.url}/generate"
        with requests.post(url, json=body, headers=headers, stream=True, timeout=60) as answer:
            for line in answer.iter_lines():
                if line.startswith(b"data: {"):
                    self.reply = json.loads(line[len(b"data: ") :])
                    self._started.set()

    def started(self) -> Running:
        """This request, once it has a token."""
        assert self._started.wait(30), "no token came"
        return self

    def has_token(self, within_s: float) -> bool:
        """Whether it gets a token in that time."""
        return self._started.wait(within_s)

    def ended(self) -> Running:
        """This request, once its last token is there."""
        self._thread.join(60)
        assert not self._thread.is_alive(), "the request does not end"
        return self

    @property
    def reason(self) -> str:
        return str(self.reply["meta_info"]["finish_reason"]["type"])

    @property
    def tokens(self) -> list[int]:
        return [int(token) for _, token, _ in self.reply["meta_info"]["output_token_logprobs"]]

    @property
    def logprobs(self) -> torch.Tensor:
        pairs = self.reply["meta_info"]["output_token_logprobs"]
        return torch.tensor([float(logprob) for logprob, _, _ in pairs])

    @property
    def spans(self) -> list[Span]:
        spans = self.reply["meta_info"]["weight_versions"]
        return [(span["start"], span["end"], tiny.version_of(span["version"])) for span in spans]


def assert_serves(site: Site, server: RealServer, seed: int, version: int) -> None:
    """The server's bytes, its log-probs and its label are those of `seed` and `version`."""
    tensors = tiny.weights(SHAPE, seed)
    wanted = tiny.on_server(SHAPE, server.endpoint.tp, tensors)
    for found, mine in zip(server.checksums(), wanted, strict=True):
        assert found == {name: tiny.sha256(tensor) for name, tensor in mine.items()}
    tokens, logprobs, label = server.sample(PROMPT)
    assert label == server.version() == str(version)
    expected = site.logprobs(seed, PROMPT + tokens)[len(PROMPT) - 1 :]
    assert (expected - torch.tensor(logprobs)).abs().max() < BOUND


def assert_refused(report: SyncReport, reason: str) -> None:
    assert [server.verified for server in report.servers] == [False]
    assert reason in report.servers[0].error
