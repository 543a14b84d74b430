"""Call a function once a module has been imported, by whoever imports it.

Owns the finder that waits for it. What a cure changes in an engine is set right after the engine's
module is made and before anyone has used it, and a process that never imports the module pays
nothing. Knows nothing of engines.
"""

from __future__ import annotations

import importlib.abc
import importlib.util
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

Change = Callable[[Any], None]


def after_import(name: str, change: Change) -> None:
    """Have `change(module)` called when module `name` is imported; now where it is already."""
    if name in sys.modules:
        change(sys.modules[name])
        return
    if _FINDER not in sys.meta_path:
        sys.meta_path.insert(0, _FINDER)
    _FINDER.changes.setdefault(name, []).append(change)


class _Finder(importlib.abc.MetaPathFinder):
    """Finds waited-for modules as the others do, with a loader that calls the changes after."""

    def __init__(self) -> None:
        self.changes: dict[str, list[Change]] = {}

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        changes = self.changes.pop(fullname, None)  # so that the search below passes this finder
        if changes is None:
            return None
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader, changes)
        return spec


class _Loader(importlib.abc.Loader):
    """Another loader, and what to call once it has run."""

    def __init__(self, loader: Any, changes: Sequence[Change]) -> None:
        self._loader, self._changes = loader, changes

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        made: ModuleType | None = self._loader.create_module(spec)
        return made

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        for change in self._changes:
            change(module)


_FINDER = _Finder()
