"""What tests of a sync in one process share."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

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
