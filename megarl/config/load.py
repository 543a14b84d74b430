"""A run's settings from a TOML file and the command line, as one validated, frozen Config.

Owns reading, relative paths and the texts about single values; every violation is listed at once.
What combinations mean is in `check.py`. Must not know what any setting is for.
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from pydantic import ValidationError

from megarl.config.check import check_config
from megarl.config.check_parallel import check_layout
from megarl.config.overrides import COMMAND_LINE, parse_overrides
from megarl.config.render import toml_value
from megarl.config.schema import Config
from megarl.config.settings import all_settings, group_names, unknown_text
from megarl.config.toml import TomlLimitError, parse_toml, shortened
from megarl.config.violation import Violation
from megarl.errors import ConfigError

# Settings that hold a path; `reward.function` holds `path:name`.
PATHS = (
    "actor.model",
    "critic.model",
    "reference.model",
    "prompts.path",
    "eval.prompts",
    "reward.function",
)


Check = Callable[[Config], Iterable[Violation]]


def load_config(
    path: str | Path, overrides: Sequence[str] = (), more_checks: Sequence[Check] = ()
) -> Config:
    """The settings of a run that can start here: read, and checked against each other, the model,
    the files and this machine.

    `overrides` are command-line arguments, `--a.b value` or `--a.b=value`. Paths in the result are
    absolute. `more_checks` are those of components, for their violations to be listed with the
    others. Raises ConfigError with every violation; combinations of values that are wrong
    themselves are not judged.
    """
    return _checked(path, overrides, (check_config, *more_checks))


def load_layout(
    path: str | Path, overrides: Sequence[str] = (), more_checks: Sequence[Check] = ()
) -> Config:
    """As `load_config`, but checked only for what layouts are made of: no weights, no prompts, no
    limits of this machine or of what can be trained and served."""
    return _checked(path, overrides, (check_layout, *more_checks))


def _checked(path: str | Path, overrides: Sequence[str], checks: Sequence[Check]) -> Config:
    draft = _Draft(Path(path), overrides)
    config, wrong = draft.validated()
    violations = draft.violations + wrong
    bad = {name for violation in violations for name in violation.settings}
    found = [v for check in checks for v in check(config)]
    violations += [v for v in found if not bad.intersection(v.settings)]
    if violations:
        raise ConfigError([violation.text for violation in violations])
    return config


def read_config(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """The settings in `path`, with each value checked but nothing else: for a process of a run that
    has been checked already, and for a run on another machine.

    Raises ConfigError with every violation.
    """
    draft = _Draft(Path(path), overrides)
    config, wrong = draft.validated()
    if draft.violations or wrong:
        raise ConfigError([violation.text for violation in draft.violations + wrong])
    return config


@dataclass
class _Draft:
    """Values by dotted name, with where each came from, before they are validated."""

    path: Path
    overrides: Sequence[str] = ()
    values: dict[str, object] = field(default_factory=dict)
    sources: dict[str, str] = field(default_factory=dict)
    violations: list[Violation] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._take_file()
        self._take_overrides()

    def _take_file(self) -> None:
        for name, value in self._leaves(_read_toml(self.path), ""):
            self.values[name] = _anchored(name, value, self.path.parent)
            self.sources[name] = str(self.path)

    def _leaves(self, table: dict[str, object], prefix: str) -> Iterator[tuple[str, object]]:
        settings, groups = all_settings(), group_names()
        for key, value in table.items():
            name = f"{prefix}{key}"
            if name in settings:
                yield name, value
            elif name not in groups:
                self.violations.append(Violation(unknown_text(name, str(self.path))))
            elif isinstance(value, dict):
                yield from self._leaves(value, f"{name}.")
            else:
                self.violations.append(
                    Violation(
                        f"{name} = {shortened(toml_value(value))} ({self.path}): this is a group "
                        f"of settings; write them under [{name}]"
                    )
                )

    def _take_overrides(self) -> None:
        overrides, wrong = parse_overrides(self.overrides)
        self.violations += [Violation(text) for text in wrong]
        for override in overrides:
            name = override.setting.name
            if override.key:
                table = self.values.get(name)
                entries = table if isinstance(table, dict) else {}
                self.values[name] = {**entries, override.key: override.value}
            else:
                self.values[name] = _anchored(name, override.value, Path.cwd())
            self.sources[name] = COMMAND_LINE

    def validated(self) -> tuple[Config, list[Violation]]:
        """The Config of every value valid by itself, and a violation for each that is not."""
        try:
            return Config.model_validate(_nested(self.values), strict=True), []
        except ValidationError as error:
            wrong = _merged(self._violation(dict(e)) for e in error.errors())
        bad = {name for violation in wrong for name in violation.settings}
        good = {name: value for name, value in self.values.items() if name not in bad}
        placeholders = {name: "" for name in bad if all_settings()[name].required}
        return Config.model_validate(_nested({**good, **placeholders}), strict=True), wrong

    def _violation(self, error: dict[str, object]) -> Violation:
        location = error["loc"]
        assert isinstance(location, tuple)
        parts = [str(part) for part in location]
        settings = all_settings()
        ends = range(1, len(parts) + 1)
        name = next(n for n in (".".join(parts[:end]) for end in ends) if n in settings)
        setting = settings[name]
        if name not in self.values:
            text = f"{name} is not set; set it in {self.path} or with --{name} VALUE: {setting.doc}"
            return Violation(text, (name,))
        value, takes = self.values[name], setting.values
        if setting.kind == "list":
            takes += f", such as {toml_value(setting.default or ['a', 'b'])}"
        if setting.kind == "table" and isinstance(value, dict):
            key = parts[len(name.split("."))]
            value, name_shown = value[key], f"{name}.{key}"
            takes = "text, a finite number, or true or false"
        else:
            name_shown = name
        return Violation(
            f"{name_shown} = {shortened(toml_value(value))} ({self.sources[name]}): expected "
            f"{takes}",
            (name,),
        )


def _read_toml(path: Path) -> dict[str, object]:
    try:
        return parse_toml(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(
            f"{path}: {error.strerror}; name a TOML file with the run's settings"
        ) from error
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"{path}: not valid TOML: {error}") from error
    except TomlLimitError as error:
        raise ConfigError(f"{path}: {error}") from error


def _anchored(name: str, value: object, folder: Path) -> object:
    """`value` with a relative path made absolute, where `name` holds a path."""
    if name not in PATHS or not isinstance(value, str) or not value:
        return value
    path, colon, function = value.rpartition(":") if name == "reward.function" else (value, "", "")
    if not path:
        return value
    return os.path.normpath(Path.cwd() / folder / Path(path).expanduser()) + colon + function


def _nested(values: dict[str, object]) -> dict[str, object]:
    """The tree that dotted names stand for; groups of required settings are always in it."""
    tree: dict[str, object] = {}
    required = {name: None for name, setting in all_settings().items() if setting.required}
    for name in {**required, **values}:
        *groups, last = name.split(".")
        node = tree
        for group in groups:
            child = node.setdefault(group, {})
            assert isinstance(child, dict)
            node = child
        if name in values:
            node[last] = values[name]
    return tree


def _merged(violations: Iterable[Violation]) -> list[Violation]:
    """Without repetitions: pydantic reports a value once for each type that it might have been."""
    return list(dict.fromkeys(violations))
