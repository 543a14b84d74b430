"""Put a mutant's code into functions that are already imported. Knows nothing of tests.

Tests then need no new import for each mutant. What stands outside of functions, and defaults of
arguments, cannot be swapped.
"""

from __future__ import annotations

import gc
import inspect
import warnings
from collections.abc import Iterator
from types import CodeType, FunctionType

Functions = dict[tuple[str, str, int], list[FunctionType]]


def functions_of(folder: str) -> Functions:
    """The living functions whose source lies in `folder`, by (path, qualified name, first line)."""
    found: Functions = {}
    for each in gc.get_objects():
        if isinstance(each, FunctionType) and each.__code__.co_filename.startswith(folder):
            found.setdefault(_key(each.__code__), []).append(each)
    return found


def swap(functions: Functions, path: str, source: str, changed: str) -> bool:
    """Give functions of `path` the code of the `changed` source; False where that is not all."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        before, after = (
            compile(text, path, "exec", dont_inherit=True) for text in (source, changed)
        )
    pairs = list(_changed(before, after))
    if not pairs or not all(functions.get(_key(old)) for old, _ in pairs):
        return False
    for old, new in pairs:
        for function in functions[_key(old)]:
            if len(function.__code__.co_freevars) != len(new.co_freevars):
                return False
            function.__code__ = new
    return True


def _key(code: CodeType) -> tuple[str, str, int]:
    return code.co_filename, code.co_qualname, code.co_firstlineno


def _inner(code: CodeType) -> list[CodeType]:
    return [const for const in code.co_consts if isinstance(const, CodeType)]


def _changed(before: CodeType, after: CodeType) -> Iterator[tuple[CodeType, CodeType]]:
    """Pairs of functions' code that differ; the module's own pair where it does itself."""
    same_size = len(_inner(before)) == len(_inner(after))
    if not same_size or _own(before) != _own(after):
        yield before, after
        return
    for old, new in zip(_inner(before), _inner(after), strict=True):
        is_function = bool(old.co_flags & inspect.CO_NEWLOCALS)  # no class body
        if is_function and old != new:
            yield old, new
        elif not is_function:
            yield from _changed(old, new)


def _own(code: CodeType) -> tuple[object, ...]:
    consts = [repr(const) for const in code.co_consts if not isinstance(const, CodeType)]
    return code.co_code, consts, code.co_names, code.co_name
