"""Training with the state sent away around every step is training, bit for bit; TP2 x DP2."""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from tests.learner import random_model, recorded
from tests.learner.parity import Case, Oracle
from tests.learner.parity_cases import OVERLAPS, VPP2
from tests.megatron_engine import Engine

# In fp32 the optimizer's masters are views of the weights. The last has a critic.
CASES = {"fp32": {}, "bf16": {}, "critic": {"advantage": {"estimator": "gae"}}}
RANKS = range(4)


Seen = dict[str, list[dict[str, Any]]]


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory, megatron_engine: Engine) -> Seen:
    """What each rank saw in each case of a dense model."""
    folder = tmp_path_factory.mktemp("offload")
    random_model.write(folder / "model")
    vocab = random_model.CONFIG["vocab_size"]
    made = recorded.record(folder, vocab, lambda sample: [-math.log(vocab)] * 99)
    cases = []
    for name, more in CASES.items():
        config = {
            "actor": {"model": str(folder / "model")},
            "learner": {
                "parallel": {"tp": 2},
                "precision": {"params": "fp32" if name == "critic" else name},
                "optimizer": {"lr": 1e-3, "warmup_steps": 2},
            },
            "kl": {"coef": 0.1},
            "placement": {"learner_gpus": 4},
            "weight_sync": {"shared_weights": False},
            **more,
        }
        plan = recorded.plan([ref for _, ref in made], 2)
        cases.append({"name": name, "config": config, "plan": asdict(plan)})
    return run_cases(folder, cases, megatron_engine)


def run_cases(folder: Path, cases: list[dict[str, Any]], engine: Engine) -> Seen:
    """What each of four ranks saw in each case."""
    for case in cases:
        (folder / case["name"]).mkdir()
    (folder / "cases.json").write_text(json.dumps(cases))
    engine.run("tests.learner.offload_ranks", folder, ranks=len(RANKS))
    return {
        case["name"]: [
            json.loads((folder / f"{case['name']}.{rank}.json").read_text()) for rank in RANKS
        ]
        for case in cases
    }


@pytest.mark.parametrize("case", CASES)
def test_losses_weights_and_optimizer_are_those_of_a_run_that_sends_nothing_away(
    seen: Seen, case: str
) -> None:
    assert_equal(seen[case])


@pytest.mark.slow
def test_experts_and_chunks_losses_weights_and_optimizer_are_those_of_a_run_that_sends_nothing_away(
    tmp_path: Path, megatron_engine: Engine
) -> None:
    cases = []
    layouts = {
        "qwen3-moe": (2, {"tp": 2, "ep": 2}),
        "deepseek-v3": (2, {"tp": 2, "ep": 2}),
        "qwen3": (2, {**VPP2, **OVERLAPS}),
    }
    for family, (dp, sizes) in layouts.items():
        refs = [ref for _, ref in Oracle(family, tmp_path / f"{family}-model").samples]
        config = Case(family, dp, sizes).config(tmp_path / f"{family}-model")
        given = {**config.model_dump(), "weight_sync": {"shared_weights": False}}
        plan = asdict(recorded.plan(refs, 2))
        cases.append({"name": family, "config": given, "plan": plan})
    for ranks in run_cases(tmp_path, cases, megatron_engine).values():
        assert_equal(ranks)
        assert all(rank["same objects"] and rank["views of the buffers"] for rank in ranks)


def assert_equal(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        assert rank["same metrics"]
        assert rank["differing"] == []
        assert any(name.startswith("exp_avg_sq") for name in rank["names"])
        assert len(set(rank["trained"])) == 3  # the steps did something


@pytest.mark.parametrize("case", CASES)
def test_parameters_stay_the_same_objects_and_views_of_megatrons_buffer(
    seen: Seen, case: str
) -> None:
    for rank in seen[case]:
        assert rank["same objects"]
        assert rank["views of the buffers"]


@pytest.mark.parametrize("case", CASES)
def test_nothing_of_the_state_is_on_the_device_while_it_is_away(seen: Seen, case: str) -> None:
    for rank in seen[case]:
        here = rank["bytes"]
        assert here["none"] == [0, 0, 0]
        assert here["all"][0] == here["all"][1] == here["all"][2] > 2 * here["weights"][0]
        assert len(set(here["weights"])) == 1
        assert rank["memory"]["learner_parked_bytes"] >= rank["memory"]["learner_state_bytes"] / 2


def test_generation_of_the_weights_rises_each_time_they_come_back(
    seen: Seen,
) -> None:
    once = 3 + 3 + 1 + 1  # steps, looks at checksums, a save, the end
    assert {rank["generation"] for rank in seen["fp32"]} == {once}


def test_score_with_a_critic_names_the_part_that_has_its_weights(seen: Seen) -> None:
    told = seen["critic"][0]["told"]["score"]
    parts = ["optimizer", "weights"]
    assert told == (
        f"LearnerError: score: the learner's optimizer and weights are offloaded; call "
        f"onload({parts}) first"
    )


def test_verbs_name_the_parts_that_are_away(seen: Seen) -> None:
    told = seen["fp32"][3]["told"]
    away = "LearnerError: {}: the learner's {} offloaded; call onload({}) first"
    everything = ["gradients", "optimizer", "weights"]
    for verb in ("score", "logprobs", "publish"):
        assert told[verb] == away.format(verb, "weights are", ["weights"])
    for verb in ("save", "load"):
        assert told[verb] == away.format(verb, "optimizer and weights are", everything[1:])
    assert told["step"] == away.format(
        "step", "gradients and optimizer and weights are", everything
    )
    assert told["misses one"] == away.format("step", "gradients and optimizer are", everything[:2])
    assert "weights are offloaded already" in told["twice"]
    assert "['moments'] are not parts" in told["unknown"]
