"""For all tests: only files named test_*.py hold any; the others are programs that tests start."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from tests.megatron_engine import Engine
from tests.reshard.sglang_loaders import Loaders

# A test fails for what is wrong, not for how busy the machine is; fixtures of a function that
# examples share hold nothing that one of them changes.
settings.register_profile(
    "busy machine",
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
settings.load_profile("busy machine")


@pytest.fixture(scope="session")
def megatron_engine() -> Iterator[Engine]:
    """Runs programs on Megatron-Core, as the learner has it."""
    engine = Engine()
    yield engine
    engine.close()


@pytest.fixture(scope="session")
def sglang_loaders() -> Iterator[Loaders]:
    """SGLang's own models and loaders, without a server."""
    loaders = Loaders()
    yield loaders
    loaders.close()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Where several processes share the tests, begin with the longest files: they end together."""
    if hasattr(config, "workerinput"):
        items.sort(key=lambda item: "tests/whole/" not in item.nodeid)


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """Keep pytest from importing programs in search of examples: some patch an engine."""
    name = collection_path.name
    is_program = name.endswith(".py") and not name.startswith(("test_", "conftest"))
    return True if is_program and Path(__file__).parent in collection_path.parents else None
