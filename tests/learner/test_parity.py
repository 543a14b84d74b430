"""One recorded minibatch through many layouts agrees with Hugging Face and autograd, in fp32."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

from megarl.actor.parameters import parameter_table
from megarl.reshard.engine_tensors import learner_buffers
from tests.learner.parity import (
    GRADIENT_BOUND,
    LOSS_BOUND,
    LOSS_BOUNDS,
    Case,
    Oracle,
    Runs,
)
from tests.learner.parity_cases import ALL, QUICK, RECOMPUTED, SLOW, TIED
from tests.learner.parity_ranks import digest
from tests.megatron_engine import Engine

NAMES = [*QUICK, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)]
MODELS = sorted({case.model for case in ALL.values()})


class Ran:
    """The runs of all cases: the quick ones on one set of ranks, each model's slow ones on another.

    Each is started when the first of its cases is asked for.
    """

    def __init__(self, folder: Path, engine: Engine) -> None:
        self._folder, self._engine = folder, engine
        self._oracles: dict[str, Oracle] = {}
        self._runs: dict[str, Runs] = {}

    def oracle(self, model: str) -> Oracle:
        if model not in self._oracles:
            self._oracles[model] = Oracle(model, self._folder / model, model in TIED)
        return self._oracles[model]

    def of(self, name: str) -> Runs:
        kind = "quick" if name in QUICK else ALL[name].model
        if kind not in self._runs:
            slow = {n: case for n, case in SLOW.items() if case.model == kind}
            cases = QUICK if kind == "quick" else slow
            oracles = {case.model: self.oracle(case.model) for case in cases.values()}
            folder = self._folder / f"runs-{kind}"
            self._runs[kind] = Runs(folder, cases, oracles, self._engine)
        return self._runs[kind]


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory, megatron_engine: Engine) -> Ran:
    """The learners of all cases."""
    return Ran(tmp_path_factory.mktemp("parity"), megatron_engine)


@pytest.mark.parametrize("name", NAMES)
def test_every_gradient_of_a_layout_is_that_of_hugging_face(name: str, ran: Ran) -> None:
    worst = ran.of(name).gradient_errors(name)
    print(f"{name}: largest relative L2 {max(worst.values()):.1e}")
    assert max(worst.values()) < GRADIENT_BOUND, worst


@pytest.mark.parametrize("name", NAMES)
def test_gradient_norm_over_all_ranks_is_that_of_hugging_face_s_gradients(
    name: str, ran: Ran
) -> None:
    oracle = ran.of(name).oracle(name)
    buffers = {p.name for p in parameter_table(oracle.shape) if p.kind == "router_bias"}
    gradients = [grad for each, grad in oracle.gradients.items() if each not in buffers]
    expected = sum(float((grad.astype(np.float64) ** 2).sum()) for grad in gradients)
    assert ran.of(name).answers(name)["norm"] == pytest.approx(expected**0.5, rel=1e-5)


@pytest.mark.parametrize("name", NAMES)
def test_gradients_of_all_ranks_are_clipped_by_one_factor(name: str, ran: Ran) -> None:
    answers = ran.of(name).answers(name)
    assert answers["step"]["grad_norm"] > 1.0  # learner.optimizer.clip_grad
    assert answers["norm after clipping"] == pytest.approx(1.0, rel=1e-5)


@pytest.mark.parametrize("name", NAMES)
def test_all_ranks_skip_a_step_whose_gradient_is_not_finite_on_one(name: str, ran: Ran) -> None:
    assert ran.of(name).answers(name)["skipped"] == 1.0


@pytest.mark.parametrize("name", [name for name in NAMES if name != RECOMPUTED])
def test_loss_of_a_layout_is_that_of_hugging_face(name: str, ran: Ran) -> None:
    off = ran.of(name).loss_error(name)
    print(f"{name}: relative difference {off:.1e}")
    assert off < LOSS_BOUNDS.get(ALL[name].model, LOSS_BOUND)


@pytest.mark.parametrize(
    "name", [n for n in NAMES if ALL[n if isinstance(n, str) else str(n.values[0])].variants]
)
def test_gradients_are_the_same_in_any_microbatches_and_whatever_no_loss_token_has(
    name: str, ran: Ran
) -> None:
    worst = ran.of(name).variants(name)
    print(f"{name}: {worst}")
    assert len(worst) == 5
    assert max(worst.values()) < GRADIENT_BOUND, worst


@pytest.mark.parametrize("name", NAMES)
def test_logprobs_verb_of_a_layout_answers_those_of_hugging_face(name: str, ran: Ran) -> None:
    runs, worst = ran.of(name), 0.0
    oracle, found = runs.oracle(name), runs.answers(name)["logprobs"]
    with torch.no_grad():
        for (sample, _), values in zip(oracle.samples, found, strict=True):
            theirs = oracle.logprobs(sample)[0]
            worst = max(worst, float((torch.tensor(values) - theirs).abs().max()))
    print(f"{name}: largest difference {worst:.1e}")
    assert worst < 2e-5


@pytest.mark.parametrize("name", NAMES)
def test_score_of_a_layout_is_the_mismatch_to_the_behavior_logprobs(name: str, ran: Ran) -> None:
    oracle = ran.of(name).oracle(name)
    found = ran.of(name).answers(name)["score"]
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


@pytest.mark.parametrize("name", NAMES)
def test_ranks_that_hold_the_same_hold_the_same_bits_after_two_steps(name: str, ran: Ran) -> None:
    runs = ran.of(name)
    digests: dict[object, set[str]] = {}
    for rank in runs.layout(name).ranks:
        found = runs.digests(name, rank.rank)
        pieces: dict[str, list[object]] = {}
        for piece in rank.pieces:
            pieces.setdefault(piece.local, []).append((piece.tensor, piece.box, piece.at))
        for local, held in pieces.items():
            digests.setdefault(tuple(held), set()).add(found[local])
    assert [held for held, different in digests.items() if len(different) > 1] == []


@pytest.mark.parametrize("name", NAMES)
def test_router_bias_is_that_of_the_checkpoint_before_and_after_two_steps(
    name: str, ran: Ran
) -> None:
    runs, layout = ran.of(name), ran.of(name).layout(name)
    oracle = runs.oracle(name)
    stored = load_file(oracle.folder / "model.safetensors")
    found = []
    for rank in layout.ranks:
        for local in learner_buffers(oracle.shape, layout, rank.rank):
            (piece,) = (each for each in rank.pieces if each.local == local)
            found.append(runs.digests(name, rank.rank)[local] == digest(stored[piece.tensor]))
    has_bias = oracle.shape.moe is not None and oracle.shape.moe.router_bias
    assert all(found) and bool(found) is has_bias


@pytest.mark.parametrize("cases", [QUICK, pytest.param(SLOW, marks=pytest.mark.slow)])
@pytest.mark.parametrize("model", MODELS)
def test_second_optimizer_step_is_the_same_in_every_layout(
    cases: dict[str, Case], model: str, ran: Ran
) -> None:
    names = [n for n in cases if cases[n].model == model and n != RECOMPUTED]
    answers = [ran.of(name).answers(name) for name in names]
    for name, answer in zip(names, answers, strict=True):
        assert answer["step again"]["loss/total"] < answer["step"]["loss/total"]
        for key in ("step", "step again"):
            found, expected = ({**each[key]} for each in (answer, answers[0]))
            for step in (found, expected):  # pipelines and context ranks pad more
                assert 0 < step.pop("packing/efficiency") <= 1
            assert found == pytest.approx(expected, rel=2e-3, abs=1e-6), name


def test_first_step_against_recomputed_logprobs_and_the_starting_reference_is_exact(
    ran: Ran,
) -> None:
    answers = ran.of(RECOMPUTED).answers(RECOMPUTED)
    samples = ran.of(RECOMPUTED).oracle(RECOMPUTED).samples
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
