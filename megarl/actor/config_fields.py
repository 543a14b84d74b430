"""Reading one JSON object of a checkpoint's folder, field by field; every error names the field.

Owns files, types and ranges. Knows no field's meaning.
"""

from __future__ import annotations

import json
import math
import os
import reprlib
from collections.abc import Mapping
from math import isfinite
from pathlib import Path
from typing import TypeGuard

from megarl.errors import ModelError

MAX_SIZE = 2**31 - 1
"""Of any size in a config: tensor libraries and file formats count dims in 32 bits or more."""

MAX_DEPTH = 32  # of objects and lists within each other

_SHOWN = reprlib.Repr()  # values in errors, a line at most
_SHOWN.maxstring = _SHOWN.maxother = _SHOWN.maxlong = 80
_SHOWN.maxlevel, _SHOWN.maxlist, _SHOWN.maxdict = 4, 8, 8


def read_json(path: Path, required: bool) -> dict[str, object]:
    """The object in a JSON file; {} where it is missing and not required.

    Raises ModelError where the folder or a required file is missing, or the file is broken.
    """
    if not os.path.isdir(path.parent):
        raise ModelError(
            f"model folder {path.parent} does not exist; set actor.model to the folder of a "
            "Hugging Face checkpoint (nothing is downloaded by a name)"
        )
    if not os.path.isfile(path):
        if not required:
            return {}
        raise ModelError(
            f"{path.parent} has no {path.name}; set actor.model to the folder of a Hugging Face "
            "checkpoint"
        )
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ModelError(f"{path}: {error.strerror}; make the file readable") from error
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ModelError(f"{path} is not valid JSON: {error}; fetch the file again") from error
    except ValueError as error:  # the one limit that Python's reader has besides
        raise ModelError(f"{path} has an integer of thousands of digits; fetch it again") from error
    except RecursionError as error:
        raise _too_deep(path) from error
    if not isinstance(value, dict):
        raise ModelError(f"{path} holds a {type(value).__name__}; it must be a JSON object")
    if depth_exceeds(value, MAX_DEPTH):
        raise _too_deep(path)
    return value


def _too_deep(path: Path) -> ModelError:
    return ModelError(
        f"{path} has objects or lists nested more than {MAX_DEPTH} deep; fetch the file again"
    )


def depth_exceeds(value: object, limit: int) -> bool:
    """Whether objects and lists are nested deeper than `limit`."""
    level = [value]
    for _ in range(limit + 1):
        inner: list[object] = []
        for each in level:
            if isinstance(each, dict):
                inner += each.values()
            elif isinstance(each, list):
                inner += each
        level = [each for each in inner if isinstance(each, dict | list)]
        if not level:
            return False
    return True


def shown(value: object) -> str:
    """A value as Python has it, cut short where it is long.

    >>> shown("a"), len(shown(10**4000))
    ("'a'", 80)
    """
    return _SHOWN.repr(value)


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
        return ModelError(f"{self.path}: {self.within}{field} is {shown(found)}; {reason}")

    def has(self, field: str) -> bool:
        """Whether the field is there."""
        return field in self.values

    def size(self, field: str, most: int = MAX_SIZE) -> int:
        """A positive integer up to `most`."""
        value = self.values.get(field)
        if not is_integer(value) or value <= 0:
            raise self.refusal(field, "a positive integer is needed")
        return self._bounded(field, value, most)

    def count(self, field: str, most: int = MAX_SIZE) -> int:
        """An integer from 0 up to `most`."""
        value = self.values.get(field)
        if not is_integer(value) or value < 0:
            raise self.refusal(field, "an integer from 0 up is needed")
        return self._bounded(field, value, most)

    def _bounded(self, field: str, value: int, most: int) -> int:
        if value > most:
            raise self.refusal(field, f"it can be {most} at most")
        return value

    def flag(self, field: str, absent: bool = False) -> bool:
        """True or false."""
        value = self.values.get(field, absent)
        if not isinstance(value, bool):
            raise self.refusal(field, "true or false is needed")
        return value

    def real(self, field: str, absent: float | None = None) -> float:
        """A positive finite number."""
        value = self.values.get(field, absent)
        if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
            raise self.refusal(field, "a positive number is needed")
        try:
            number = float(value)
        except OverflowError:
            number = math.inf
        if math.isinf(number):
            raise self.refusal(field, "a finite number within 64-bit floating point is needed")
        return number


def is_one_of(value: object, allowed: tuple[object, ...]) -> bool:
    """Membership that does not take 0 for False.

    >>> is_one_of(0, (False,)), is_one_of(0.0, (0, 1))
    (False, True)
    """
    return any(value == a and isinstance(value, bool) == isinstance(a, bool) for a in allowed)


def is_finite(value: object) -> TypeGuard[float]:
    """Whether it is a number of floating point, which infinities, NaN, true and false are not.

    >>> is_finite(-0.5), is_finite(float("nan")), is_finite(True), is_finite(10**400)
    (True, False, False, False)
    """
    try:
        return not isinstance(value, bool) and isinstance(value, int | float) and isfinite(value)
    except OverflowError:
        return False


def is_integer(value: object) -> TypeGuard[int]:
    """Whether it is an integer, which true and false are not."""
    return isinstance(value, int) and not isinstance(value, bool)
