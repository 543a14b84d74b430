"""One recorded minibatch through many layouts agrees with Hugging Face and autograd, in fp32."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megarl.actor.shape import read_shape
from megarl.reshard.execute import slices
from megarl.reshard.layout import local_box
from megarl.reshard.megatron import megatron_layout
from megarl.reshard.mesh import LearnerMesh
from tests.learner import recorded, tiny_models

TEMPERATURE = 0.8
WEIGHTS = {"clip_low": 0.2, "clip_high": 0.3, "entropy_coef": 0.01, "kl_coef": 0.05}
MODELS = {"qwen3": False, "llama": True, "qwen2": False}  # family: tied embeddings
RECOMPUTED = "qwen3-pp2-dp2-recomputed"
# name: (model, tp, pp, dp, more settings)
CASES: dict[str, tuple[str, int, int, int, dict[str, Any]]] = {
    "qwen3-tp1": ("qwen3", 1, 1, 1, {}),
    "qwen3-tp2": ("qwen3", 2, 1, 1, {}),
    "qwen3-pp2": ("qwen3", 1, 2, 1, {}),
    "qwen3-tp2-pp2": ("qwen3", 2, 2, 1, {}),
    "qwen3-dp2": ("qwen3", 1, 1, 2, {}),
    "qwen3-tp4": ("qwen3", 4, 1, 1, {}),
    "qwen3-tp2-sp-dp2": (
        "qwen3",
        2,
        1,
        2,
        {"learner": {"transformer_config": {"sequence_parallel": True}}},
    ),
    RECOMPUTED: (
        "qwen3",
        1,
        2,
        2,
        {"kl": {"coef": 0.05}, "correction": {"old_logprobs": "recomputed"}},
    ),
    "llama-tp1": ("llama", 1, 1, 1, {}),
    "llama-tp2": ("llama", 2, 1, 1, {}),
    "llama-pp2-dp2": ("llama", 1, 2, 2, {}),
    "qwen2-tp1": ("qwen2", 1, 1, 1, {}),
    "qwen2-tp2": ("qwen2", 2, 1, 1, {}),
}


class Oracle:
    """Hugging Face's forward pass and a loss written out sample by sample, in one process."""

    def __init__(self, model: Any, folder: Path) -> None:
        self.model = model
        self.samples = recorded.record(
            folder, tiny_models.VOCAB_SIZE, lambda sample: self.logprobs(sample)[0].tolist()
        )

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

    def gradients(self) -> dict[str, np.ndarray]:
        """d(loss)/d(parameter) by name."""
        self.model.zero_grad()
        self.loss(WEIGHTS["kl_coef"], WEIGHTS["entropy_coef"]).backward()
        return {name: p.grad.numpy().copy() for name, p in self.model.named_parameters()}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where models, samples and results are."""
    return tmp_path_factory.mktemp("parity")


@pytest.fixture(scope="module")
def oracles(folder: Path) -> dict[str, Oracle]:
    """One for each model, all with the same samples."""
    return {
        family: Oracle(tiny_models.make(family, folder / family, tied), folder / f"{family}-groups")
        for family, tied in MODELS.items()
    }


@pytest.fixture(scope="module")
def ran(folder: Path, oracles: dict[str, Oracle]) -> Path:
    """The folder, after one torchrun of four ranks has gone through all cases."""
    cases = []
    for name, (family, tp, pp, dp, more) in CASES.items():
        samples = oracles[family].samples
        config = {
            "actor": {"model": str(folder / family)},
            "rollout": {"sampling": {"temperature": TEMPERATURE}},
            "learner": {
                "max_tokens_per_microbatch": 32,
                "parallel": {"tp": tp, "pp": pp},
                "precision": {"params": "fp32"},
                "optimizer": {"lr": 1e-3},
                **more.get("learner", {}),
            },
            "loss": {"clip_low": WEIGHTS["clip_low"], "clip_high": WEIGHTS["clip_high"]},
            "placement": {"learner_gpus": tp * pp * dp},
            **{group: settings for group, settings in more.items() if group != "learner"},
        }
        plan = recorded.plan([ref for _, ref in samples], dp)
        cases.append(
            {
                "name": name,
                "world_size": tp * pp * dp,
                "config": config,
                "plan": asdict(plan),
                "weights": WEIGHTS,
                "sequences": [(s.prompt_ids, s.response_ids) for s, _ in samples],
            }
        )
    (folder / "cases.json").write_text(json.dumps(cases))
    worker = Path(__file__).with_name("parity_ranks.py")
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, *torchrun, str(worker), str(folder)],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
        env=environment,
    )
    assert done.returncode == 0, done.stderr[-6000:]
    return folder


@pytest.mark.parametrize("name", CASES)
def test_every_gradient_of_a_layout_is_that_of_hugging_face(
    name: str, ran: Path, oracles: dict[str, Oracle]
) -> None:
    family, tp, pp, dp, _ = CASES[name]
    layout = megatron_layout(read_shape(ran / family), LearnerMesh(tp=tp, pp=pp, dp=dp))
    expected = oracles[family].gradients()
    errors = dict.fromkeys(expected, 0.0)
    sizes = dict.fromkeys(expected, 0.0)
    for rank in layout.ranks:  # every copy of every element, not only one of each
        found = np.load(ran / f"{name}.{rank.rank}.npz")
        assert set(found.files) == {tensor.name for tensor in rank.tensors}
        for piece in rank.pieces:
            here = found[piece.local][slices(local_box(piece.box, piece.at))].astype(np.float64)
            there = expected[piece.tensor][slices(piece.box)].astype(np.float64)
            errors[piece.tensor] += float(((here - there) ** 2).sum())
            sizes[piece.tensor] += float((there**2).sum())
        for padding in rank.paddings:
            assert not found[padding.local][slices(padding.box)].any(), padding
    worst = {each: (errors[each] / sizes[each]) ** 0.5 for each in expected}
    print(f"{name}: largest relative L2 {max(worst.values()):.1e}")
    assert max(worst.values()) < 1e-5, worst


@pytest.mark.parametrize("name", [name for name in CASES if name != RECOMPUTED])
def test_loss_of_a_layout_is_that_of_hugging_face(
    name: str, ran: Path, oracles: dict[str, Oracle]
) -> None:
    with torch.no_grad():
        expected = float(oracles[CASES[name][0]].loss(0.0, 0.0))
    found = json.loads((ran / f"{name}.json").read_text())["step"]["loss/total"]
    print(f"{name}: relative difference {abs(found / expected - 1):.1e}")
    assert found == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("name", CASES)
def test_logprobs_verb_of_a_layout_answers_those_of_hugging_face(
    name: str, ran: Path, oracles: dict[str, Oracle]
) -> None:
    oracle = oracles[CASES[name][0]]
    found = json.loads((ran / f"{name}.json").read_text())["logprobs"]
    with torch.no_grad():
        for (sample, _), values in zip(oracle.samples, found, strict=True):
            torch.testing.assert_close(
                torch.tensor(values), oracle.logprobs(sample)[0], rtol=0, atol=2e-5
            )


@pytest.mark.parametrize("name", CASES)
def test_score_of_a_layout_is_the_mismatch_to_the_behavior_logprobs(
    name: str, ran: Path, oracles: dict[str, Oracle]
) -> None:
    oracle = oracles[CASES[name][0]]
    found = json.loads((ran / f"{name}.json").read_text())["score"]
    differences = []
    with torch.no_grad():
        for sample, _ in oracle.samples:
            difference = oracle.logprobs(sample)[0] - torch.tensor(sample.behavior_logprobs)
            differences.append(difference[torch.tensor(sample.loss_mask)].double())
    d = torch.cat(differences)
    expected = {
        "mismatch/mean_abs_logprob": d.abs().mean().item(),
        "mismatch/max_abs_logprob": d.abs().max().item(),
        "mismatch/mean_ratio": d.exp().mean().item(),
        "mismatch/k3_kl": (d.exp() - 1 - d).mean().item(),
    }
    assert found == pytest.approx(expected, rel=1e-4)


def test_second_optimizer_step_is_the_same_in_every_layout(
    ran: Path, oracles: dict[str, Oracle]
) -> None:
    for family in MODELS:
        names = [n for n in CASES if CASES[n][0] == family and n != RECOMPUTED]
        answers = [json.loads((ran / f"{name}.json").read_text()) for name in names]
        for name, answer in zip(names, answers, strict=True):
            assert answer["step again"]["loss/total"] < answer["step"]["loss/total"]
            for key in ("step", "step again"):
                assert answer[key] == pytest.approx(answers[0][key], rel=2e-3, abs=1e-6), name


def test_first_step_against_recomputed_logprobs_and_the_starting_reference_is_exact(
    ran: Path, oracles: dict[str, Oracle]
) -> None:
    answers = json.loads((ran / f"{RECOMPUTED}.json").read_text())
    samples = oracles["qwen3"].samples
    num_loss_tokens = sum(ref.num_loss_tokens for _, ref in samples)
    expected = -sum(ref.advantage * ref.num_loss_tokens for _, ref in samples) / num_loss_tokens
    first, second = answers["step"], answers["step again"]
    assert first["loss/policy"] == pytest.approx(expected, rel=1e-6)
    assert first["loss/clip_fraction"] == 0.0
    assert first["kl/mean"] == pytest.approx(0.0, abs=1e-9)
    assert second["kl/mean"] > 1e-6
    assert second["loss/total"] == pytest.approx(
        second["loss/policy"] + 0.05 * second["kl/mean"], rel=1e-6
    )
