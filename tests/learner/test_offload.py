"""Training with the state sent away around every step is training, bit for bit; TP2 x DP2."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from tests.learner import random_model, recorded

CASES = ("fp32", "bf16")  # in fp32 the optimizer's masters are views of the weights
RANKS = range(4)


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    """What each rank saw in each case, after one torchrun of four ranks."""
    folder = tmp_path_factory.mktemp("offload")
    random_model.write(folder / "model")
    vocab = random_model.CONFIG["vocab_size"]
    made = recorded.record(folder, vocab, lambda sample: [-math.log(vocab)] * 99)
    cases = []
    for name in CASES:
        (folder / name).mkdir()
        config = {
            "actor": {"model": str(folder / "model")},
            "learner": {
                "parallel": {"tp": 2},
                "precision": {"params": name},
                "optimizer": {"lr": 1e-3, "warmup_steps": 2},
            },
            "kl": {"coef": 0.1},
            "placement": {"learner_gpus": 4},
            "weight_sync": {"in_place": False},
        }
        plan = recorded.plan([ref for _, ref in made], 2)
        cases.append({"name": name, "config": config, "plan": asdict(plan)})
    (folder / "cases.json").write_text(json.dumps(cases))
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4"]
    done = subprocess.run(
        [sys.executable, *torchrun, str(Path(__file__).with_name("offload_ranks.py")), str(folder)],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr[-6000:]
    return {
        name: [json.loads((folder / f"{name}.{rank}.json").read_text()) for rank in RANKS]
        for name in CASES
    }


@pytest.mark.parametrize("case", CASES)
def test_losses_weights_and_optimizer_are_those_of_a_run_that_sends_nothing_away(
    seen: dict[str, list[dict[str, Any]]], case: str
) -> None:
    for rank in seen[case]:
        assert rank["same metrics"]
        assert rank["differing"] == []
        assert any(name.startswith("exp_avg_sq") for name in rank["names"])
        assert len(set(rank["trained"])) == 3  # the steps did something


@pytest.mark.parametrize("case", CASES)
def test_parameters_stay_the_same_objects_and_views_of_megatrons_buffer(
    seen: dict[str, list[dict[str, Any]]], case: str
) -> None:
    for rank in seen[case]:
        assert rank["same objects"]
        assert rank["views of the buffers"]


@pytest.mark.parametrize("case", CASES)
def test_nothing_of_the_state_is_on_the_device_while_it_is_away(
    seen: dict[str, list[dict[str, Any]]], case: str
) -> None:
    for rank in seen[case]:
        here = rank["bytes"]
        assert here["none"] == [0, 0, 0]
        assert here["all"][0] == here["all"][1] == here["all"][2] > 2 * here["weights"][0]
        assert len(set(here["weights"])) == 1
        assert rank["memory"]["learner_parked_bytes"] >= rank["memory"]["learner_state_bytes"] / 2


def test_generation_of_the_weights_rises_each_time_they_come_back(
    seen: dict[str, list[dict[str, Any]]],
) -> None:
    once = 3 + 3 + 1 + 1  # steps, looks at checksums, a save, the end
    assert {rank["generation"] for rank in seen["fp32"]} == {once}


def test_verbs_name_the_parts_that_are_away(seen: dict[str, list[dict[str, Any]]]) -> None:
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
