"""A learner that goes on in another layout, again and again, is the one that never stopped."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from megarl.types import MinibatchPlan, SampleRef
from tests.learner import recorded, tiny_models
from tests.learner.parity import Case, Oracle
from tests.learner.resume_ranks import STEPS
from tests.learner.saved_tensors import saved_tensors
from tests.megatron_engine import Engine

VPP2 = {"pp": 2, "vpp": 2}
NO_EXPERTS = {"pp": 2, "pipeline_layout": "Et|tttL"}  # on the first stage
Layout = tuple[int, Mapping[str, Any]]  # (dp, sizes)

STRAIGHT: Mapping[str, Layout] = {
    "qwen3": (1, {"tp": 2}),
    "llama": (1, {"pp": 2}),
    "qwen3-moe": (1, {"tp": 2, "ep": 2}),
    "deepseek-v3": (2, {"ep": 2}),
    "glm4-moe": (2, {}),
}
CHAINS: Mapping[str, tuple[Layout, ...]] = {
    "qwen3": ((1, {"tp": 2}), (1, {"pp": 2}), (2, {}), (1, {"cp": 2}), (1, VPP2), (1, {"tp": 2})),
    "llama": ((1, VPP2), (1, {"tp": 2}), (1, VPP2), (1, {"cp": 2})),
    "qwen3-moe": ((1, {"tp": 2, "ep": 2}), (2, {"ep": 2}), (1, VPP2), (1, {"cp": 2, "ep": 2})),
    "deepseek-v3": ((1, NO_EXPERTS), (2, {"ep": 2}), (2, {}), (1, {"cp": 2, "ep": 2}), (1, VPP2)),
    "glm4-moe": ((1, {"tp": 2, "etp": 2}), (1, NO_EXPERTS), (1, VPP2)),
}

pytestmark = pytest.mark.slow
LR = 2e-5  # with far more the same few samples are all clipped after some steps
# Samples' gradients cancel, and leave rounding of the size of the largest. Before any change of
# layout two of them are 9e-7 apart already (glm4-moe).
BOUNDS = {"loss/total": 1e-6, "grad_norm": 2e-6}


def settings(model: str, layout: Layout, path: Path) -> dict[str, Any]:
    """Those of a learner."""
    found: dict[str, Any] = Case(model, *layout).config(path).model_dump()
    found["learner"]["optimizer"]["lr"] = LR
    return found


def batches(refs: list[SampleRef], dp: int, count: int) -> list[MinibatchPlan]:
    """Minibatches of five of the samples, the same ones for every `dp`, in other orders."""
    plans = []
    for step in range(count):
        some = random.Random(step).sample(refs, 5)
        shares = [some[rank::dp] for rank in range(dp)]
        plans.append(
            recorded.scheduled(tuple(tuple(tuple(s[i::2]) for i in range(2)) for s in shares))
        )
    return plans


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, megatron_engine: Engine) -> Path:
    """Where two ranks have written the answers of all learners of all models."""
    made = tmp_path_factory.mktemp("resume")
    cases = []
    for model, chain in CHAINS.items():
        path = made / f"{model}-model"
        samples = Oracle(model, path, tied=model == "llama").samples
        refs, count = [ref for _, ref in samples], STEPS * len(chain)
        cases.append(
            {
                "name": model,
                "straight": settings(model, STRAIGHT[model], path),
                "chain": [settings(model, layout, path) for layout in chain],
                "plans": {dp: [asdict(plan) for plan in batches(refs, dp, count)] for dp in (1, 2)},
                "sequences": [(s.prompt_ids, s.response_ids) for s, _ in samples],
            }
        )
    (made / "cases.json").write_text(json.dumps(cases))
    megatron_engine.run("tests.learner.resume_ranks", made / "cases.json", ranks=2)
    return made


@pytest.mark.parametrize("model", CHAINS)
def test_steps_and_logprobs_after_each_change_of_layout_are_those_of_the_run_that_never_stopped(
    folder: Path, model: str
) -> None:
    answers = json.loads((folder / f"{model}.json").read_text())
    straight, chain = answers["straight"], answers["chain"]
    worst = dict.fromkeys(BOUNDS, 0.0)
    largest = max(step["grad_norm"] for steps in straight["steps"] for step in steps)
    for mine, theirs in zip(chain["steps"], straight["steps"], strict=True):
        for found, expected in zip(mine, theirs, strict=True):
            assert found["lr"] == expected["lr"]
            scale = {"loss/total": 1.0, "grad_norm": largest}
            for name, size in scale.items():
                worst[name] = max(worst[name], abs(found[name] - expected[name]) / size)
    print(f"{model}: {worst}")
    assert all(worst[name] < bound for name, bound in BOUNDS.items()), worst
    for mine, theirs in zip(chain["logprobs"], straight["logprobs"], strict=True):
        for found, expected in zip(mine, theirs, strict=True):
            assert found == pytest.approx(expected, abs=2e-5)


@pytest.mark.parametrize("model", CHAINS)
def test_weights_and_moments_at_the_end_are_those_of_the_run_that_never_stopped(
    folder: Path, model: str
) -> None:
    straight, chain = (
        saved_tensors(folder / f"{model}-{name}", tiny_models.VOCAB_SIZE)
        for name in ("straight", "chain")
    )
    assert straight.keys() == chain.keys()
    assert any("exp_avg" in name for name in straight)
    worst = max((float((chain[name] - straight[name]).abs().max()), name) for name in straight)
    print(f"{model}: {worst}")
    assert worst[0] < 5e-5, worst
