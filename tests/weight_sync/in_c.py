"""C that tests compile themselves."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest


def compile_in_c(source: Path, library: Path, option: str) -> None:
    """Make the shared `library` of `source`; skips the test where there is no C compiler."""
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("there is no C compiler here")
    subprocess.run([compiler, option, "-shared", "-fPIC", source, "-o", library], check=True)
