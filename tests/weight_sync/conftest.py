"""What tests of a sync in one process share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from megarl.weight_sync import compiled
from tests.weight_sync.in_c import compile_in_c
from tests.weight_sync.rig import Rig
from tests.weight_sync.worlds import World


@pytest.fixture
def rig() -> Iterator[Callable[..., Rig]]:
    made: list[Rig] = []

    def make(*args: object, **kwargs: object) -> Rig:
        made.append(Rig(*args, **kwargs))  # type: ignore[arg-type]
        return made[-1]

    yield make
    for each in made:
        each.close()


@pytest.fixture
def world() -> Iterator[World]:
    made = World()
    yield made
    made.close()


@pytest.fixture(scope="session")
def in_c(tmp_path_factory: pytest.TempPathFactory) -> compiled.Library:
    """sums.c as it is now, compiled as setup.py does, whatever was built at install."""
    library = tmp_path_factory.mktemp("sums") / "sums.so"
    compile_in_c(Path(compiled.__file__).with_name("sums.c"), library, "-O3")
    return compiled.Library(library)
