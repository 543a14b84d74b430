"""A change waits for its module, comes before whoever imports it goes on, and comes once."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from megarl.compat import after_import
from megarl.compat.after_import import after_import as wait

CODE = "def answer():\n    return 41\n"


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A package whose module `part` is imported by its module `user`."""
    name = f"waited_for_{tmp_path.name.replace('-', '_')}"
    folder = tmp_path / name
    folder.mkdir()
    (folder / "__init__.py").touch()
    (folder / "part.py").write_text(CODE)
    (folder / "user.py").write_text("from .part import answer\nfound = answer()\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    finders = list(sys.meta_path)
    yield name
    sys.meta_path[:] = finders
    after_import._FINDER.changes.clear()
    for imported in [module for module in sys.modules if module.startswith(name)]:
        del sys.modules[imported]


def raise_by_one(module: Any) -> None:
    was = module.answer
    module.answer = lambda: was() + 1


def test_change_is_made_before_the_importer_goes_on(package: str) -> None:
    wait(f"{package}.part", raise_by_one)
    assert importlib.import_module(f"{package}.user").found == 42


def test_module_that_is_imported_already_is_changed_at_once(package: str) -> None:
    part = importlib.import_module(f"{package}.part")
    wait(f"{package}.part", raise_by_one)
    assert part.answer() == 42


def test_changes_are_made_in_their_order_and_once(package: str) -> None:
    wait(f"{package}.part", raise_by_one)
    wait(f"{package}.part", raise_by_one)
    part = importlib.import_module(f"{package}.part")
    assert part.answer() == 43
    assert importlib.reload(part).answer() == 41


def test_module_that_is_not_there_stays_an_import_error(package: str) -> None:
    wait(f"{package}.nowhere", raise_by_one)
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module(f"{package}.nowhere")
