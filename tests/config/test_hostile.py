"""Settings that nobody in his senses writes: refused by name, or taken for what they say."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.config.load import load_config
from megarl.config.schema import Config
from megarl.config.settings import all_settings, group_names
from megarl.errors import ConfigError
from tests.config.conftest import Place

hostile = settings(max_examples=30, derandomize=True)
names = st.sampled_from([*all_settings(), *sorted(group_names())])
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=12) | st.sampled_from(
    ["", "~nobody-of-this-name/m", "a\0b", "/", "..", "x" * 5000, "\u202e", "path.py:", ":name"]
)
numbers = (
    st.integers()
    | st.sampled_from([0, 1, -1, 2**31, 2**63 - 1, -(2**63), 10**30])
    | st.floats()
    | st.booleans()
)
moments = st.sampled_from(["1979-05-27T07:32:00Z", "07:32:00", "1979-05-27", "0x7f", "1_000"])


def toml(value: object) -> str:
    """A value as TOML; JSON's texts are TOML's."""
    if isinstance(value, dict):
        inside = ", ".join(f"{json.dumps(k)} = {toml(v)}" for k, v in value.items())
        return "{" + inside + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(toml, value)) + "]"
    if isinstance(value, float):
        return repr(value)
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


values = st.recursive(
    texts | numbers,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=5,
).map(toml)


def check(path: Path, *overrides: str) -> None:
    """The settings load, or each thing that is wrong is told of in a line of bounded length."""
    try:
        assert isinstance(load_config(path, overrides), Config)
    except ConfigError as error:
        assert error.violations
        for text in error.violations:
            has_name = any(name in text for name in all_settings()) or str(path) in text
            assert has_name or "command line" in text, text
            assert len(text) < 10_000, len(text)


@hostile
@given(st.dictionaries(names, values | moments, min_size=1, max_size=4))
def test_any_value_of_any_setting_is_taken_or_refused_by_name(
    place: Place, given: dict[str, str]
) -> None:
    rest = {"actor.model": '"model"', "prompts.path": '"prompts.jsonl"', **given}
    place.file.write_text("".join(f"{name} = {value}\n" for name, value in rest.items()))
    check(place.file)


@pytest.mark.parametrize(
    "override",
    ["learner.parallel.first_stage_layers=1", "learner.parallel.pp=3", "rollout.parallel.tp=3"],
)
def test_layers_and_heads_that_do_not_split_are_refused_by_the_settings_name(
    place: Place, override: str
) -> None:
    check(place.file, f"--{override}")
    with pytest.raises(ConfigError, match=override.rpartition(".")[0]):
        load_config(place.file, [f"--{override}"])


@hostile
@given(st.lists(st.tuples(names, texts | values | moments), min_size=1, max_size=4))
def test_any_override_is_taken_or_refused_by_name(
    place: Place, given: list[tuple[str, str]]
) -> None:
    check(place.file, *(f"--{name}={value}" for name, value in given))


@hostile
@given(st.lists(texts | names.map("--{}".format) | values, max_size=4))
def test_any_words_on_the_command_line_are_taken_or_refused(place: Place, given: list[str]) -> None:
    check(place.file, *given)


@hostile
@given(st.binary(max_size=60) | st.text(max_size=60).map(lambda t: t.encode("utf-8", "replace")))
def test_any_bytes_as_a_file_of_settings_are_refused_by_its_name(place: Place, text: bytes) -> None:
    place.file.write_bytes(text)
    check(place.file)
