"""TOML text as plain values, within the limits that settings have and Python's reader lacks.

Owns those limits: integers of 64 bits, as TOML 1.0.0 has them, and shallow nesting. Knows no
setting.
"""

from __future__ import annotations

import tomllib

MIN_INTEGER, MAX_INTEGER = -(2**63), 2**63 - 1
MAX_DEPTH = 32  # of tables and lists within each other
MAX_SHOWN = 80  # characters of a value in an error


class TomlLimitError(ValueError):
    """TOML that is well formed and beyond a limit; the text says which, without the value."""


def parse_toml(text: str) -> dict[str, object]:
    """The values of a TOML text.

    Raises tomllib.TOMLDecodeError where it is no TOML, and TomlLimitError.

    >>> parse_toml("a = [1]")
    {'a': [1]}
    """
    try:
        values = tomllib.loads(text)
    except tomllib.TOMLDecodeError:
        raise
    except ValueError as error:  # int() of thousands of digits
        raise TomlLimitError(_TOO_LARGE) from error
    except RecursionError as error:
        raise TomlLimitError(_TOO_DEEP) from error
    _check(values)
    return values


_TOO_LARGE = f"an integer is beyond 64 bits; use one from {MIN_INTEGER} to {MAX_INTEGER}"
_TOO_DEEP = f"tables or lists are nested more than {MAX_DEPTH} deep; flatten them"


def _check(values: dict[str, object]) -> None:
    level: list[object] = [values]
    for _ in range(MAX_DEPTH + 1):
        inner: list[object] = []
        for value in level:
            if isinstance(value, dict):
                inner += value.values()
            elif isinstance(value, list):
                inner += value
            elif isinstance(value, int) and not MIN_INTEGER <= value <= MAX_INTEGER:
                raise TomlLimitError(_TOO_LARGE)
        if not inner:
            return
        level = inner
    raise TomlLimitError(_TOO_DEEP)


def shortened(text: str) -> str:
    """A text for an error, without what is beyond `MAX_SHOWN` characters.

    >>> shortened("short"), len(shortened("9" * 5000))
    ('short', 80)
    """
    return text if len(text) <= MAX_SHOWN else text[: MAX_SHOWN - 3] + "..."
