"""Megatron's forward pass on converted checkpoints of every family: the logits of transformers."""

from __future__ import annotations

from pathlib import Path

import torch

from megarl.cli import main
from megarl.reshard.mesh import LearnerMesh
from tests.convert import models
from tests.convert.logits import Asked, assert_logits_agree, by_transformers
from tests.megatron_engine import Engine
from tests.reshard.models import random_weights

LAYOUTS: dict[str, tuple[LearnerMesh, int | None]] = {
    "llama": (LearnerMesh(tp=2), None),
    "llama-tied": (LearnerMesh(pp=2), None),
    "qwen2": (LearnerMesh(pp=2), None),
    "qwen3": (LearnerMesh(tp=2), None),
    "qwen3-moe": (LearnerMesh(tp=2, ep=2), None),
    "deepseek-v3": (LearnerMesh(dp=2, ep=2), None),
    "moonlight": (LearnerMesh(pp=2), 1),
    "glm4-moe": (LearnerMesh(tp=2, etp=2), None),
}


def test_logits_of_megatron_on_what_was_converted_are_those_of_transformers(
    megatron_engine: Engine, tmp_path: Path
) -> None:
    asked = []
    for family, (mesh, first) in LAYOUTS.items():
        shape, source = models.FAMILIES[family], tmp_path / family
        models.write(source, shape, "F32", values=random_weights(shape))
        made = tmp_path / f"{family}-made"
        assert main(["convert", str(source), str(made)]) == 0
        back = tmp_path / f"{family}-back"
        assert main(["convert", str(made), str(back)]) == 0
        ours, theirs = (torch.from_numpy(by_transformers(f)) for f in (back, source))
        assert torch.equal(ours, theirs), family
        asked.append(Asked(source, made, mesh, first))
    (tmp_path / "asked").mkdir()
    assert_logits_agree(megatron_engine, tmp_path / "asked", asked)
