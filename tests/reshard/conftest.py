"""What tests of several modules here share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.megatron_engine import Engine
from tests.reshard.megatron_oracle import Oracle


@pytest.fixture(scope="session")
def megatron(megatron_engine: Engine) -> Iterator[Oracle]:
    """Megatron's own functions, in a process that is started when the first test asks."""
    oracle = Oracle(megatron_engine)
    yield oracle
    oracle.close()
