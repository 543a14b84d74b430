"""Whole runs with servers of float8: they start empty, every sync is quantized and proved."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open

from tests.reshard.test_sglang_loaders import DEEPSEEK, LATENT, QWEN3, QWEN3_MOE, large
from tests.weight_sync import family_models
from tests.whole.conftest import QUICKSTART, Run
from tests.whole.test_experts import REWARD

SIZES: dict[str, Any] = {"vocab_size": 64, "max_positions": 256}
SHAPES = {
    "qwen3": large(QWEN3, **SIZES),
    "qwen3_moe": large(QWEN3_MOE, **SIZES),
    "deepseek": large(DEEPSEEK, num_heads=4, mla=LATENT, **SIZES),
}
RUNS = {
    "qwen3": "--learner.parallel.tp 2",
    "qwen3 hf": "--learner.parallel.tp 2 --weight_sync.mode hf --learner.precision.params fp32",
    "qwen3 disk": "--learner.parallel.tp 2 --weight_sync.mode disk",
    "qwen3_moe": "--learner.parallel.tp 1 --learner.parallel.ep 2 --placement.learner_gpus 2 "
    "--rollout.parallel.tp 2 --rollout.parallel.ep 2",
    "deepseek": "--learner.parallel.tp 1 --learner.parallel.pp 2 "
    "--learner.parallel.pipeline_layout Et|ttL --rollout.parallel.tp 2",
}


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_three_steps_with_float8_servers_learn_and_every_sync_is_proved(
    quickstart: Callable[..., Run], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    family, _, mode = name.partition(" ")
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
    if mode == "disk":
        settings += f" --weight_sync.disk_dir {tmp_path / 'shared'}"
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
    assert f"mode={mode or 'exact'} " in (run.dir / "logs" / "learner.log").read_text()
    assert not run.processes()
    if mode == "disk":
        (folder,) = (tmp_path / "shared" / "quickstart").iterdir()
        config = json.loads((folder / "config.json").read_text())
        assert config["quantization_config"]["weight_block_size"] == [128, 128]
        with safe_open(folder / "model.safetensors", "pt") as file:
            scales = file.get_slice("model.layers.0.mlp.down_proj.weight_scale_inv")
            assert (scales.get_shape(), scales.get_dtype()) == ([2, 4], "F32")
            weight = file.get_slice("model.layers.0.mlp.down_proj.weight")
            assert weight.get_dtype() == "F8_E4M3"
