"""A critic on real Megarl-built models agrees with Hugging Face's layers, and goes on when resumed.

Two ranks for all cases, in fp32.
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megarl.config.layouts import critic_layout, critic_shape
from megarl.config.schema import Config
from megarl.reshard.execute import slices
from megarl.reshard.layout import local_box
from tests.learner import recorded
from tests.learner.critic_oracle import CLIP, GAMMA, LAMBDA, POLICY_CLIP, Gradients, Oracle
from tests.megatron_engine import Engine

MODELS = {"qwen3": False, "llama": True}  # family: tied embeddings


@dataclass(frozen=True)
class Case:
    """One mesh of a model; `resumes` names a folder where there is one to save to or load from."""

    model: str
    dp: int = 1
    parallel: dict[str, int] = field(default_factory=dict)
    continued: bool = True
    kl_coef: float = 0.0
    resumes: str = ""

    @property
    def world_size(self) -> int:
        return self.dp * math.prod(self.parallel.get(axis, 1) for axis in ("tp", "pp", "cp"))

    def config(self, model: Path) -> Config:
        return Config.model_validate(
            {
                "actor": {"model": str(model)},
                "advantage": {
                    "estimator": "gae",
                    "gamma": GAMMA,
                    "gae_lambda": LAMBDA,
                    "cut_responses": "continued" if self.continued else "ended",
                },
                "critic": {
                    "clip": CLIP,
                    "optimizer": {"lr": 1e-3, "warmup_steps": 2},
                    "warmup_versions": 1 if self.resumes else 0,
                },
                "kl": {"coef": self.kl_coef, "where": "reward" if self.kl_coef else "loss"},
                "loss": {"clip_low": POLICY_CLIP[0], "clip_high": POLICY_CLIP[1]},
                "learner": {
                    "max_tokens_per_microbatch": 32,
                    "parallel": self.parallel,
                    "precision": {"params": "fp32"},
                    "optimizer": {"lr": 1e-3},
                },
                "placement": {"learner_gpus": self.world_size},
            }
        )


LAYOUTS = {
    "qwen3-tp1": Case("qwen3"),
    "qwen3-ended": Case("qwen3", continued=False),
    "qwen3-tp2": Case("qwen3", parallel={"tp": 2}),
    "qwen3-tp2-plain": Case("qwen3", parallel={"tp": 2, "sequence_parallel": False}),
    "qwen3-cp2": Case("qwen3", parallel={"cp": 2}),
    "qwen3-pp2-vpp2": Case("qwen3", parallel={"pp": 2, "vpp": 2}),
    "qwen3-dp2": Case("qwen3", dp=2, kl_coef=0.2),
    "llama-pp2": Case("llama", parallel={"pp": 2}, kl_coef=0.2),
}
RESUMES = {
    "uninterrupted": Case("llama", parallel={"tp": 2}, resumes="v000002"),
    "resumed": Case("llama", parallel={"tp": 2}, resumes="v000002"),
    "elsewhere": Case("llama", parallel={"pp": 2}, resumes="v000002"),
}


class Ran:
    """The oracles, and what the learners of all cases answered."""

    def __init__(self, folder: Path, engine: Engine) -> None:
        self.folder = folder
        self.oracles = {
            name: Oracle(name, folder / f"model-{name}", tied) for name, tied in MODELS.items()
        }
        cases = {**LAYOUTS, **RESUMES}
        written = folder / "cases.json"
        written.write_text(json.dumps([self._written(name, case) for name, case in cases.items()]))
        engine.run("tests.learner.critic_ranks", written, ranks=2)

    def _written(self, name: str, case: Case) -> dict[str, Any]:
        oracle = self.oracles[case.model]
        return {
            "name": name,
            "world_size": case.world_size,
            "config": case.config(oracle.folder).model_dump(),
            "plan": asdict(recorded.plan([ref for _, ref in oracle.samples], case.dp)),
            "resumes": case.resumes,
        }

    def answers(self, name: str) -> dict[str, Any]:
        answers: dict[str, Any] = json.loads((self.folder / f"{name}.json").read_text())
        return answers


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory, megatron_engine: Engine) -> Ran:
    return Ran(tmp_path_factory.mktemp("critic"), megatron_engine)


def expected(ran: Ran, name: str) -> tuple[Oracle, Gradients, list[Any]]:
    case = LAYOUTS[name]
    oracle = ran.oracles[case.model]
    tokens = oracle.tokens(case.continued, case.kl_coef)
    return oracle, Gradients(oracle, tokens), tokens


@pytest.mark.parametrize("name", LAYOUTS)
def test_value_loss_and_its_gradients_are_those_of_hugging_face_s_layers(
    name: str, ran: Ran
) -> None:
    case = LAYOUTS[name]
    oracle, theirs, _ = expected(ran, name)
    assert ran.answers(name)["step"]["value/loss"] == pytest.approx(theirs.loss, rel=1e-6)
    config = case.config(oracle.folder)
    layout = critic_layout(config, critic_shape(config))
    errors = dict.fromkeys(theirs.layers, 0.0)
    heads = 0
    for rank in layout.ranks:  # every copy of every element
        found = np.load(ran.folder / f"{name}.{rank.rank}.npz")
        of_head = {local for local in found if "output_layer." in local}
        assert set(found) - of_head == {tensor.name for tensor in rank.tensors}
        for piece in rank.pieces:
            here = found[piece.local][slices(local_box(piece.box, piece.at))].astype(np.float64)
            there = theirs.layers[piece.tensor][slices(piece.box)].astype(np.float64)
            errors[piece.tensor] += float(((here - there.reshape(here.shape)) ** 2).sum())
        if of_head:
            heads += 1
            weight, bias = theirs.weight.grad.numpy(), theirs.bias.grad.numpy()
            size = np.linalg.norm(weight)
            here_bias, here = (found[local] for local in sorted(of_head))
            assert np.linalg.norm(here[0] - weight) < 1e-5 * size
            assert here_bias == pytest.approx(bias, rel=1e-5)
    assert heads == case.world_size // case.parallel.get("pp", 1)
    worst = {
        each: (errors[each] / float((theirs.layers[each].astype(np.float64) ** 2).sum())) ** 0.5
        for each in errors
    }
    print(f"{name}: largest relative L2 {max(worst.values()):.1e}")
    assert max(worst.values()) < 1e-5, worst


@pytest.mark.parametrize("name", LAYOUTS)
def test_numbers_of_the_batch_and_advantages_are_the_oracle_s(name: str, ran: Ran) -> None:
    oracle, _, tokens = expected(ran, name)
    values, returns, advantages = (
        np.array([number for each in tokens for number in getattr(each, part)])
        for part in ("values", "returns", "advantages")
    )
    answers = ran.answers(name)
    wanted = {
        "value/mean": values.mean(),
        "returns/mean": returns.mean(),
        "advantage/mean": advantages.mean(),
        "advantage/std": advantages.std(),
        "value/explained_variance": 1 - (returns - values).var() / returns.var(),
    }
    assert {key: answers["score"][key] for key in wanted} == pytest.approx(wanted, rel=1e-4)
    assert answers["step"]["loss/policy"] == pytest.approx(oracle.policy_loss(tokens), abs=2e-6)
    clipped = answers["step"]["value/clip_fraction"]
    assert 0 < clipped < 1


@pytest.mark.parametrize("name", [name for name in LAYOUTS if name != "qwen3-ended"])
def test_later_steps_are_the_same_in_every_layout(name: str, ran: Ran) -> None:
    case = LAYOUTS[name]
    first = next(
        other
        for other, each in LAYOUTS.items()
        if (each.model, each.kl_coef) == (case.model, case.kl_coef)
    )
    for found, wanted in zip(ran.answers(name)["later"], ran.answers(first)["later"], strict=True):
        for each in (found, wanted):
            each.pop("packing/efficiency", None)  # layouts pad otherwise
        assert found == pytest.approx(wanted, rel=2e-3, abs=1e-5)


def test_critic_learns_alone_at_first(ran: Ran) -> None:
    answers = ran.answers("uninterrupted")
    scored, first, _, second = answers["alone"]
    assert answers["still"], "the policy's weights changed"
    assert "loss/policy" not in first and "loss/policy" in second
    assert scored["value/explained_variance"] < 1
    assert first["value/lr"] == pytest.approx(5e-4) and second["value/lr"] == pytest.approx(1e-3)


def test_step_without_a_score_is_refused(ran: Ran) -> None:
    assert "score the batch before its first step" in ran.answers("uninterrupted")["refused"]


def test_resumed_run_goes_on_as_the_uninterrupted_one(ran: Ran) -> None:
    assert ran.answers("resumed")["version"] == 2
    assert ran.answers("resumed")["later"] == ran.answers("uninterrupted")["later"]


def test_run_resumed_in_another_layout_goes_on_as_the_uninterrupted_one(ran: Ran) -> None:
    found, wanted = ran.answers("elsewhere")["later"], ran.answers("uninterrupted")["later"]
    for mine, theirs in zip(found, wanted, strict=True):
        for key in ("value/loss", "value/mean", "returns/mean", "loss/policy", "value/grad_norm"):
            if key in theirs:
                assert mine[key] == pytest.approx(theirs[key], rel=1e-5, abs=1e-6), key
