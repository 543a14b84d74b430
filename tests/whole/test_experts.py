"""The same loop with routed experts and latent attention: expert-parallel ranks, real servers."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from tests.weight_sync import family_models
from tests.whole.conftest import QUICKSTART, Run

REWARD = """
def spread(response: str, answer: str, facts: dict) -> float:
    return float(len(set(response)))
"""
LAYOUTS = {
    "qwen3_moe": "--learner.parallel.tp 1 --learner.parallel.ep 2 --placement.learner_gpus 2",
    "deepseek": "--learner.parallel.tp 2 --learner.parallel.ep 2 --rollout.parallel.tp 2",
    "glm": "--learner.parallel.tp 1 --learner.parallel.pp 2 "
    "--learner.parallel.pipeline_layout Et|ttL --rollout.parallel.tp 2 --rollout.parallel.ep 2",
}


@pytest.mark.slow
@pytest.mark.parametrize("family", LAYOUTS)
def test_three_steps_of_a_family_with_experts_agree_on_log_probs_and_every_sync_is_proved(
    quickstart: Callable[..., Run], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str
) -> None:
    tokenizer = QUICKSTART.with_name("quickstart") / "model"
    shape = replace(family_models.SHAPES[family], vocab_size=64, max_positions=256)
    monkeypatch.setitem(family_models.SHAPES, family, shape)
    model = family_models.save(tmp_path / "model", family, seed=4)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tokenizer / name, model / name)
    (tmp_path / "reward.py").write_text(REWARD)
    settings = (
        f"--actor.model {model} --loop.versions 3 --rollout.prompts_per_step 8 --reward.kind "
        f"function --reward.function {tmp_path / 'reward.py'}:spread {LAYOUTS[family]}"
    )
    run = quickstart(*settings.split())
    rows = run.finish()
    assert [row["step"] for row in rows] == [0, 1, 2]
    for row in rows:
        print({name: row[name] for name in row if name.startswith(("mismatch", "weight_sync"))})
        assert row["mismatch/mean_abs_logprob"] < 1e-4
        assert row["weight_sync/verified_servers"] == 1
        assert row["weight_sync/bytes"] == row["weight_sync/minimum_bytes"] > 0
        assert row["grad_norm"] > 0
    assert not run.processes()
