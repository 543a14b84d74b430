"""One recorded minibatch through learners of many layouts, and through Hugging Face's model."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.numpy import load_file

from megarl.actor.parameters import block_table
from megarl.actor.shape import read_shape
from megarl.config.layouts import learner_layout, trained_shape
from megarl.config.schema import Config
from megarl.reshard.engine_tensors import learner_buffers
from megarl.reshard.execute import slices
from megarl.reshard.layout import Layout, local_box
from tests.learner import recorded, tiny_models
from tests.megatron_engine import Engine

LOSS_BOUND = 1e-6  # relative
# Advantages of both signs cancel in a loss; with latent attention one rank is 1.2e-6 off already.
LOSS_BOUNDS = {"deepseek-v3": 2e-6}
GRADIENT_BOUND = 1e-5  # relative L2 of each tensor
TEMPERATURE = 0.8
WEIGHTS = {"clip_low": 0.2, "clip_high": 0.3, "entropy_coef": 0.01, "kl_coef": 0.05}


@dataclass(frozen=True)
class Case:
    """One model on one mesh; `more` are settings of the run.

    `variants`: the gradients of the same minibatch in other microbatches are wanted too.
    `max_logits` above 0 has the output layer run in parts.
    """

    model: str
    dp: int = 1
    parallel: Mapping[str, Any] = field(default_factory=dict)
    more: Mapping[str, Any] = field(default_factory=dict)
    variants: bool = False
    max_logits: int = 0

    @property
    def world_size(self) -> int:
        """Ranks of the learner."""
        return math.prod((self.dp, *(self.parallel.get(name, 1) for name in ("tp", "pp", "cp"))))

    def config(self, model: Path) -> Config:
        """The settings of the run."""
        return Config.model_validate(
            {
                "actor": {"model": str(model)},
                "rollout": {"sampling": {"temperature": TEMPERATURE}},
                "learner": {
                    "max_tokens_per_microbatch": 32,
                    "parallel": dict(self.parallel),
                    "precision": {"params": "fp32"},
                    "optimizer": {"lr": 1e-3},
                },
                "loss": {"clip_low": WEIGHTS["clip_low"], "clip_high": WEIGHTS["clip_high"]},
                "placement": {"learner_gpus": self.world_size},
                **self.more,
            }
        )


class Oracle:
    """Hugging Face's forward pass and a loss written out sample by sample, in one process."""

    def __init__(self, family: str, folder: Path, tied: bool = False) -> None:
        self.folder = folder
        self.model = tiny_models.make(family, folder, tied)
        self.shape = trained_shape(read_shape(folder))
        groups = folder.with_name(f"{family}-groups")
        self.samples = recorded.record(
            groups,
            tiny_models.VOCAB_SIZE,
            lambda sample: self.logprobs(sample)[0].tolist(),
        )
        self.maskless = recorded.record_maskless(groups, tiny_models.VOCAB_SIZE)

    def logprobs(self, sample: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-probs of the response tokens, and the entropy where each was predicted."""
        ids = torch.tensor([[*sample.prompt_ids, *sample.response_ids]])
        logits = self.model(ids).logits[0, len(sample.prompt_ids) - 1 : -1] / TEMPERATURE
        logp = logits.log_softmax(-1)
        entropy = -(logp.exp() * logp).sum(-1)
        return logp.gather(1, torch.tensor(sample.response_ids)[:, None])[:, 0], entropy

    def loss(self, kl_coef: float, entropy_coef: float) -> torch.Tensor:
        """The token mean of the whole minibatch, one token at a time."""
        total, count = torch.zeros(()), 0
        for sample, ref in self.samples:
            logp, entropy = self.logprobs(sample)
            for at, trains in enumerate(sample.loss_mask):
                if not trains:
                    continue
                old = sample.behavior_logprobs[at]
                ratio = (logp[at] - old).exp()
                clipped = ratio.clamp(1 - WEIGHTS["clip_low"], 1 + WEIGHTS["clip_high"])
                policy = -torch.min(ratio * ref.advantage, clipped * ref.advantage)
                away = 0.9 * old - logp[at]
                kl = away.exp() - away - 1
                total = total + policy + kl_coef * kl - entropy_coef * entropy[at]
                count += 1
        return total / count

    @cached_property
    def gradients(self) -> dict[str, np.ndarray]:
        """d(loss)/d(parameter) by the table's names, experts as stacks.

        Named by saving them as a checkpoint: transformers holds experts in other tensors.
        """
        self.model.zero_grad()
        self.loss(WEIGHTS["kl_coef"], WEIGHTS["entropy_coef"]).backward()
        weights = {name: p.detach().clone() for name, p in self.model.named_parameters()}
        saved = self.folder.with_name(f"{self.folder.name}-gradients")
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.copy_(
                    torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                )
            self.model.save_pretrained(saved)
            for name, parameter in self.model.named_parameters():
                parameter.copy_(weights[name])
        stored = load_file(saved / "model.safetensors")
        table = block_table(self.shape).parameters
        return {
            p.name: np.stack([stored[n] for n in p.stored_names()]) if p.stacked else stored[p.name]
            for p in table
        }


class Runs:
    """Learners of all cases, one after the other on the same ranks, and what they answered."""

    def __init__(
        self,
        folder: Path,
        cases: Mapping[str, Case],
        oracles: Mapping[str, Oracle],
        engine: Engine,
    ) -> None:
        self.folder, self.cases, self.oracles = folder, cases, oracles
        folder.mkdir(parents=True, exist_ok=True)
        written = folder / "cases.json"
        written.write_text(json.dumps([self._written(name) for name in cases]))
        ranks = max(case.world_size for case in cases.values())
        engine.run("tests.learner.parity_ranks", written, ranks=ranks)

    def _written(self, name: str) -> dict[str, Any]:
        case = self.cases[name]
        oracle = self.oracles[case.model]
        refs = [ref for _, ref in oracle.samples]
        varied = recorded.variants(refs, oracle.maskless, case.dp) if case.variants else {}
        return {
            "name": name,
            "world_size": case.world_size,
            "config": self.config(name).model_dump(),
            "plan": asdict(recorded.plan(refs, case.dp)),
            "variants": {variant: asdict(plan) for variant, plan in varied.items()},
            "weights": WEIGHTS,
            "max_logits": case.max_logits,
            "sequences": [(s.prompt_ids, s.response_ids) for s, _ in oracle.samples],
        }

    def config(self, name: str) -> Config:
        """The settings of a case."""
        case = self.cases[name]
        return case.config(self.oracles[case.model].folder)

    def oracle(self, name: str) -> Oracle:
        """Of the model of a case."""
        return self.oracles[self.cases[name].model]

    def layout(self, name: str) -> Layout:
        """What each rank of a case holds."""
        return learner_layout(self.config(name), self.oracle(name).shape)

    def answers(self, name: str) -> dict[str, Any]:
        """What the verbs of a case answered."""
        answers: dict[str, Any] = json.loads((self.folder / f"{name}.json").read_text())
        return answers

    def gradients(self, name: str, rank: int) -> Mapping[str, np.ndarray]:
        """A rank's gradients, whole, by Megatron's names."""
        return np.load(self.folder / f"{name}.{rank}.npz")

    def digests(self, name: str, rank: int) -> dict[str, str]:
        """Of a rank's weights after the steps."""
        digests: dict[str, str] = json.loads((self.folder / f"{name}.{rank}.json").read_text())
        return digests

    def variants(self, name: str) -> dict[str, float]:
        """Of each variant of a case, the relative L2 of the gradient tensor that is most off."""
        worst: dict[str, float] = {}
        for rank in range(self.cases[name].world_size):
            found = json.loads((self.folder / f"{name}.{rank}.variants.json").read_text())
            for variant, off in found.items():
                worst[variant] = max(worst.get(variant, 0.0), off)
        return worst

    def gradient_errors(self, name: str) -> dict[str, float]:
        """By parameter, the relative L2 of a case's gradient to Hugging Face's, over all copies.

        Every copy of every element counts, not one of each; a gradient of padding must be zero.
        """
        layout, expected = self.layout(name), self.oracle(name).gradients
        errors, sizes = dict.fromkeys(expected, 0.0), dict.fromkeys(expected, 0.0)
        for rank in layout.ranks:
            found = self.gradients(name, rank.rank)
            buffers = learner_buffers(self.oracle(name).shape, layout, rank.rank)
            assert set(found) == {tensor.name for tensor in rank.tensors} - buffers
            for piece in rank.pieces:
                if piece.local in buffers:
                    continue
                here = found[piece.local][slices(local_box(piece.box, piece.at))].astype(np.float64)
                there = expected[piece.tensor][slices(piece.box)].astype(np.float64)
                errors[piece.tensor] += float(((here - there.reshape(here.shape)) ** 2).sum())
                sizes[piece.tensor] += float((there**2).sum())
            for padding in rank.paddings:
                assert not found[padding.local][slices(padding.box)].any(), padding
        return {each: (errors[each] / sizes[each]) ** 0.5 for each in expected if sizes[each]}

    def loss_error(self, name: str) -> float:
        """The relative difference of a case's loss to Hugging Face's, without KL and entropy."""
        with torch.no_grad():
            expected = float(self.oracle(name).loss(0.0, 0.0))
        return abs(float(self.answers(name)["step"]["loss/total"]) / expected - 1)
