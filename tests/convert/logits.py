"""The logits of real Megatron ranks on converted checkpoints, beside those of transformers."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from megarl.actor.shape import read_shape
from megarl.reshard.mesh import LearnerMesh
from tests.megatron_engine import Engine
from tests.reshard.megatron_cases import TOKENS

BOUND = 1e-5  # of the largest logit, in float32


@dataclass(frozen=True)
class Asked:
    """A Hugging Face folder, what was made of it, and the layout that loads that."""

    source: Path
    made: Path
    mesh: LearnerMesh
    first: int | None = None  # layers of the first stage, where stages are uneven


def assert_logits_agree(engine: Engine, folder: Path, cases: Sequence[Asked]) -> None:
    """All cases are of as many ranks. `folder` is empty."""
    told = [
        {"hf": str(c.source), "made": str(c.made), "mesh": _sizes(c.mesh), "first": c.first}
        for c in cases
    ]
    (folder / "cases.json").write_text(json.dumps(told))
    engine.run("tests.convert.logit_ranks", folder, ranks=cases[0].mesh.size)
    for number, case in enumerate(cases):
        wanted = by_transformers(case.source)
        last = range((case.mesh.pp - 1) * case.mesh.stage_size, case.mesh.size)
        parts = [np.load(folder / f"logits-{number}-{rank}.npy") for rank in last]
        vocab_size = read_shape(case.source).vocab_size
        found = np.concatenate(parts[: case.mesh.tp], axis=-1)[..., :vocab_size]
        assert found.shape == wanted.shape
        apart, largest = float(np.abs(found - wanted).max()), float(np.abs(wanted).max())
        assert apart <= BOUND * largest, (case.source.name, apart / largest)


def by_transformers(folder: Path) -> np.ndarray:
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype="float32", attn_implementation="eager"
    ).eval()
    with torch.no_grad():
        logits: Any = model(torch.tensor(TOKENS)).logits
    return logits.float().numpy()


def _sizes(mesh: LearnerMesh) -> dict[str, int]:
    return {name: size for name, size in asdict(mesh).items() if isinstance(size, int)}
