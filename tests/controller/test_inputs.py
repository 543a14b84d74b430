"""What a run reads is checked before an engine starts."""

import json
from pathlib import Path
from typing import cast

import pytest

from megarl.config.schema import Config
from megarl.controller.training import Inputs, load_inputs, note_on
from megarl.errors import ConfigError
from megarl.prompts.tokenizer import Tokenizer
from megarl.types import Prompt
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


@pytest.mark.parametrize(
    ("num_prompts", "words"),
    [
        (8, ""),
        (4, "a step has each 2 times"),
        (3, "there are 3 prompts: a step has each at least 2"),
    ],
)
def test_step_that_asks_for_more_prompts_than_there_are_is_told_of(
    num_prompts: int, words: str
) -> None:
    config = Config.model_validate({"actor": {"model": "m"}, "rollout": {"prompts_per_step": 8}})
    prompts = tuple(Prompt(str(n), (1,), "", "") for n in range(num_prompts))
    note = note_on(config, Inputs(cast(Tokenizer, None), prompts, ()))
    assert words in note and bool(note) == bool(words)
