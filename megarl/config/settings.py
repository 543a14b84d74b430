"""The catalogue of settings: dotted name, kind of value, default and meaning, read from the
schema.

Owns how a setting is named and described to a user, in help, in errors and in the reference.
Must not know files, the command line or what a combination of settings means.
"""

from __future__ import annotations

import difflib
import functools
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import annotated_types
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from megarl.config.schema import Config

Kind = Literal["text", "integer", "number", "flag", "choice", "list", "table"]

_KINDS: Mapping[Any, Kind] = {str: "text", int: "integer", float: "number", bool: "flag"}


@dataclass(frozen=True, slots=True)
class Setting:
    """One setting. `values` says in words what it takes; `default` is unset where it is
    required."""

    name: str
    kind: Kind
    values: str
    doc: str
    required: bool
    default: object = None


@dataclass(frozen=True, slots=True)
class SettingGroup:
    """A group of settings, such as `rollout.sampling`, and the settings directly in it."""

    name: str
    doc: str
    settings: tuple[Setting, ...]


def setting_groups(model: type[BaseModel] = Config) -> tuple[SettingGroup, ...]:
    """Every group that has settings of its own, in the order of the schema.

    >>> [group.name for group in setting_groups()][:4]
    ['run', 'actor', 'prompts', 'rollout']
    """
    groups: list[SettingGroup] = []
    _collect(model, "", groups)
    return tuple(groups)


@functools.cache
def all_settings() -> Mapping[str, Setting]:
    """Every setting by its dotted name.

    >>> all_settings()["learner.parallel.tp"].values
    'integer > 0'
    """
    return {s.name: s for group in setting_groups() for s in group.settings}


@functools.cache
def group_names() -> frozenset[str]:
    """Dotted names of all groups.

    >>> "learner.parallel" in group_names()
    True
    """
    names: set[str] = set()
    for name in all_settings():
        parts = name.split(".")
        names.update(".".join(parts[:end]) for end in range(1, len(parts)))
    return frozenset(names)


def nearest_name(unknown: str) -> str | None:
    """The dotted name that `unknown` was probably meant to be, or None where nothing is near.

    A name whose last part is right wins over one that only looks alike.

    >>> nearest_name("rollout.smaples_per_prompt"), nearest_name("learner.tp"), nearest_name("lr")
    ('rollout.samples_per_prompt', 'learner.parallel.tp', 'learner.optimizer.lr')
    >>> nearest_name("rolout"), nearest_name("rollout.smaples"), nearest_name("xyzzy") is None
    ('rollout', 'rollout.samples_per_prompt', True)
    """
    last = unknown.rpartition(".")[2]

    def likeness(name: str) -> float:
        whole = difflib.SequenceMatcher(None, unknown, name).ratio()
        # "smaples" for "samples_per_prompt": names are long, and people stop early
        start = difflib.SequenceMatcher(None, unknown, name[: len(unknown)]).ratio()
        return max(whole, 0.95 * start) + (0.5 if name.rpartition(".")[2] == last else 0.0)

    best = max([*all_settings(), *sorted(group_names())], key=likeness)
    return best if likeness(best) > 0.6 else None


def unknown_text(name: str, source: str) -> str:
    """What a user reads about a name that is no setting. `source` says where it stood.

    >>> unknown_text("loop.steps", "my.toml")
    'loop.steps (my.toml): there is no such setting; [loop] has versions, max_staleness'
    """
    nearest = nearest_name(name)
    group, _, last = name.rpartition(".")
    inside = [known.name.rpartition(".")[2] for known in _settings_of(group)]
    if inside and (nearest is None or not _alike(last, nearest.rpartition(".")[2])):
        hint = f"[{group}] has {', '.join(inside)}"
    elif nearest is None:
        hint = "`megarl help` lists all settings"
    elif nearest in group_names():
        hint = f"the nearest is the group {nearest}; `megarl help {nearest}` lists it"
    else:
        hint = f"the nearest is {nearest}"
    return f"{name} ({source}): there is no such setting; {hint}"


def _settings_of(group: str) -> tuple[Setting, ...]:
    return next((known.settings for known in setting_groups() if known.name == group), ())


def _alike(word: str, other: str) -> bool:
    """Whether one may be a slip, or the beginning, of the other."""
    start = other[: len(word)]
    return max(difflib.SequenceMatcher(None, word, end).ratio() for end in (other, start)) > 0.7


def _collect(model: type[BaseModel], prefix: str, into: list[SettingGroup]) -> None:
    own: list[Setting] = []
    place = len(into)
    for key, field in model.model_fields.items():
        name = f"{prefix}{key}"
        inner = field.annotation
        if isinstance(inner, type) and issubclass(inner, BaseModel):
            _collect(inner, f"{name}.", into)
        else:
            own.append(_setting(name, field))
    if own:
        doc = " ".join((model.__doc__ or "").split())
        into.insert(place, SettingGroup(prefix.rstrip("."), doc, tuple(own)))


def _setting(name: str, field: FieldInfo) -> Setting:
    kind, values = _kind(field.annotation)
    values += "".join(_bound(rule) for rule in field.metadata)
    required = field.is_required()
    return Setting(
        name=name,
        kind=kind,
        values=values,
        doc=" ".join((field.description or "").split()),
        required=required,
        default=None if required else field.default,
    )


def _kind(annotation: Any) -> tuple[Kind, str]:
    if annotation in _KINDS:
        kind = _KINDS[annotation]
        return kind, "true or false" if kind == "flag" else kind
    origin, args = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is Literal:
        return "choice", " or ".join(f"`{value}`" for value in args)
    if origin is list:
        kind, words = _kind(args[0])
        return "list", f"list of {words}" + ("" if kind == "choice" else "s")
    if origin is dict:
        return "table", "table of names and values"
    raise AssertionError(f"no words for {annotation}")


def _bound(rule: object) -> str:
    match rule:
        case annotated_types.Gt(gt=bound):
            return f" > {bound}"
        case annotated_types.Ge(ge=bound):
            return f" >= {bound}"
        case annotated_types.Lt(lt=bound):
            return f" < {bound}"
        case annotated_types.Le(le=bound):
            return f" <= {bound}"
    return ""
