"""What tests of several modules here share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.reshard.megatron_oracle import Oracle


@pytest.fixture(scope="session")
def megatron() -> Iterator[Oracle]:
    """Megatron's own functions, in a process that is started when the first test asks."""
    oracle = Oracle()
    yield oracle
    oracle.close()
