"""A rank is killed amid saving and exporting: the next start finds only what is whole."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from tests.learner import random_model
from tests.megatron_engine import Engine

MOMENTS = 280  # each rank makes more changes of files and folders than that


@pytest.mark.parametrize("kills", [3, pytest.param(20, marks=pytest.mark.slow)])
def test_every_start_after_a_kill_finds_whole_folders_only_and_loses_none(
    tmp_path: Path, megatron_engine: Engine, kills: int
) -> None:
    model, run = random_model.write(tmp_path / "model"), tmp_path / "run"
    draw = random.Random(kills)

    def start(rank: int = 0, moment: int = 0) -> list[int]:
        told = megatron_engine.run("tests.learner.kill_ranks", model, run, rank, moment, ranks=2)
        return list(json.loads(told.splitlines()[-1]))

    for _ in range(kills):
        rank, moment = draw.randrange(2), draw.randint(1, MOMENTS)
        with pytest.raises(AssertionError, match=f"rank {rank} .* ended with -9"):
            start(rank, moment)
    assert min(start()) > MOMENTS
