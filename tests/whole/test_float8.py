"""Whole runs with servers of float8: they start empty, every sync is quantized and proved."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.reshard.test_sglang_loaders import QWEN3, large
from tests.weight_sync import family_models
from tests.whole.conftest import QUICKSTART, Run
from tests.whole.test_experts import REWARD

SIZES: dict[str, Any] = {"vocab_size": 64, "max_positions": 256}
SHAPES = {
    "qwen3": large(QWEN3, **SIZES),
}
RUNS = {
    "qwen3": "--learner.parallel.tp 2",
}


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_three_steps_with_float8_servers_learn_and_every_sync_is_proved(
    quickstart: Callable[..., Run], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    family = name
    monkeypatch.setitem(family_models.SHAPES, family, SHAPES[family])
    model = family_models.save(tmp_path / "model", family, seed=4)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(QUICKSTART.with_name("quickstart") / "model" / file, model / file)
    (tmp_path / "reward.py").write_text(REWARD)
    settings = (
        f"--actor.model {model} --loop.versions 3 --rollout.prompts_per_step 8 --reward.kind "
        f"function --reward.function {tmp_path / 'reward.py'}:spread "
        f"--rollout.precision.weights fp8 {RUNS[name]}"
    )
    run = quickstart(*settings.split())
    rows = run.finish(timeout_s=570)
    assert [row["step"] for row in rows] == [0, 1, 2]
    for row in rows:
        print({name: row[name] for name in row if name.startswith(("mismatch", "weight_sync"))})
        assert 0 < row["mismatch/mean_abs_logprob"] < 0.25
        assert row["weight_sync/verified_servers"] == 1
        assert 0.02 < row["weight_sync/quantization_error_mean"] < 0.04
        assert row["weight_sync/quantization_error"] >= row["weight_sync/quantization_error_mean"]
        assert row["weight_sync/quantization_layer"] in range(SHAPES[family].num_layers)
        assert row["weight_sync/probe_max_abs_logprob"] > 0
        assert row["grad_norm"] > 0
    assert "mode=exact " in (run.dir / "logs" / "learner.log").read_text()
    assert not run.processes()
