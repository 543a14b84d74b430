"""Reading one JSON object of a checkpoint's folder, field by field; every error names the field.

Owns files, types and ranges. Knows no field's meaning.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TypeGuard

from megarl.errors import ModelError


def read_json(path: Path, required: bool) -> dict[str, object]:
    """The object in a JSON file; {} where it is missing and not required.

    Raises ModelError where the folder or a required file is missing, or the file is broken.
    """
    if not path.parent.is_dir():
        raise ModelError(
            f"model folder {path.parent} does not exist; set actor.model to the folder of a "
            "Hugging Face checkpoint"
        )
    if not path.is_file():
        if not required:
            return {}
        raise ModelError(
            f"{path.parent} has no {path.name}; set actor.model to the folder of a Hugging Face "
            "checkpoint"
        )
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ModelError(f"{path} is not valid JSON: {error}; fetch the file again") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path} holds a {type(value).__name__}; it must be a JSON object")
    return value


class Fields:
    """The fields of an object in the file `path`, each of the type that its reader asks for.

    A field that is null counts as absent. `within` is the object's own name, with a dot behind it,
    where it is part of another.
    """

    def __init__(self, path: Path, values: Mapping[str, object], within: str = "") -> None:
        self.path, self.within = path, within
        self.values = {name: value for name, value in values.items() if value is not None}

    def refusal(self, field: str, reason: str, value: object = ...) -> ModelError:
        """The error that refuses a field's value for a reason."""
        found = self.values.get(field) if value is ... else value
        return ModelError(f"{self.path}: {self.within}{field} is {found!r}; {reason}")

    def has(self, field: str) -> bool:
        """Whether the field is there."""
        return field in self.values

    def size(self, field: str) -> int:
        """A positive integer."""
        value = self.values.get(field)
        if not _is_integer(value) or value <= 0:
            raise self.refusal(field, "a positive integer is needed")
        return value

    def count(self, field: str) -> int:
        """An integer from 0 up."""
        value = self.values.get(field)
        if not _is_integer(value) or value < 0:
            raise self.refusal(field, "an integer from 0 up is needed")
        return value

    def flag(self, field: str, absent: bool = False) -> bool:
        """True or false."""
        value = self.values.get(field, absent)
        if not isinstance(value, bool):
            raise self.refusal(field, "true or false is needed")
        return value

    def real(self, field: str, absent: float | None = None) -> float:
        """A positive number."""
        value = self.values.get(field, absent)
        if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
            raise self.refusal(field, "a positive number is needed")
        return float(value)


def is_one_of(value: object, allowed: tuple[object, ...]) -> bool:
    """Membership that does not take 0 for False.

    >>> is_one_of(0, (False,)), is_one_of(0.0, (0, 1))
    (False, True)
    """
    return any(value == a and isinstance(value, bool) == isinstance(a, bool) for a in allowed)


def _is_integer(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)
