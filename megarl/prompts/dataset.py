"""Stage a: prompts from JSONL, GSM8K files and reasoning-gym tasks, tokenized once.

Owns reading rows, checking them and turning their text into token ids. Knows nothing of sampling
order, servers or scores. A defect names the file and the line.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from megarl.actor.config_fields import MAX_DEPTH, depth_exceeds
from megarl.config.schema import Config, PromptsConfig
from megarl.errors import ConfigError, DataError
from megarl.prompts.tokenizer import Tokenizer
from megarl.types import Prompt

GSM8K_MARK = "####"


@dataclass(frozen=True, slots=True)
class Row:
    """One row before it is tokenized. `place` says where it stands, for messages."""

    place: str
    prompt_id: str
    text: str
    answer: str
    facts: Mapping[str, object]


def load_prompts(
    config: Config, tokenizer: Tokenizer, path: str | None = None, limit: int | None = None
) -> tuple[Prompt, ...]:
    """All prompts of `prompts.*`, in file order; or of another file, such as `eval.prompts`.

    `path` replaces `prompts.path`; where `prompts.format` is `reasoning_gym` it names a JSONL file
    of the task's entries (`question`, `answer`, `metadata`). `limit` stops after so many rows.

    Raises DataError for a missing or empty file, a bad row and a prompt that is too long,
    ConfigError for a task that reasoning-gym does not have, ModelError where the chat template
    cannot be used.
    """
    settings = config.prompts
    if settings.format == "reasoning_gym" and path is None:
        source, rows = f"reasoning-gym task {settings.task!r}", _gym_rows(settings, config.run.seed)
    else:
        source = path or settings.path
        rows = _file_rows(Path(source), settings)
    prompts: list[Prompt] = []
    for row in rows:
        if limit is not None and len(prompts) >= limit:
            break
        prompts.append(_tokenize(row, settings, tokenizer))
    if not prompts:
        raise DataError(f"{source}: no prompts in it; give at least one row")
    return tuple(prompts)


def _tokenize(row: Row, settings: PromptsConfig, tokenizer: Tokenizer) -> Prompt:
    text = row.text + settings.suffix
    if settings.template == "chat":
        system = [{"role": "system", "content": settings.system}] if settings.system else []
        ids = tokenizer.chat([*system, {"role": "user", "content": text}])
    else:
        ids = tokenizer.encode(text)
    if not ids:
        raise DataError(f"{row.place}: the prompt is empty; give it a text, or remove the row")
    if len(ids) > settings.max_prompt_tokens:
        raise DataError(
            f"{row.place}: the prompt has {len(ids)} tokens, more than prompts.max_prompt_tokens = "
            f"{settings.max_prompt_tokens}; raise it, or shorten the row"
        )
    return Prompt(row.prompt_id, tuple(ids), text, row.answer, row.facts)


def _file_rows(path: Path, settings: PromptsConfig) -> Iterator[Row]:
    """Rows of a JSONL file. Blank lines are skipped and counted as lines."""
    if not path.is_file():
        raise DataError(f"{path}: there is no such prompt file; check prompts.path or eval.prompts")
    try:
        stream = path.open("rb")
    except OSError as error:
        raise DataError(f"{path}: {error.strerror}; make the file readable") from error
    with stream:
        for number, line in enumerate(stream, start=1):
            if line.strip():
                place = f"{path}, line {number}"
                yield _parse(place, f"{path.stem}:{number}", _object(place, line), settings)


def _object(place: str, line: bytes) -> dict[str, object]:
    try:
        value = json.loads(line.decode("utf-8-sig").rstrip())
    except UnicodeDecodeError as error:
        raise DataError(f"{place}: not UTF-8: {error}; save the file as UTF-8") from error
    except json.JSONDecodeError as error:
        raise DataError(
            f"{place}: not JSON: {error.msg} at column {error.colno}; each line is one JSON object"
        ) from error
    except ValueError as error:  # the one limit that Python's reader has besides
        raise DataError(
            f"{place}: an integer has thousands of digits; write it as a text"
        ) from error
    except RecursionError as error:
        raise _too_deep(place) from error
    if not isinstance(value, dict):
        raise DataError(f"{place}: a JSON {type(value).__name__}; each line is one JSON object")
    if depth_exceeds(value, MAX_DEPTH):
        raise _too_deep(place)
    if rb"\u" in line:
        _check_characters(place, value)
    return value


def _too_deep(place: str) -> DataError:
    return DataError(
        f"{place}: objects or lists are nested more than {MAX_DEPTH} deep; flatten the row"
    )


def _check_characters(place: str, value: Mapping[str, object]) -> None:
    """Refuse one half of an escaped pair: it is no character, and no tokenizer takes it."""
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        half = error.object[error.start]
        raise DataError(
            f"{place}: {half!a} is half a character; write the character itself, or both halves"
        ) from error


def _parse(place: str, prompt_id: str, row: dict[str, object], settings: PromptsConfig) -> Row:
    key = "prompt" if settings.format == "jsonl" else "question"
    text = _text_field(place, row, key)
    if settings.format == "gsm8k":
        solution = _text_field(place, row, "answer")
        _, mark, answer = solution.rpartition(GSM8K_MARK)
        if not mark or not answer.strip():
            raise DataError(
                f"{place}: 'answer' has no {GSM8K_MARK} and number behind it; mend the row, or use "
                "prompts.format=jsonl, where the answer is the whole text"
            )
        return Row(place, prompt_id, text, answer.strip(), row)
    if settings.format == "reasoning_gym":
        return Row(place, prompt_id, text, _gym_answer(row), row)
    answer_value = row.get("answer")
    if isinstance(answer_value, int | float) and not isinstance(answer_value, bool):
        if not math.isfinite(answer_value):
            raise DataError(f"{place}: 'answer' is {answer_value}, which is no number; correct it")
        answer_value = str(answer_value)
    if not isinstance(answer_value, str):
        raise DataError(
            f"{place}: 'answer' is {_described(row, 'answer')}; it must be a text or a number"
        )
    return Row(place, prompt_id, text, answer_value, row)


def _text_field(place: str, row: Mapping[str, object], key: str) -> str:
    value = row.get(key)
    if not isinstance(value, str) or not value:
        raise DataError(
            f"{place}: {key!r} is {_described(row, key)}; it must be a text (the row has "
            f"{sorted(row)})"
        )
    return value


def _described(row: Mapping[str, object], key: str) -> str:
    if key not in row:
        return "missing"
    return "empty" if row[key] == "" else f"a {type(row[key]).__name__}"


def _gym_rows(settings: PromptsConfig, seed: int) -> Iterator[Row]:
    """Generated entries; the same for the same task, arguments, number and seed."""
    try:
        import reasoning_gym  # seconds to import: only who asks for it pays
    except ImportError as error:
        raise ConfigError(
            "prompts.format = 'reasoning_gym' needs the package reasoning-gym; pip install "
            "reasoning-gym"
        ) from error
    try:
        dataset = reasoning_gym.create_dataset(
            settings.task, **{"seed": seed, "size": settings.num_prompts, **settings.task_args}
        )
    except (ValueError, TypeError, AssertionError) as error:
        raise ConfigError(
            f"prompts.task = {settings.task!r} with prompts.task_args = {settings.task_args}: "
            f"{error}; the tasks and their arguments stand in reasoning-gym's gallery"
        ) from error
    for index in range(settings.num_prompts):
        entry = dataset[index]
        place = f"reasoning-gym task {settings.task!r}, entry {index}"
        yield Row(place, f"{settings.task}:{index}", entry["question"], _gym_answer(entry), entry)


def _gym_answer(entry: Mapping[str, object]) -> str:
    """The gold answer; empty for tasks that have many (their scorer checks the entry itself)."""
    answer = entry.get("answer")
    return "" if answer is None else str(answer)
