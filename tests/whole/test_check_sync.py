"""`megarl check sync` on real engines: one sync that is well, one that log-probs show wrong."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.whole.conftest import QUICKSTART, ROOT

# Put before a server's own path: its receiver turns the rotary cache, which is no parameter.
SABOTAGE = """\
import importlib.abc, importlib.machinery, sys

class Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name != "megarl.weight_sync.receiver":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        run = spec.loader.exec_module
        def exec_module(module):
            run(module)
            load = module.load
            def turned(model, named):
                load(model, named)
                caches = [b for n, b in model.named_buffers() if n.endswith("cos_sin_cache")]
                for cache in {id(b): b for b in caches}.values():
                    cache[:, : cache.shape[1] // 2].neg_()
            module.load = turned
        spec.loader.exec_module = exec_module
        return spec

import importlib.util
sys.meta_path.insert(0, Finder())
"""


def checked(folder: Path, *settings: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [
            *(sys.executable, "-m", "megarl", "check", "sync", str(QUICKSTART)),
            *("--run.dir", str(folder), *settings),
        ],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        timeout=300,
        check=False,
    )


@pytest.mark.slow
def test_sync_of_the_quickstart_is_as_it_should_be(tmp_path: Path) -> None:
    found = checked(tmp_path)
    assert found.returncode == 0, found.stdout + found.stderr
    assert "weight sync: as it should be" in found.stdout
    assert "tensors of 1 rank(s) are what SGLang itself loads" in found.stdout
    assert "nats of the learner's" in found.stdout
    assert "wrong" not in found.stdout


@pytest.mark.slow
def test_value_that_no_checksum_sees_is_told_in_words_and_ends_with_status_1(
    tmp_path: Path,
) -> None:
    (tmp_path / "sabotage").mkdir()
    (tmp_path / "sabotage" / "sitecustomize.py").write_text(SABOTAGE)
    python = tmp_path / "python"
    python.write_text(
        f'#!/bin/sh\nPYTHONPATH={tmp_path / "sabotage"}:$PYTHONPATH exec {sys.executable} "$@"\n'
    )
    python.chmod(0o755)
    found = checked(tmp_path, "--launch.rollout_python", str(python))
    assert found.returncode == 1, found.stdout + found.stderr
    assert "wrong: server-0: its log-probs are not the learner's: they differ by" in found.stdout
    assert "weight sync: not as it should be" in found.stdout
