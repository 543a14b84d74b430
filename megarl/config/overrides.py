"""Settings on the command line: `--a.b value`, `--a.b=value`, and the type of a value in text.

Owns the form of an override. Must not know files or what a setting means.
"""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from dataclasses import dataclass

from megarl.config.settings import Setting, all_settings, unknown_text
from megarl.config.toml import TomlLimitError, parse_toml, shortened

COMMAND_LINE = "command line"


@dataclass(frozen=True, slots=True)
class Override:
    """One setting from the command line. `key` is the entry of a table setting, else empty."""

    setting: Setting
    key: str
    value: object


def parse_overrides(arguments: Sequence[str]) -> tuple[list[Override], list[str]]:
    """The overrides among `arguments`, in order, and a text for everything that is none.

    A flag without a value means true; a value that starts with `--` needs the form `--a.b=value`.

    >>> line = ["--run.seed", "3", "--prompts.shuffle=false", "--run.sed=1"]
    >>> found, wrong = parse_overrides(line)
    >>> [(o.setting.name, o.value) for o in found]
    [('run.seed', 3), ('prompts.shuffle', False)]
    >>> wrong
    ['run.sed (command line): there is no such setting; the nearest is run.seed']
    """
    overrides: list[Override] = []
    wrong: list[str] = []
    rest = list(arguments)
    while rest:
        argument = rest.pop(0)
        if not argument.startswith("--"):
            wrong.append(
                f"{shortened(repr(argument))} ({COMMAND_LINE}): settings have the form --name value"
            )
            continue
        name, assigned, text = argument.removeprefix("--").partition("=")
        setting, key = find_setting(name)
        takes_next = not assigned and rest and not rest[0].startswith("--")
        if takes_next:
            text = rest.pop(0)
        if setting is None:
            wrong.append(unknown_text(name, COMMAND_LINE))
        elif assigned or takes_next:
            try:
                overrides.append(Override(setting, key, parse_value(text, setting)))
            except TomlLimitError as error:
                wrong.append(f"{name} = {shortened(text)} ({COMMAND_LINE}): {error}")
        elif setting.kind == "flag":
            overrides.append(Override(setting, key, True))
        else:
            wrong.append(f"{name} ({COMMAND_LINE}): a value is missing; expected {setting.values}")
    return overrides, wrong


def find_setting(name: str) -> tuple[Setting | None, str]:
    """The setting that `name` is, or is an entry of, with the entry's key.

    >>> setting, key = find_setting("rollout.engine_args.mem_fraction_static")
    >>> setting.name, key
    ('rollout.engine_args', 'mem_fraction_static')
    """
    settings = all_settings()
    if name in settings:
        return settings[name], ""
    for table in settings.values():
        if table.kind == "table" and name.startswith(f"{table.name}.") and name != f"{table.name}.":
            return table, name.removeprefix(f"{table.name}.")
    return None, ""


def parse_value(text: str, setting: Setting) -> object:
    """`text` as TOML where it is TOML, else as itself; a text setting takes it as it stands.

    Raises TomlLimitError.

    >>> settings = all_settings()
    >>> parse_value("5", settings["run.name"]), parse_value("5", settings["run.seed"])
    ('5', 5)
    >>> parse_value('["a", "b"]', settings["rollout.sampling.stop"])
    ['a', 'b']
    """
    quoted = len(text) > 1 and text[0] == text[-1] and text[0] in "\"'"
    if setting.kind == "text" and not quoted:
        return text
    try:
        parsed = parse_toml(f"value = {text}")
    except tomllib.TOMLDecodeError:
        return text
    return parsed["value"] if len(parsed) == 1 else text
