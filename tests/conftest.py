"""For all tests: only files named test_*.py hold any; the others are programs that tests start."""

from __future__ import annotations

from pathlib import Path

from hypothesis import HealthCheck, settings

# A test fails for what is wrong, not for how busy the machine is; fixtures of a function that
# examples share hold nothing that one of them changes.
settings.register_profile(
    "busy machine",
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
settings.load_profile("busy machine")


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """Keep pytest from importing programs in search of examples: some patch an engine."""
    name = collection_path.name
    is_program = name.endswith(".py") and not name.startswith(("test_", "conftest"))
    return True if is_program and Path(__file__).parent in collection_path.parents else None
