"""A Config as TOML that loads to the same Config, with the values derived from it as comments.

Owns the written form of settings. Must not know where they came from or go to.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from pydantic import BaseModel

from megarl.config.layouts import critic_settings
from megarl.config.schema import Config

_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")  # TOML 1.0.0, "Keys"
_ESCAPES = {
    '"': '\\"',
    "\\": "\\\\",
    "\n": "\\n",
    "\t": "\\t",
    "\r": "\\r",
    "\b": "\\b",
    "\f": "\\f",
}


def render_config(config: Config) -> str:
    """Every setting under its group, defaults included, and the derived values above them."""
    lines = ["# Settings of a run, resolved.", "#"]
    lines += [f"# {name}: {value}" for name, value in derived_values(config)]
    _write_group(config, "", lines)
    return "\n".join(lines) + "\n"


def derived_values(config: Config) -> list[tuple[str, str]]:
    """What follows from the settings, in words, with the arithmetic."""
    learner, rollout = config.learner, config.rollout
    per_step = config.samples_per_step
    steps = learner.optimizer_steps_per_rollout * learner.epochs_per_rollout
    parallel = learner.parallel
    cp = f"cp {parallel.cp} x " if parallel.cp > 1 else ""
    pp = f" x pp {rollout.parallel.pp}" if rollout.parallel.pp > 1 else ""
    return [
        (
            "samples per step",
            f"{per_step} ({rollout.prompts_per_step} prompts x {rollout.samples_per_prompt})",
        ),
        (
            "samples per optimizer step",
            f"{per_step // learner.optimizer_steps_per_rollout} "
            f"({steps} optimizer steps on each rollout batch)",
        ),
        (
            "worst staleness",
            f"{config.worst_staleness_steps} optimizer steps, {config.loop.max_staleness} versions",
        ),
        (
            "learner processes",
            f"{config.learner_processes} "
            f"(tp {parallel.tp} x pp {parallel.pp} x {cp}dp {config.data_parallel})",
        ),
        *_critic_processes(config),
        (
            "rollout processes",
            f"{config.rollout_processes} "
            f"({rollout.servers} servers x tp {rollout.parallel.tp}{pp})",
        ),
    ]


def trained_sides(config: Config) -> str:
    """The layout of the learner, and of a critic with ranks of its own, in a few words."""
    sides = {"learner": config}
    if config.critic_is_apart:
        sides["critic"] = critic_settings(config)
    return ", ".join(f"{name} {_axes(side)}" for name, side in sides.items())


def _axes(config: Config) -> str:
    """tp, pp and dp, and of the other axes those that are in use."""
    parallel, sizes = config.learner.parallel, []
    for name in ("tp", "pp", "vpp", "cp", "ep", "etp"):
        size = getattr(parallel, name)
        if size > 1 or name in ("tp", "pp"):
            sizes.append(f"{name}={size}")
    return " ".join([*sizes, f"dp={config.data_parallel}"])


def _critic_processes(config: Config) -> list[tuple[str, str]]:
    """Where it has ranks of its own."""
    if not config.critic_is_apart:
        return []
    theirs = critic_settings(config)
    parallel = theirs.learner.parallel
    cp = f"cp {parallel.cp} x " if parallel.cp > 1 else ""
    sizes = f"tp {parallel.tp} x pp {parallel.pp} x {cp}dp {theirs.data_parallel}"
    return [("critic processes", f"{theirs.learner_processes} ({sizes})")]


def toml_value(value: object) -> str:
    """`value` as TOML text; what TOML has no form for, as Python shows it.

    >>> toml_value("a\\n"), toml_value(True), toml_value(1e-06), toml_value(["x", 1])
    ('"a\\\\n"', 'true', '1e-06', '["x", 1]')
    """
    match value:
        case bool():
            return "true" if value else "false"
        case str():
            return '"' + "".join(_escaped(character) for character in value) + '"'
        case float():
            return repr(value)
        case list() | tuple():
            return "[" + ", ".join(toml_value(item) for item in value) + "]"
        case dict():
            entries = ", ".join(f"{_key(k)} = {toml_value(v)}" for k, v in value.items())
            return "{ " + entries + " }" if entries else "{}"
    return str(value)


def _write_group(group: BaseModel, name: str, lines: list[str]) -> None:
    values = [(key, getattr(group, key)) for key in type(group).model_fields]
    plain = [(key, value) for key, value in values if not isinstance(value, BaseModel | dict)]
    tables = [(key, value) for key, value in values if isinstance(value, dict)]
    if name and (plain or tables):
        lines += ["", f"[{name}]"]
        lines += _entries(plain)
    for key, value in tables:
        if value:
            lines += ["", f"[{name}.{key}]", *_entries(value.items())]
    for key, value in values:
        if isinstance(value, BaseModel):
            _write_group(value, f"{name}.{key}" if name else key, lines)


def _entries(pairs: Iterable[tuple[str, object]]) -> list[str]:
    return [f"{_key(key)} = {toml_value(value)}" for key, value in pairs]


def _key(key: str) -> str:
    return key if _BARE_KEY.fullmatch(key) else toml_value(key)


def _escaped(character: str) -> str:
    if character in _ESCAPES:
        return _ESCAPES[character]
    if ord(character) < 0x20 or ord(character) == 0x7F:
        return f"\\u{ord(character):04x}"
    return character
