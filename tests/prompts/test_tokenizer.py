"""Tokenizer and chat template give what transformers gives, without importing it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from megarl.errors import ConfigError, ModelError
from megarl.prompts.tokenizer import load_tokenizer
from tests.prompts.tiny_model import CHATML, make_model

QUICKSTART = Path(__file__).parents[2] / "examples/quickstart/model"
MIXED = "hello, wörld 你好  12345\n\ttabs <|im_end|> hell🙂"
TURNS = [
    {"role": "system", "content": "Be brief & <exact>."},
    {"role": "user", "content": " What is 2 + 3?\n"},
    {"role": "assistant", "content": "5"},
    {"role": "user", "content": "and 'ü' + \"4\"?"},
]
# What real templates use: trimmed blocks, loop controls, tojson, dates, generation marks, errors.
DEMANDING = """{{ bos_token }}
{% set ns = namespace(n=0) %}
{% for message in messages %}
    {% if message['role'] == 'system' %}
        {{- 'date ' + strftime_now('%Y') }} {{ message | tojson }}
        {% continue %}
    {% endif %}
    {% set ns.n = ns.n + 1 %}
    {% if message.role == 'assistant' %}{% generation %}{{ message.content }}{% endgeneration %}
    {% elif message.role == 'user' %}
<|im_start|>{{ message['content'] | trim }}{{ loop.index0 }}<|im_end|>
    {% else %}
        {{ raise_exception('no role ' + message.role) }}
    {% endif %}
{% endfor %}
{% if tools is none and documents is not defined %}n={% endif %}{{ ns.n }}
{%- if add_generation_prompt %}{{ eos_token }}>{% endif %}"""


@pytest.mark.parametrize("bos", [False, True])
@pytest.mark.parametrize("template", [CHATML, DEMANDING])
def test_ids_and_rendered_chat_equal_those_of_transformers(
    tmp_path: Path, template: str, bos: bool
) -> None:
    from transformers import AutoTokenizer

    folder = make_model(tmp_path, template, bos)
    theirs = AutoTokenizer.from_pretrained(str(folder))
    ours = load_tokenizer(folder)
    assert ours.encode(MIXED) == theirs(MIXED, truncation=False)["input_ids"]
    assert ours.encode(MIXED, special=False) == theirs.encode(MIXED, add_special_tokens=False)
    assert (ours.encode(MIXED)[0] == 0) == bos
    for turns in (TURNS, TURNS[1:2]):
        text = theirs.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
        assert ours.render(turns) == text
        ids = theirs.apply_chat_template(turns, add_generation_prompt=True, return_dict=False)
        assert ours.chat(turns) == ids
    ids = ours.encode(MIXED)
    assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)
    assert ours.decode(ids, skip_special=False) == theirs.decode(ids)


def test_quickstart_ids_equal_those_of_transformers() -> None:
    from transformers import AutoTokenizer

    theirs, ours = AutoTokenizer.from_pretrained(str(QUICKSTART)), load_tokenizer(QUICKSTART)
    for text in ("12+34=", "99+1=100\n", "12 apples"):
        assert ours.encode(text) == theirs(text)["input_ids"]
    assert ours.stop_id("\n") in ours.eos_ids


def test_template_file_wins_over_the_one_in_the_settings(model_dir: Path) -> None:
    (model_dir / "chat_template.jinja").write_text("{{ messages[0].content }}!")
    assert load_tokenizer(model_dir).render(TURNS[1:2]) == " What is 2 + 3?\n!"


def test_of_several_named_templates_the_default_is_used(tmp_path: Path) -> None:
    named = [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}]
    assert load_tokenizer(make_model(tmp_path, named)).render(TURNS) == "d"


def test_end_tokens_are_the_models_and_the_tokenizers(model_dir: Path) -> None:
    assert load_tokenizer(model_dir).eos_ids == (3, 2)


def test_chat_without_a_template_is_a_model_error(tmp_path: Path) -> None:
    folder = make_model(tmp_path, template=None)
    with pytest.raises(ModelError, match=r"no chat template.*prompts.template = 'none'"):
        load_tokenizer(folder).chat(TURNS)


def test_template_that_refuses_the_turns_is_a_model_error_with_its_reason(tmp_path: Path) -> None:
    folder = make_model(tmp_path, DEMANDING)
    with pytest.raises(ModelError, match="no role judge"):
        load_tokenizer(folder).chat([{"role": "judge", "content": "x"}])


def test_template_cannot_leave_its_sandbox(tmp_path: Path) -> None:
    folder = make_model(tmp_path, "{{ messages.__class__.__base__.__subclasses__() }}")
    with pytest.raises(ModelError, match="unsafe"):
        load_tokenizer(folder).chat(TURNS)


def test_broken_template_is_a_model_error_when_the_model_is_read(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="chat template is broken"):
        load_tokenizer(make_model(tmp_path, "{% for x in %}"))


@pytest.mark.parametrize("content", [None, "{", '{"model": 3}'])
def test_missing_or_broken_tokenizer_is_a_model_error(model_dir: Path, content: str | None) -> None:
    path = model_dir / "tokenizer.json"
    path.unlink() if content is None else path.write_text(content)
    with pytest.raises(ModelError, match=r"tokenizer\.json"):
        load_tokenizer(model_dir)


def test_stop_text_is_one_token_or_an_error(model_dir: Path) -> None:
    tokenizer = load_tokenizer(model_dir)
    assert tokenizer.decode([tokenizer.stop_id("\n")]) == "\n"
    assert tokenizer.stop_id("<|im_end|>") == 2
    with pytest.raises(ConfigError, match=r"'hello' is 3 tokens"):
        tokenizer.stop_id("hello")


def test_prompts_import_without_torch_and_transformers() -> None:
    code = (
        "import sys, megarl.prompts.tokenizer, megarl.prompts.dataset, megarl.prompts.sampler; "
        "sys.exit(bool({'torch', 'transformers', 'reasoning_gym'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
