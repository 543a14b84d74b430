"""What a run reads is checked before an engine starts."""

import json
from pathlib import Path

import pytest

from megarl.config.schema import Config
from megarl.controller.training import load_inputs
from megarl.errors import ConfigError
from tests.prompts.tiny_model import make_model


def test_stop_text_that_is_not_one_token_is_refused_with_the_inputs(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps({"prompt": "hi", "answer": "1"}))
    config = Config.model_validate(
        {
            "actor": {"model": str(make_model(tmp_path / "m"))},
            "prompts": {"path": str(rows)},
            "rollout": {"sampling": {"stop": ["hello"]}},
        }
    )
    with pytest.raises(ConfigError, match="'hello' is .* must be one token"):
        load_inputs(config)
