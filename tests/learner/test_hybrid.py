"""An optimizer whose state is in host memory in part learns what one on the device does."""

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

ROOT = Path(__file__).parents[2]
CASES = {"bf16, half": ("bf16", 0.5), "bf16, all": ("bf16", 1.0), "fp32, half": ("fp32", 0.5)}
RANKS = range(2)


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    """What each rank saw in each case."""
    folder = tmp_path_factory.mktemp("hybrid")
    random_model.write(folder / "model")
    vocab = random_model.CONFIG["vocab_size"]
    made = recorded.record(folder, vocab, lambda sample: [-math.log(vocab)] * 99)
    cases = []
    for name, (params, fraction) in CASES.items():
        config = {
            "actor": {"model": str(folder / "model")},
            "learner": {
                "precision": {"params": params},
                "optimizer": {"lr": 1e-3, "warmup_steps": 2},
            },
            "placement": {"learner_gpus": 2},
            "weight_sync": {"shared_weights": False},
        }
        plan = asdict(recorded.plan([ref for _, ref in made], 2))
        case = {"name": name, "config": config, "plan": plan, "fraction": fraction}
        cases.append({**case, "world_size": 2})
    (folder / "cases.json").write_text(json.dumps(cases))
    script = str(Path(__file__).with_name("hybrid_ranks.py"))
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [sys.executable, *torchrun, script, str(folder)],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0, done.stderr[-6000:]
    return {
        name: [json.loads((folder / f"{name}.{rank}.json").read_text()) for rank in RANKS]
        for name in CASES
    }


@pytest.mark.parametrize("case", CASES)
def test_steps_are_those_of_an_optimizer_on_the_device(
    seen: dict[str, list[dict[str, Any]]], case: str
) -> None:
    for rank in seen[case]:
        expected, found = rank["metrics"]
        for one, other in zip(expected, found, strict=True):
            assert one.keys() == other.keys()
            assert all(math.isclose(one[n], other[n], rel_tol=1e-4, abs_tol=1e-6) for n in one)
        print(f"{case}: weights off by {rank['off']:.1e}")
        assert rank["off"] < (1e-6 if CASES[case][0] == "fp32" else 1e-4)
        assert len({step["loss/total"] for step in expected}) == len(expected)  # it learned


@pytest.mark.parametrize("case", CASES)
def test_share_that_was_asked_for_is_in_host_memory(
    seen: dict[str, list[dict[str, Any]]], case: str
) -> None:
    for rank in seen[case]:
        inside, total = rank["hosted"]
        assert total > 0
        assert CASES[case][1] * total <= inside <= total
