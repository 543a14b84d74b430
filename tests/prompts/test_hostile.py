"""Prompt files and tokenizers that are broken in any way are refused by file and line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megarl.config.schema import Config
from megarl.errors import DataError, ModelError
from megarl.prompts.dataset import load_prompts
from megarl.prompts.tokenizer import load_tokenizer
from tests.hostile import SEEDED, anything, deep, hurt
from tests.prompts.tiny_model import make_model

ROW = {"prompt": "1+1=", "question": "1+1=", "answer": "#### 2", "more": {"level": [1, "é"]}}
TURNS = [{"role": "user", "content": "hello"}]


@pytest.fixture(scope="module")
def whole_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("hostile") / "model")


def read(model: Path, text: bytes, kind: str) -> None:
    """Prompts with texts that can be tokenized, or an error that names the file."""
    path = model.parent / "rows.jsonl"
    path.write_bytes(text)
    prompts: dict[str, Any] = {"path": str(path), "format": kind}
    config = Config.model_validate({"actor": {"model": str(model)}, "prompts": prompts})
    try:
        found = load_prompts(config, load_tokenizer(model))
    except DataError as error:
        assert str(path) in str(error)
        assert len(str(error)) < 5000
        return
    for prompt in found:
        assert prompt.prompt_ids and prompt.answer.encode()


kinds = st.sampled_from(["jsonl", "gsm8k"])


@SEEDED
@given(hurt(ROW), kinds)
def test_any_row_is_read_or_refused_by_its_line(whole_model: Path, row: Any, kind: str) -> None:
    good = json.dumps(ROW)
    read(whole_model, f"{good}\n{json.dumps(row)}\n".encode(), kind)


@SEEDED
@given(st.binary(max_size=40), st.integers(0, 80), kinds)
def test_any_bytes_in_a_prompt_file_are_read_or_refused(
    whole_model: Path, bad: bytes, at: int, kind: str
) -> None:
    good = json.dumps(ROW, ensure_ascii=False).encode()
    read(whole_model, good[:at] + bad + good[at:], kind)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        pytest.param('{"prompt": ' + deep() + "}", "nested more than", id="too deep to read"),
        pytest.param(
            '{"prompt": "a", "answer": "b", "x": ' + deep(40) + "}",
            "nested more than",
            id="too deep to score",
        ),
        pytest.param('{"prompt": "a", "answer": ' + "9" * 5000 + "}", "has thousands", id="digits"),
        pytest.param(r'{"prompt": "\ud83d", "answer": "b"}', "half a character", id="half"),
        pytest.param('{"prompt": "a", "answer": NaN}', "no number", id="NaN"),
        pytest.param('{"prompt": "a", "answer": 1e999}', "no number", id="infinite"),
    ],
)
def test_row_that_json_allows_and_nothing_can_use_is_named(
    whole_model: Path, text: str, found: str
) -> None:
    path = whole_model.parent / "one.jsonl"
    path.write_text(text + "\n")
    config = Config.model_validate(
        {"actor": {"model": str(whole_model)}, "prompts": {"path": str(path)}}
    )
    with pytest.raises(DataError, match=f"line 1: .*{found}"):
        load_prompts(config, load_tokenizer(whole_model))


def tokenizer_of(folder: Path, name: str, content: bytes) -> None:
    """A tokenizer that encodes and renders, or ModelError naming the folder."""
    make_model(folder)
    (folder / name).write_bytes(content)
    try:
        tokenizer = load_tokenizer(folder)
        tokenizer.encode("hello")
        tokenizer.chat(TURNS)
    except ModelError as error:
        assert str(folder) in str(error)


SETTINGS = {
    "chat_template": [{"name": "default", "template": "{{ messages[0].content }}"}],
    "bos_token": {"content": "<bos>"},
    "eos_token": "<|im_end|>",
}


@SEEDED
@given(hurt(SETTINGS))
def test_any_settings_of_a_tokenizer_are_read_or_refused(tmp_path: Path, values: Any) -> None:
    tokenizer_of(tmp_path / "m", "tokenizer_config.json", json.dumps(values).encode())


@SEEDED
@given(st.data())
def test_any_tokenizer_is_read_or_refused(whole_model: Path, data: st.DataObject) -> None:
    good = json.loads((whole_model / "tokenizer.json").read_text())
    good["model"]["vocab"] = {"a": 0, "b": 1}
    good["model"]["merges"] = []
    broken = data.draw(hurt(good) | anything)
    tokenizer_of(whole_model.parent / "m", "tokenizer.json", json.dumps(broken).encode())


@pytest.mark.parametrize(
    "template",
    [
        "{{ 1 / 0 }}",
        "{% for i in range(10**9) %}x{% endfor %}",
        "{{ messages[0].content.no_such() }}",
        "{{ messages[99].role }}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{{ " + "(" * 2000 + "1" + ")" * 2000 + " }}",
        "{% for %}",
        b"\xff\xfe",
    ],
)
def test_template_that_fails_in_any_way_names_the_model(
    tmp_path: Path, template: str | bytes
) -> None:
    content = template if isinstance(template, bytes) else template.encode()
    folder = make_model(tmp_path / "m")
    (folder / "chat_template.jinja").write_bytes(content)
    with pytest.raises(ModelError, match=str(folder)):
        load_tokenizer(folder).chat(TURNS)
