"""Prompt files and tasks: what is read, and defects that name file and line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megarl.config.schema import ActorConfig, Config, PromptsConfig
from megarl.errors import ConfigError, DataError, ModelError
from megarl.prompts.dataset import load_prompts
from megarl.prompts.tokenizer import Tokenizer, load_tokenizer
from megarl.types import Prompt
from tests.prompts.tiny_model import make_model


@pytest.fixture
def tokenizer(model_dir: Path) -> Tokenizer:
    return load_tokenizer(model_dir)


def config(**prompts: Any) -> Config:
    return Config(actor=ActorConfig(model="m"), prompts=PromptsConfig(**prompts))


def write(path: Path, *rows: object) -> str:
    path.write_text("".join(f"{r if isinstance(r, str) else json.dumps(r)}\n" for r in rows))
    return str(path)


def test_jsonl_rows_become_prompts_with_all_their_facts(
    tmp_path: Path, tokenizer: Tokenizer
) -> None:
    path = write(
        tmp_path / "a.jsonl",
        {"prompt": "1+1=", "answer": "2", "level": 3},
        "",
        {"prompt": "2+2=", "answer": 4},
    )
    first, second = load_prompts(config(path=path, suffix="?"), tokenizer)
    assert first == Prompt(
        "a:1",
        tuple(tokenizer.encode("1+1=?")),
        "1+1=?",
        "2",
        {"prompt": "1+1=", "answer": "2", "level": 3},
    )
    assert (second.prompt_id, second.answer) == ("a:3", "4")


def test_gsm8k_answer_is_what_follows_the_mark(tmp_path: Path, tokenizer: Tokenizer) -> None:
    row = {"question": "How many?", "answer": "6*7 = <<6*7=42>>42\n#### 1,042"}
    (prompt,) = load_prompts(
        config(format="gsm8k", path=write(tmp_path / "g.jsonl", row)), tokenizer
    )
    assert (prompt.text, prompt.answer) == ("How many?", "1,042")


def test_chat_template_gets_system_and_user_turns(tmp_path: Path, tokenizer: Tokenizer) -> None:
    path = write(tmp_path / "a.jsonl", {"prompt": "Hi", "answer": ""})
    (prompt,) = load_prompts(config(path=path, template="chat", system="Be brief"), tokenizer)
    assert tokenizer.decode(prompt.prompt_ids, skip_special=False) == (
        "<|im_start|>system\nBe brief<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
        "<|im_start|>assistant\n"
    )


def test_bos_of_the_post_processor_is_put_before_plain_prompts_and_not_before_chats(
    tmp_path: Path,
) -> None:
    tokenizer = load_tokenizer(make_model(tmp_path / "m", bos=True))
    path = write(tmp_path / "a.jsonl", {"prompt": "Hi", "answer": ""})
    (plain,) = load_prompts(config(path=path), tokenizer)
    (chat,) = load_prompts(config(path=path, template="chat"), tokenizer)
    assert plain.prompt_ids[0] == 0 and chat.prompt_ids[0] == 1


@pytest.mark.parametrize(
    ("row", "found"),
    [
        ('{"prompt": ', "not JSON: Expecting value at column 11; each"),
        ("[1]", "a JSON list"),
        ({"question": "x", "answer": "y"}, "'prompt' is missing"),
        ({"prompt": 3, "answer": "y"}, "'prompt' is a int"),
        ({"prompt": "", "answer": "y"}, "'prompt' is empty"),
        ({"prompt": "x"}, "'answer' is missing"),
        ({"prompt": "x", "answer": True}, "'answer' is a bool"),
        ({"prompt": "x" * 100, "answer": "y"}, "100 tokens, more than prompts.max_prompt_tokens"),
    ],
)
def test_bad_row_is_an_error_that_names_file_and_line(
    tmp_path: Path, tokenizer: Tokenizer, row: object, found: str
) -> None:
    path = write(tmp_path / "a.jsonl", {"prompt": "ok", "answer": "1"}, "", row)
    with pytest.raises(DataError, match=f"a.jsonl, line 3: .*{found}"):
        load_prompts(config(path=path, max_prompt_tokens=64), tokenizer)


def test_row_that_is_not_utf8_is_an_error_that_names_the_line(
    tmp_path: Path, tokenizer: Tokenizer
) -> None:
    (tmp_path / "a.jsonl").write_bytes(b'{"prompt": "a", "answer": ""}\n{"prompt": "\xff"}\n')
    with pytest.raises(DataError, match="line 2: not UTF-8"):
        load_prompts(config(path=str(tmp_path / "a.jsonl")), tokenizer)


def test_gsm8k_row_without_mark_is_an_error(tmp_path: Path, tokenizer: Tokenizer) -> None:
    path = write(tmp_path / "g.jsonl", {"question": "x", "answer": "42"})
    with pytest.raises(DataError, match="line 1: 'answer' has no ####"):
        load_prompts(config(format="gsm8k", path=path), tokenizer)


def test_missing_and_empty_files_are_errors(tmp_path: Path, tokenizer: Tokenizer) -> None:
    with pytest.raises(DataError, match="no such prompt file"):
        load_prompts(config(path=str(tmp_path / "absent.jsonl")), tokenizer)
    with pytest.raises(DataError, match="no prompts in it"):
        load_prompts(config(path=write(tmp_path / "empty.jsonl", "")), tokenizer)


def test_chat_prompts_of_a_model_without_template_are_a_model_error(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(make_model(tmp_path / "m", template=None))
    path = write(tmp_path / "a.jsonl", {"prompt": "Hi", "answer": ""})
    with pytest.raises(ModelError, match="no chat template"):
        load_prompts(config(path=path, template="chat"), tokenizer)


def test_limit_and_another_path_serve_evaluation(tmp_path: Path, tokenizer: Tokenizer) -> None:
    path = write(tmp_path / "e.jsonl", *[{"prompt": str(i), "answer": "1"} for i in range(5)])
    found = load_prompts(config(path="unused"), tokenizer, path, limit=2)
    assert [prompt.prompt_id for prompt in found] == ["e:1", "e:2"]


def test_reasoning_gym_entries_are_the_same_for_the_same_seed(tokenizer: Tokenizer) -> None:
    settings = config(
        format="reasoning_gym",
        task="chain_sum",
        task_args={"max_terms": 2, "max_digits": 1},
        num_prompts=4,
    )
    prompts = load_prompts(settings, tokenizer)
    assert prompts == load_prompts(settings, tokenizer)
    assert len({prompt.prompt_id for prompt in prompts}) == 4
    entry = prompts[0].facts
    assert prompts[0].text == entry["question"] and prompts[0].answer == entry["answer"]
    path = None
    seeded = settings.model_copy(update={"run": settings.run.model_copy(update={"seed": 1})})
    assert load_prompts(seeded, tokenizer, path)[0].text != prompts[0].text


def test_reasoning_gym_entries_in_a_file_serve_evaluation(
    tmp_path: Path, tokenizer: Tokenizer
) -> None:
    row = {"question": "q", "answer": None, "metadata": {"source_dataset": "chain_sum"}}
    path = write(tmp_path / "e.jsonl", row)
    settings = config(format="reasoning_gym", task="chain_sum")
    (prompt,) = load_prompts(settings, tokenizer, path)
    assert (prompt.text, prompt.answer, prompt.facts) == ("q", "", row)


@pytest.mark.parametrize(
    ("task", "args"),
    [("no_such_task", {}), ("chain_sum", {"colour": 1}), ("chain_sum", {"min_terms": 0})],
)
def test_unknown_task_or_argument_is_a_config_error(
    tokenizer: Tokenizer, task: str, args: dict[str, int]
) -> None:
    with pytest.raises(ConfigError, match=f"prompts.task = '{task}'"):
        load_prompts(config(format="reasoning_gym", task=task, task_args=args), tokenizer)
