"""Recomputed activations change no gradient, and are not kept."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from tests.learner import recorded
from tests.learner.parity import WEIGHTS, Case, Oracle

ROOT = Path(__file__).parents[2]

FULL = {"granularity": "full"}
DENSE = {
    "none": {},
    "full": FULL,
    "full, 3 layers": {**FULL, "num_layers": 3},
    "full, 1 layer of a chunk": {**FULL, "method": "block"},
    "core_attn": {"granularity": "selective"},
    "mlp": {"granularity": "selective", "modules": ["mlp"]},
}
LATENT = {
    "none": {},
    "full": FULL,
    "core_attn, mla_up_proj, mlp, moe": {
        "granularity": "selective",
        "modules": ["core_attn", "mla_up_proj", "mlp", "moe"],
    },
    "shared_experts": {"granularity": "selective", "modules": ["shared_experts"]},
}
CASES: dict[str, tuple[Case, dict[str, dict[str, Any]]]] = {
    "qwen3": (Case("qwen3"), DENSE),
    "deepseek-v3": (Case("deepseek-v3"), LATENT),
}
VARIANTS = [(case, name) for case, (_, variants) in CASES.items() for name in variants]


class Seen:
    """What the ranks of all cases found, in one torchrun."""

    def __init__(self, folder: Path) -> None:
        oracles = {
            model: Oracle(model, folder / model) for model in {c.model for c, _ in CASES.values()}
        }
        self.configs: dict[tuple[str, str], Any] = {}
        written = []
        for name, (case, variants) in CASES.items():
            refs = [ref for _, ref in oracles[case.model].samples]
            self.plan = recorded.plan(refs, case.dp)
            for variant, recompute in variants.items():
                config = case.config(folder / case.model).model_dump()
                config["learner"]["recompute"] = recompute
                config["weight_sync"]["shared_weights"] = False  # it would take whole pages
                self.configs[name, variant] = config
            written.append(
                {
                    "name": name,
                    "world_size": case.world_size,
                    "variants": {v: self.configs[name, v] for v in variants},
                    "plan": asdict(self.plan),
                    "weights": WEIGHTS,
                }
            )
        (folder / "cases.json").write_text(json.dumps(written))
        script = str(Path(__file__).with_name("memory_ranks.py"))
        ranks = str(max(case.world_size for case, _ in CASES.values()))
        torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", ranks)
        done = subprocess.run(
            [sys.executable, *torchrun, script, str(folder)],
            capture_output=True,
            text=True,
            check=False,
            timeout=560,
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        )
        assert done.returncode == 0, done.stderr[-6000:]
        self._folder = folder

    def of(self, case: str, variant: str) -> list[dict[str, Any]]:
        """By rank."""
        ranks = range(CASES[case][0].world_size)
        read = [json.loads((self._folder / f"{case}.{rank}.json").read_text()) for rank in ranks]
        return [found[variant] for found in read]


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> Seen:
    """The learners of all cases."""
    return Seen(tmp_path_factory.mktemp("memory"))


@pytest.mark.parametrize(("case", "variant"), [v for v in VARIANTS if v[1] != "none"])
def test_gradients_with_recomputed_activations_are_those_without(
    seen: Seen, case: str, variant: str
) -> None:
    for rank in seen.of(case, variant):
        print(f"{case}, {variant}: {rank['off']:.1e}")
        assert rank["off"] < 1e-6


@pytest.mark.parametrize(("case", "variant"), [v for v in VARIANTS if v[1] != "none"])
def test_recomputed_activations_are_not_kept(seen: Seen, case: str, variant: str) -> None:
    pairs = zip(seen.of(case, variant), seen.of(case, "none"), strict=True)
    for found, everything in pairs:
        print(f"{case}, {variant}: {found['saved']} of {everything['saved']} bytes")
        assert found["saved"] < everything["saved"]
