"""What a critic makes of a recorded minibatch, by Hugging Face's layers and autograd, one process.

Samples one by one, tokens one by one, from the published formulas.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megarl.types import Sample, SampleRef
from tests.learner import recorded, tiny_models

GAMMA, LAMBDA, CLIP = 0.97, 0.9, 0.1
POLICY_CLIP = (0.2, 0.3)
HEADS = {"first": 0.02, "second": 0.03}  # of the output layer, and what its weights are drawn with


def head(name: str, hidden_size: int) -> tuple[Tensor, Tensor]:
    """(weight [H], bias [1]) of an output layer, the same in every process."""
    generator = torch.Generator().manual_seed(len(name))
    return HEADS[name] * torch.randn(hidden_size, generator=generator), torch.tensor([0.1])


@dataclass(frozen=True)
class Tokens:
    """Of one sample, at its actions: old values, returns, advantages before whitening."""

    places: list[int]
    values: list[float]
    returns: list[float]
    advantages: list[float]


class Oracle:
    """A language model of `family`, whose layers are the critic's too, and recorded samples.

    Every third sample was cut at the longest length.
    """

    def __init__(self, family: str, folder: Path, tied: bool) -> None:
        self.folder = folder
        self.model: Any = tiny_models.make(family, folder, tied)
        self.samples: list[tuple[Sample, SampleRef]] = [
            (sample, replace(ref, is_cut=number % 3 == 0))
            for number, (sample, ref) in enumerate(
                recorded.record(
                    folder.with_name(f"{folder.name}-groups"),
                    tiny_models.VOCAB_SIZE,
                    lambda sample: self.logprobs(sample).tolist(),
                )
            )
        ]

    def logprobs(self, sample: Sample) -> Tensor:
        """The policy's, of the response's tokens."""
        ids = torch.tensor([[*sample.prompt_ids, *sample.response_ids]])
        with torch.no_grad():
            logits = self.model(ids).logits[0, len(sample.prompt_ids) - 1 : -1]
        return logits.log_softmax(-1).gather(1, torch.tensor(sample.response_ids)[:, None])[:, 0]

    def values(self, sample: Sample, weight: Tensor, bias: Tensor) -> Tensor:
        """Of every token: of the text that ends with it."""
        ids = torch.tensor([[*sample.prompt_ids, *sample.response_ids]])
        return self.model.model(ids).last_hidden_state[0] @ weight + bias

    def tokens(self, continued: bool, kl_coef: float) -> list[Tokens]:
        """Schulman et al. 2016, eq. 16, for each sample, with the first output layer."""
        found = []
        first = head("first", self.model.config.hidden_size)
        for sample, ref in self.samples:
            with torch.no_grad():
                all_values = self.values(sample, *first).tolist()
            actions = [at for at, trains in enumerate(sample.loss_mask) if trains]
            places = [len(sample.prompt_ids) - 1 + at for at in actions]
            kl = torch.tensor(sample.behavior_logprobs) - self.logprobs(sample)
            rewards = [-kl_coef * float(kl[at]) for at in actions]
            rewards[-1] += ref.advantage
            values = [all_values[place] for place in places]
            states = [*values, all_values[-1] if ref.is_cut and continued else 0.0]
            deltas = [r + GAMMA * states[i + 1] - states[i] for i, r in enumerate(rewards)]
            advantages = [
                math.fsum((GAMMA * LAMBDA) ** k * delta for k, delta in enumerate(deltas[i:]))
                for i in range(len(deltas))
            ]
            returns = [a + v for a, v in zip(advantages, values, strict=True)]
            found.append(Tokens(places, values, returns, advantages))
        return found

    def whitened(self, tokens: list[Tokens]) -> list[list[float]]:
        """Advantages over all tokens: less their mean, by their deviation."""
        everything = torch.tensor([a for each in tokens for a in each.advantages]).double()
        mean, std = float(everything.mean()), float(everything.std(correction=0)) + 1e-6
        return [[(a - mean) / std for a in each.advantages] for each in tokens]

    def policy_loss(self, tokens: list[Tokens]) -> float:
        """PPO's, against the behavior log-probs, before any step."""
        total, count = 0.0, 0
        for (sample, _), advantages in zip(self.samples, self.whitened(tokens), strict=True):
            logp = self.logprobs(sample).tolist()
            actions = [at for at, trains in enumerate(sample.loss_mask) if trains]
            for at, advantage in zip(actions, advantages, strict=True):
                ratio = math.exp(logp[at] - sample.behavior_logprobs[at])
                near = min(max(ratio, 1 - POLICY_CLIP[0]), 1 + POLICY_CLIP[1])
                total -= min(ratio * advantage, near * advantage)
                count += 1
        return total / count

    def value_loss(self, tokens: list[Tokens], weight: Tensor, bias: Tensor) -> Tensor:
        """Half the larger of both squared errors, token by token, their mean."""
        total, count = torch.zeros(()), 0
        for (sample, _), each in zip(self.samples, tokens, strict=True):
            now = self.values(sample, weight, bias)
            for place, old, target in zip(each.places, each.values, each.returns, strict=True):
                near = torch.min(
                    torch.max(now[place], torch.tensor(old - CLIP)), torch.tensor(old + CLIP)
                )
                total = total + torch.max((now[place] - target) ** 2, (near - target) ** 2) / 2
                count += 1
        return total / count


class Gradients:
    """The value loss with the second output layer, and its gradients by the checkpoint's names."""

    def __init__(self, oracle: Oracle, tokens: list[Tokens]) -> None:
        drawn = head("second", oracle.model.config.hidden_size)
        self.weight, self.bias = (part.clone().requires_grad_() for part in drawn)
        oracle.model.zero_grad()
        loss = oracle.value_loss(tokens, self.weight, self.bias)
        loss.backward()
        self.loss = loss.item()
        self._layers = {
            name: parameter.grad.clone()
            for name, parameter in oracle.model.named_parameters()
            if parameter.grad is not None
        }

    @cached_property
    def layers(self) -> dict[str, Any]:
        """Of the layers; the language model's own head has none."""
        return {name: grad.numpy() for name, grad in self._layers.items()}
