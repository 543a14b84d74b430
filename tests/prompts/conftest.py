"""The tiny model folder as a fixture."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.prompts.tiny_model import make_model


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    return make_model(tmp_path / "model")
