"""Saving beside training: the state of one moment, one save at a time, and no error is lost."""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.learner import random_model, recorded, tiny_models
from tests.learner.saved_tensors import saved_tensors
from tests.megatron_engine import Engine

# A router's bias, which changes too, lies in memory of its own. The other has a critic.
CASES: dict[str, dict[str, Any]] = {
    "deepseek-v3": {
        "learner": {
            "parallel": {"ep": 2},
            "precision": {"params": "fp32"},
            "transformer_config": {"moe_router_bias_update_rate": 0.1},
        },
    },
    "critic": {
        "learner": {"parallel": {"tp": 2}, "precision": {"params": "bf16"}},
        "advantage": {"estimator": "gae"},
    },
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, megatron_engine: Engine) -> Path:
    """Where two ranks have saved, and written what they saw."""
    made = tmp_path_factory.mktemp("saving")
    tiny_models.make("deepseek-v3", made / "deepseek-v3-model")
    random_model.write(made / "critic-model")
    vocabularies = {"deepseek-v3": tiny_models.VOCAB_SIZE, "critic": 300}
    cases = []
    for name, more in CASES.items():
        vocab = vocabularies[name]
        uniform = -math.log(vocab)
        groups = recorded.record(made / name, vocab, lambda sample, u=uniform: [u] * 99)
        dp = 2 if name == "deepseek-v3" else 1
        plan = asdict(recorded.plan([ref for _, ref in groups], dp))
        config = {
            "actor": {"model": str(made / f"{name}-model")},
            "placement": {"learner_gpus": 2},
            **more,
        }
        cases.append({"name": name, "config": config, "plan": plan})
    (made / "cases.json").write_text(json.dumps(cases))
    megatron_engine.run("tests.learner.saving_ranks", made / "cases.json", ranks=2)
    return made


def seen(folder: Path, case: str) -> dict[str, Any]:
    return dict(json.loads((folder / f"{case}.json").read_text()))


PARTS = ["deepseek-v3{}", "critic{}", "critic{}-critic"]


@pytest.mark.parametrize("part", PARTS)
def test_optimizer_state_that_is_copied_once_is_what_megatron_copies(
    folder: Path, part: str
) -> None:
    once, plain = (saved_tensors(folder / part.format(n), 10000) for n in ("-waited", "-plain"))
    assert once.keys() == plain.keys() and any("exp_avg_sq" in name for name in once)
    assert [name for name in once if not torch.equal(once[name], plain[name])] == []


@pytest.mark.parametrize("part", PARTS)
def test_what_is_written_after_a_step_is_the_state_from_before_it(folder: Path, part: str) -> None:
    waited, beside = (
        saved_tensors(folder / part.format(name), 10000) for name in ("-waited", "-beside")
    )
    assert waited.keys() == beside.keys()
    assert [name for name in waited if not torch.equal(waited[name], beside[name])] == []
    later = saved_tensors(folder / part.format("-full"), 10000)
    assert [name for name in waited if not torch.equal(waited[name], later[name])]


@pytest.mark.parametrize("case", CASES)
def test_save_under_way_is_no_checkpoint_and_a_second_one_is_refused(
    folder: Path, case: str
) -> None:
    found = seen(folder, case)
    assert found["under way"] and found["ended"] and not found["there before its end"]
    assert "another save is under way" in found["second"]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("rank", [0, 1])
def test_full_disk_is_told_once_at_the_next_verb_and_leaves_nothing(
    folder: Path, case: str, rank: int
) -> None:
    found = seen(folder, case)
    told = found["full"][f"rank {rank}"]
    assert f"learner rank {rank}: {folder}/{case}-full.partial: cannot be written" in told
    assert "File too large" in told
    assert found["full"][f"rank {rank} again"] == "nothing was refused"
    assert found["left"] == []
    assert found["loaded"] == 2


@pytest.mark.parametrize("case", CASES)
def test_folder_that_cannot_be_made_is_told_before_anything_is_copied(
    folder: Path, case: str
) -> None:
    told = seen(folder, case)["below a file"]
    assert f"{case}-file/v1.partial: cannot be written (Not a directory)" in told
