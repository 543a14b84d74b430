"""A model's tokenizer and chat template without transformers (which would import torch).

Owns text <-> token ids, the chat template and the ids that end a response. Knows nothing of prompt
files, servers or rewards.

Special tokens: `encode` adds what tokenizer.json's own post-processor adds (a beginning-of-text
token for Llama 3, none for Qwen and SmolLM2) and nothing else, as transformers 5 does; `chat` and
`encode(..., special=False)` add none, because a template writes its special tokens itself.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

import jinja2
import tokenizers
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from megarl.actor.config_fields import read_json
from megarl.actor.shape import eos_token_ids
from megarl.errors import MALFORMED, ConfigError, ModelError

_SPECIAL_NAMES = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)


@dataclass(frozen=True, slots=True, eq=False)
class Tokenizer:
    """The tokenizer of one model folder.

    `eos_ids` end a response; `special_tokens` by their name.
    """

    backend: tokenizers.Tokenizer
    model_dir: str
    eos_ids: tuple[int, ...]
    special_tokens: Mapping[str, str]
    template: jinja2.Template | None

    def encode(self, text: str, special: bool = True) -> list[int]:
        """Token ids of a text; `special` lets the post-processor of tokenizer.json add its own."""
        return list(self.backend.encode(text, add_special_tokens=special).ids)

    def decode(self, ids: Sequence[int], skip_special: bool = True) -> str:
        """Text of token ids, without special tokens unless asked."""
        return str(self.backend.decode(list(ids), skip_special_tokens=skip_special))

    def render(self, messages: Sequence[Mapping[str, str]]) -> str:
        """The chat template's text for these turns (`role`, `content`), ending where a reply
        begins.

        Raises ModelError where the model has no template, or its template refuses the turns.
        """
        if self.template is None:
            raise ModelError(
                f"{self.model_dir}: the model has no chat template (neither "
                "chat_template.jinja nor chat_template in tokenizer_config.json); set "
                "prompts.template = 'none', or use a chat model"
            )
        try:
            return self.template.render(
                messages=[dict(message) for message in messages],
                tools=None,
                documents=None,
                add_generation_prompt=True,
                **self.special_tokens,
            )
        except Exception as error:  # a template is a program of its own
            roles = [message.get("role") for message in messages]
            raise ModelError(
                f"{self.model_dir}: the chat template refuses turns of {roles}: {error}; some "
                "models take no system turn (prompts.system)"
            ) from error

    def chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """Token ids of `render(messages)`. Raises ModelError as it does."""
        return self.encode(self.render(messages), special=False)

    def stop_id(self, text: str) -> int:
        """The one token that is this text. Raises ConfigError where it takes more or none."""
        known = self.backend.token_to_id(text)
        if known is not None:
            return int(known)
        ids = self.encode(text, special=False)
        if len(ids) != 1 or self.decode(ids, skip_special=False) != text:
            raise ConfigError(
                f"rollout.sampling.stop: {text!r} is {len(ids)} tokens {ids} for {self.model_dir}; "
                "a stop text must be one token"
            )
        return ids[0]


def load_tokenizer(model_dir: str | Path) -> Tokenizer:
    """Read tokenizer.json, tokenizer_config.json and the chat template of a model folder.

    Raises ModelError where tokenizer.json is missing, or one of the files is broken.
    """
    folder = Path(model_dir)
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise ModelError(
            f"{path}: there is no such file; actor.model must name a Hugging Face model "
            "folder with a tokenizer.json (a recent transformers makes one: load the tokenizer, "
            "save_pretrained it)"
        )
    try:
        backend = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exception
        raise ModelError(f"{path}: not a tokenizer: {error}; copy the file again") from error
    # A tokenizer.json may carry the truncation and padding of somebody's training run.
    backend.no_truncation()
    backend.no_padding()
    settings = read_json(folder / "tokenizer_config.json", required=False)
    names = read_json(folder / "special_tokens_map.json", required=False)
    special_tokens = _special_tokens(settings, names)
    eos_ids = list(eos_token_ids(folder))
    named_eos = backend.token_to_id(special_tokens.get("eos_token", ""))
    if named_eos is not None and named_eos not in eos_ids:
        eos_ids.append(int(named_eos))
    return Tokenizer(
        backend=backend,
        model_dir=str(model_dir),
        eos_ids=tuple(eos_ids),
        special_tokens=special_tokens,
        template=_load_template(folder, settings),
    )


def _special_tokens(*sources: Mapping[str, object]) -> dict[str, str]:
    """Special tokens by name; the first file that names one wins.

    A token is a text or {content}.
    """
    found: dict[str, str] = {}
    for source in sources:
        for name in _SPECIAL_NAMES:
            token = source.get(name)
            token = token.get("content") if isinstance(token, dict) else token
            if isinstance(token, str):
                found.setdefault(name, token)
    return found


def _load_template(folder: Path, settings: Mapping[str, object]) -> jinja2.Template | None:
    """chat_template.jinja, else `chat_template` of tokenizer_config.json (text, or named list)."""
    path = folder / "chat_template.jinja"
    source = settings.get("chat_template")
    try:
        if path.is_file():
            source = path.read_text(encoding="utf-8")
        elif isinstance(source, list):
            by_name = {entry["name"]: entry["template"] for entry in source}
            source = by_name.get("default")
        if not isinstance(source, str):
            return None
        return _environment().from_string(source)
    except (OSError, jinja2.TemplateError, *MALFORMED) as error:
        raise ModelError(
            f"{folder}: its chat template is broken: {error}; fetch the file again, or use "
            "prompts.template=none"
        ) from error


class _GenerationBlocks(Extension):
    """The block `generation`, which marks assistant text in a template, renders as its body."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> jinja2.nodes.Node | list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> ImmutableSandboxedEnvironment:
    """The jinja2 environment that chat templates are written for.

    Source: transformers, utils/chat_template_utils.py. A template comes with a model, so from
    strangers: it is run in jinja2's sandbox.
    """
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[_GenerationBlocks, "jinja2.ext.loopcontrols"],
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _tojson(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON without the HTML escapes of jinja2's own filter."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().astimezone().strftime(pattern)
