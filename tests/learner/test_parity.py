"""One recorded minibatch through many layouts agrees with Hugging Face and autograd, in fp32."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

from megarl.reshard.engine_tensors import learner_buffers
from megarl.reshard.execute import slices
from megarl.reshard.layout import local_box
from tests.learner.parity import Case, Oracle, Runs
from tests.learner.parity_ranks import digest

MODELS = {"qwen3": False, "llama": True, "qwen2": False}  # family: tied embeddings
EXPERTS = ("qwen3-moe", "deepseek-v3", "moonlight", "glm4-moe")
SP = {"transformer_config": {"sequence_parallel": True}}
RECOMPUTED = "qwen3-pp2-dp2-recomputed"
CASES = {
    "qwen3-tp1": Case("qwen3"),
    "qwen3-tp2": Case("qwen3", parallel={"tp": 2}),
    "qwen3-pp2": Case("qwen3", parallel={"pp": 2}),
    "qwen3-tp2-pp2": Case("qwen3", parallel={"tp": 2, "pp": 2}),
    "qwen3-dp2": Case("qwen3", dp=2),
    "qwen3-tp4": Case("qwen3", parallel={"tp": 4}),
    "qwen3-tp2-sp-dp2": Case("qwen3", dp=2, parallel={"tp": 2}, learner=SP, max_logits=1000),
    RECOMPUTED: Case(
        "qwen3",
        dp=2,
        parallel={"pp": 2},
        more={"kl": {"coef": 0.05}, "correction": {"old_logprobs": "recomputed"}},
    ),
    "llama-tp1": Case("llama"),
    "llama-tp2": Case("llama", parallel={"tp": 2}, max_logits=1000),
    "llama-pp2-dp2": Case("llama", dp=2, parallel={"pp": 2}),
    "qwen2-tp1": Case("qwen2"),
    "qwen2-tp2": Case("qwen2", parallel={"tp": 2}),
    # With routed experts; where tp > 1, with sequence parallelism.
    "qwen3-moe-tp1": Case("qwen3-moe"),
    "qwen3-moe-dp2-ep2": Case("qwen3-moe", dp=2, parallel={"ep": 2}),
    "qwen3-moe-tp2-ep2": Case("qwen3-moe", parallel={"tp": 2, "ep": 2}),
    "deepseek-v3-tp2-ep2": Case("deepseek-v3", parallel={"tp": 2, "ep": 2}),
    "deepseek-v3-pp2-dp2-ep2": Case(
        "deepseek-v3", 2, {"pp": 2, "ep": 2, "pipeline_layout": "Et|tttL"}
    ),
    "glm4-moe-dp2-ep2": Case("glm4-moe", dp=2, parallel={"ep": 2}),
}
SLOW = {
    f"{model}-{name}": Case(model, dp, parallel)
    for model in EXPERTS
    for name, dp, parallel in (
        ("tp1", 1, {}),
        ("tp2", 1, {"tp": 2}),
        ("pp2", 1, {"pp": 2}),
        ("tp2-ep2", 1, {"tp": 2, "ep": 2}),
        ("dp2-ep2", 2, {"ep": 2}),
        ("tp2-pp2-ep2", 1, {"tp": 2, "pp": 2, "ep": 2}),
        ("tp2-dp2-ep2", 2, {"tp": 2, "ep": 2}),
        ("tp2-dp2-ep4", 2, {"tp": 2, "ep": 4}),
        ("tp2-etp2", 1, {"tp": 2, "etp": 2}),
        ("tp2-dp2-ep2-etp2", 2, {"tp": 2, "ep": 2, "etp": 2}),
    )
    if f"{model}-{name}" not in CASES
} | {"qwen3-pp2-uneven": Case("qwen3", parallel={"pp": 2, "first_stage_layers": 1})}
NAMES = [*CASES, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)]


class Ran:
    """The runs of both groups of cases, each started when the first of it is asked for."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._oracles: dict[str, Oracle] = {}
        self._runs: dict[int, Runs] = {}

    def oracles(self, models: set[str]) -> dict[str, Oracle]:
        for model in sorted(models - self._oracles.keys()):
            self._oracles[model] = Oracle(model, self._folder / model, MODELS.get(model, False))
        return self._oracles

    def of(self, name: str) -> Runs:
        cases = CASES if name in CASES else SLOW
        if id(cases) not in self._runs:
            folder = self._folder / f"runs-{len(self._runs)}"
            oracles = self.oracles({case.model for case in cases.values()})
            self._runs[id(cases)] = Runs(folder, cases, oracles)
        return self._runs[id(cases)]


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Ran:
    """The learners of all cases."""
    return Ran(tmp_path_factory.mktemp("parity"))


@pytest.mark.parametrize("name", NAMES)
def test_every_gradient_of_a_layout_is_that_of_hugging_face(name: str, ran: Ran) -> None:
    runs = ran.of(name)
    layout, expected = runs.layout(name), runs.oracle(name).gradients
    shape = runs.oracle(name).shape
    errors = dict.fromkeys(expected, 0.0)
    sizes = dict.fromkeys(expected, 0.0)
    for rank in layout.ranks:  # every copy of every element, not only one of each
        found = runs.gradients(name, rank.rank)
        buffers = learner_buffers(shape, layout, rank.rank)
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
    worst = {each: (errors[each] / sizes[each]) ** 0.5 for each in expected if sizes[each]}
    print(f"{name}: largest relative L2 {max(worst.values()):.1e}")
    assert max(worst.values()) < 1e-5, worst


@pytest.mark.parametrize("name", NAMES)
def test_gradient_norm_over_all_ranks_is_that_of_hugging_face_s_gradients(
    name: str, ran: Ran
) -> None:
    gradients = ran.of(name).oracle(name).gradients
    expected = sum(float((grad.astype(np.float64) ** 2).sum()) for grad in gradients.values())
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
    runs = ran.of(name)
    with torch.no_grad():
        expected = float(runs.oracle(name).loss(0.0, 0.0))
    found = runs.answers(name)["step"]["loss/total"]
    print(f"{name}: relative difference {abs(found / expected - 1):.1e}")
    assert found == pytest.approx(expected, rel=1e-6)


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


@pytest.mark.parametrize("cases", [CASES, pytest.param(SLOW, marks=pytest.mark.slow)])
def test_second_optimizer_step_is_the_same_in_every_layout(
    cases: dict[str, Case], ran: Ran
) -> None:
    for model in sorted({case.model for case in cases.values()}):
        names = [n for n in cases if cases[n].model == model and n != RECOMPUTED]
        answers = [ran.of(name).answers(name) for name in names]
        for name, answer in zip(names, answers, strict=True):
            assert answer["step again"]["loss/total"] < answer["step"]["loss/total"]
            for key in ("step", "step again"):
                assert answer[key] == pytest.approx(answers[0][key], rel=2e-3, abs=1e-6), name


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
