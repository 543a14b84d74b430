"""The `function` reward: a user's own function, loaded from `path/to/file.py:name`.

Owns loading it, checking that it can be called, and what it may return. Knows nothing of processes.
"""

from __future__ import annotations

import importlib.util
import inspect
import math
import sys
import traceback
from collections.abc import Awaitable, Callable, Mapping
from numbers import Real
from pathlib import Path
from types import ModuleType

from megarl.errors import RewardError

UserFunction = Callable[[str, str, Mapping[str, object]], object | Awaitable[object]]

_WANTED = "a function (response: str, answer: str, facts: dict) -> float, sync or async"


def load_function(spec: str) -> UserFunction:
    """The function that `reward.function` names; its file's folder can be imported from.

    Raises RewardError where the file or the name is missing, the file cannot be imported, or the
    function cannot take three positional arguments.
    """
    file, colon, name = spec.rpartition(":")
    if not colon or not file or not name:
        raise RewardError(
            f"reward.function = {spec!r}: it must be path/to/file.py:name, of {_WANTED}"
        )
    path = Path(file)
    if not path.is_file():
        raise RewardError(
            f"reward.function = {spec!r}: there is no file {path.absolute()}; mend the path"
        )
    module = _import(path, spec)
    function = getattr(module, name, None)
    if not callable(function):
        defined = [key for key, value in vars(module).items() if inspect.isfunction(value)]
        raise RewardError(
            f"reward.function = {spec!r}: {path} has functions {defined}, no {name!r}; "
            "name one of them"
        )
    try:
        inspect.signature(function).bind("response", "answer", {})
    except TypeError as error:
        raise RewardError(
            f"reward.function = {spec!r}: {name}{inspect.signature(function)} cannot be called "
            f"with (response, answer, facts): {error}; it must be {_WANTED}"
        ) from error
    return function  # type: ignore[no-any-return]


def is_async(function: Callable[..., object]) -> bool:
    """Whether calling it gives an awaitable: an async function, or an async `__call__`."""
    call = getattr(function, "__call__", function)  # noqa: B004  (asked of objects, not functions)
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(call)


def checked_value(returned: object) -> float:
    """What a score function returned, as a finite float; booleans count 0 and 1.

    Raises ValueError for anything else.

    >>> checked_value(True), checked_value(2)
    (1.0, 2.0)
    """
    if not isinstance(returned, Real):
        raise ValueError(f"returned {returned!r:.80}, a {type(returned).__name__}, not a number")
    value = float(returned)
    if not math.isfinite(value):
        raise ValueError(f"returned {value}, which is no reward")
    return value


def _import(path: Path, spec: str) -> ModuleType:
    module_spec = importlib.util.spec_from_file_location(f"megarl_user_reward_{path.stem}", path)
    assert module_spec is not None and module_spec.loader is not None, path
    module = importlib.util.module_from_spec(module_spec)
    sys.modules[module_spec.name] = module  # dataclasses and pickle look a module up by its name
    folder = str(path.parent.absolute())
    if folder not in sys.path:
        sys.path.append(folder)
    try:
        module_spec.loader.exec_module(module)
    except Exception as error:
        line = next(
            (
                frame.lineno
                for frame in reversed(traceback.extract_tb(error.__traceback__))
                if Path(frame.filename) == path
            ),
            getattr(error, "lineno", None),
        )
        raise RewardError(
            f"reward.function = {spec!r}: importing {path} failed at line {line}: "
            f"{type(error).__name__}: {error}"
        ) from error
    return module
