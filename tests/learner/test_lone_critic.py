"""A critic with ranks of its own computes what one on the learner's ranks does, in any layout.

Both agree with Hugging Face's layers, one process, in fp32. Two ranks for all cases.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megarl.config.layouts import critic_layout, critic_settings, critic_shape
from megarl.config.schema import Config
from megarl.reshard.execute import slices
from megarl.reshard.layout import local_box
from tests.learner import recorded
from tests.learner.critic_oracle import Gradients, Oracle, Tokens
from tests.learner.test_critic import Case
from tests.megatron_engine import Engine

MODEL = "qwen3"


@dataclass(frozen=True)
class Apart:
    """Layouts of policy and critic, of which one is run: the critic's where `is_critic`.

    `resumes` names the case whose critic goes on here.
    """

    is_critic: bool
    parallel: dict[str, int] = field(default_factory=dict)
    dp: int = 1
    kl_coef: float = 0.0
    resumes: str = ""

    @property
    def case(self) -> Case:
        """The mesh that is run, as a case of a critic on it."""
        return Case(MODEL, self.dp, self.parallel, kl_coef=self.kl_coef)

    def config(self, model: Path) -> dict[str, Any]:
        """The other side has one rank."""
        settings = self.case.config(model).model_dump()
        settings["critic"]["ranks"] = "own"
        if self.is_critic:
            settings["critic"] |= {"parallel": self.parallel, "gpus": self.case.world_size}
            settings["learner"]["parallel"] = {}
            settings["placement"]["learner_gpus"] = 1
        return settings


CRITICS = {
    "critic-dp1": Apart(True),
    "critic-tp2": Apart(True, {"tp": 2}),
    "critic-pp2": Apart(True, {"pp": 2}, kl_coef=0.2),
    "critic-dp2": Apart(True, dp=2, kl_coef=0.2),
}
RESUMED = {
    "tp2 on one rank": Apart(True, resumes="critic-tp2"),
    "dp2 in stages": Apart(True, {"pp": 2}, kl_coef=0.2, resumes="critic-dp2"),
}
POLICIES = {
    "policy-tp2": Apart(False, {"tp": 2}),
    "policy-pp2": Apart(False, {"pp": 2}, kl_coef=0.2),
    "policy-dp2": Apart(False, dp=2, kl_coef=0.2),
}


class Ran:
    """The oracle, and what the ranks of all cases answered."""

    def __init__(self, folder: Path, engine: Engine) -> None:
        self.folder = folder
        self.oracle = Oracle(MODEL, folder / "model", tied=False)
        cases = {**CRITICS, **RESUMED, **POLICIES}
        written = folder / "cases.json"
        written.write_text(json.dumps([self._written(name, case) for name, case in cases.items()]))
        engine.run("tests.learner.apart_ranks", written, ranks=2)

    def tokens(self, case: Apart) -> list[Tokens]:
        return self.oracle.tokens(True, case.kl_coef)

    def by_sample(self, numbers: list[list[float]]) -> dict[str, list[float]]:
        names = [ref.sample_id for _, ref in self.oracle.samples]
        return dict(zip(names, numbers, strict=True))

    def rewards(self, case: Apart) -> dict[str, list[float]]:
        """Of every loss token; nothing without a KL term."""
        if not case.kl_coef:
            return {}
        found = []
        for sample, _ in self.oracle.samples:
            logp = self.oracle.logprobs(sample).tolist()
            actions = [at for at, trains in enumerate(sample.loss_mask) if trains]
            away = [sample.behavior_logprobs[at] - logp[at] for at in actions]
            found.append([-case.kl_coef * each for each in away])
        return self.by_sample(found)

    def advantages(self, case: Apart) -> dict[str, list[float]]:
        """Of every loss token, whitened."""
        return self.by_sample(self.oracle.whitened(self.tokens(case)))

    def _written(self, name: str, case: Apart) -> dict[str, Any]:
        return {
            "name": name,
            "is_critic": case.is_critic,
            "world_size": case.case.world_size,
            "config": case.config(self.oracle.folder),
            "plan": asdict(recorded.plan([ref for _, ref in self.oracle.samples], case.dp)),
            "given": self.rewards(case) if case.is_critic else self.advantages(case),
            "from": f"{case.resumes}.saved" if case.resumes else "",
        }

    def answers(self, name: str) -> dict[str, Any]:
        answers: dict[str, Any] = json.loads((self.folder / f"{name}.json").read_text())
        return answers


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory, megatron_engine: Engine) -> Ran:
    return Ran(tmp_path_factory.mktemp("apart"), megatron_engine)


def assert_near(found: dict[str, list[float]], wanted: dict[str, list[float]]) -> None:
    assert found.keys() == wanted.keys()
    for name, numbers in wanted.items():
        assert found[name] == pytest.approx(numbers, abs=2e-5), name


@pytest.mark.parametrize("name", CRITICS)
def test_value_loss_and_gradients_of_a_critic_apart_are_those_of_hugging_face_s_layers(
    name: str, ran: Ran
) -> None:
    case = CRITICS[name]
    theirs = Gradients(ran.oracle, ran.tokens(case))
    assert ran.answers(name)["step"]["value/loss"] == pytest.approx(theirs.loss, rel=1e-6)
    config = critic_settings(Config.model_validate(case.config(ran.oracle.folder)))
    layout = critic_layout(config, critic_shape(config))
    assert len(layout.ranks) == case.case.world_size
    errors = dict.fromkeys(theirs.layers, 0.0)
    for rank in layout.ranks:
        found = np.load(ran.folder / f"{name}.{rank.rank}.npz")
        for piece in rank.pieces:
            here = found[piece.local][slices(local_box(piece.box, piece.at))].astype(np.float64)
            there = theirs.layers[piece.tensor][slices(piece.box)].astype(np.float64)
            errors[piece.tensor] += float(((here - there.reshape(here.shape)) ** 2).sum())
    worst = max(
        (errors[each] / float((theirs.layers[each].astype(np.float64) ** 2).sum())) ** 0.5
        for each in errors
    )
    print(f"{name}: largest relative L2 {worst:.1e}")
    assert worst < 1e-5


@pytest.mark.parametrize("name", CRITICS)
def test_advantages_that_a_critic_apart_gives_are_the_oracle_s(name: str, ran: Ran) -> None:
    answers, case = ran.answers(name), CRITICS[name]
    assert_near(answers["advantages"], ran.advantages(case))
    values = [value for each in ran.tokens(case) for value in each.values]
    assert answers["score"]["value/mean"] == pytest.approx(float(np.mean(values)), rel=1e-4)


@pytest.mark.parametrize("name", POLICIES)
def test_rewards_that_a_policy_gives_its_critic_are_the_oracle_s(name: str, ran: Ran) -> None:
    assert_near(ran.answers(name)["rewards"], ran.rewards(POLICIES[name]))


@pytest.mark.parametrize("name", POLICIES)
def test_policy_learns_from_advantages_that_it_was_given(name: str, ran: Ran) -> None:
    answers, case = ran.answers(name), POLICIES[name]
    first, lost = "score the batch before its first step", "other learner ranks refused this verb"
    assert (lost if "pp" in case.parallel else first) in answers["refused"]  # rank 0 has no loss
    wanted = ran.oracle.policy_loss(ran.tokens(case))
    assert answers["step"]["loss/policy"] == pytest.approx(wanted, abs=2e-6)
    assert not any(metric.startswith("value/") for metric in answers["step"])


def test_step_of_a_critic_apart_without_a_score_is_refused(ran: Ran) -> None:
    assert "score the batch before its first step" in ran.answers("critic-tp2")["refused"]


@pytest.mark.parametrize("name", RESUMED)
def test_critic_apart_goes_on_in_another_layout_as_the_one_that_never_stopped(
    name: str, ran: Ran
) -> None:
    answers, before = ran.answers(name), ran.answers(RESUMED[name].resumes)
    assert answers["version"] == 1
    for found, wanted in zip(answers["later"], before["later"], strict=True):
        assert found == pytest.approx(wanted, rel=1e-4, abs=1e-5)
