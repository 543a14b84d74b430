"""A folder with a tiny model, a prompt file and a configuration that can run."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from megarl.actor.parameters import parameter_table
from megarl.actor.shape import read_shape
from megarl.config.load import load_config
from megarl.config.schema import Config
from megarl.errors import ConfigError

MODEL = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "head_dim": 8,
    "hidden_size": 16,
    "intermediate_size": 64,
    "max_position_embeddings": 64,
    "num_attention_heads": 4,
    "num_hidden_layers": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "vocab_size": 32,
}

EXPERTS = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "moe_intermediate_size": 64,
    "norm_topk_prob": True,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "tie_word_embeddings": False,
}

SETTINGS = """\
[actor]
model = "model"

[prompts]
path = "prompts.jsonl"
max_prompt_tokens = 16

[rollout]
sampling = { max_new_tokens = 16 }
"""


@dataclass(frozen=True)
class Place:
    """The folder, and what is done with it."""

    folder: Path

    @property
    def file(self) -> Path:
        return self.folder / "run.toml"

    @property
    def model(self) -> Path:
        return self.folder / "model"

    def load(self, *overrides: str) -> Config:
        return load_config(self.file, overrides)

    def violations(self, *overrides: str) -> list[str]:
        with pytest.raises(ConfigError) as caught:
            self.load(*overrides)
        return caught.value.violations

    def violation(self, *overrides: str) -> str:
        found = self.violations(*overrides)
        assert len(found) == 1, found
        return found[0]

    def change_model(self, **fields: object) -> None:
        """Another config.json, with weights of its shape."""
        (self.model / "config.json").write_text(json.dumps({**MODEL, **fields}))
        table = parameter_table(read_shape(self.model))
        weights = {
            name: np.zeros(p.shape[1:] if p.stacked else p.shape, np.float32)
            for p in table
            for name in p.stored_names()
        }
        save_file(weights, self.model / "model.safetensors", {"format": "pt"})


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Place:
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    found = Place(tmp_path)
    found.model.mkdir()
    found.change_model()
    (found.model / "tokenizer.json").write_text("{}")
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n')
    found.file.write_text(SETTINGS)
    return found


@pytest.fixture
def append(place: Place) -> Callable[[str], None]:
    """Adds text to the configuration file."""

    def add(text: str) -> None:
        place.file.write_text(f"{place.file.read_text()}\n{text}\n")

    return add
