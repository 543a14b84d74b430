"""Optional packages: what is used is told, and a broken one is named before Megatron meets it."""

from __future__ import annotations

import importlib
import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from megarl.learner import accelerators
from tests.learner import random_model

ROOT = Path(__file__).parents[2]
EMPTY = (
    "Found empty `transformer-engine` meta package installed. Install `transformer-engine` with "
    "framework extensions"
)


@pytest.fixture(autouse=True)
def imports_end_with_the_test() -> Iterator[None]:
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        if name.partition(".")[0] in ("transformer_engine", "apex", "flash_attn"):
            del sys.modules[name]


def run_learner(folder: Path, packages: Path) -> str:
    """The output of the learner's own launcher and rank, with `packages` to import from."""
    random_model.write(folder / "model")
    run_dir = folder / "run"
    run_dir.mkdir()
    text = f'[actor]\nmodel = "{folder / "model"}"\n[learner.precision]\nparams = "fp32"\n'
    (run_dir / "config.toml").write_text(text)
    paths = ["--config", str(run_dir / "config.toml"), "--run-dir", str(run_dir)]
    done = subprocess.run(
        [sys.executable, "-m", "megarl.learner.agent", *paths],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
        env={**os.environ, "PYTHONPATH": f"{ROOT}:{packages}", "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode != 0
    return done.stdout + done.stderr


def package(folder: Path, name: str, text: str) -> Path:
    """A package whose import does what `text` does."""
    (folder / name).mkdir(parents=True)
    (folder / name / "__init__.py").write_text(text)
    return folder


def test_learner_names_a_transformer_engine_that_cannot_be_imported(tmp_path: Path) -> None:
    packages = package(
        tmp_path / "packages", "transformer_engine", f"raise RuntimeError({EMPTY!r})"
    )
    told = run_learner(tmp_path, packages)
    assert f"transformer_engine is installed in {packages}" in told
    assert f"RuntimeError: {EMPTY}" in told
    assert "on a machine without a GPU uninstall transformer-engine" in told
    assert "Traceback" not in told


@pytest.mark.parametrize(
    "text",
    ["raise OSError('libcudnn.so.9: cannot open shared object file')", "import no_such_module_x"],
)
def test_package_that_fails_in_any_way_is_named_with_what_it_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    monkeypatch.syspath_prepend(str(package(tmp_path, "flash_attn", text)))
    with pytest.raises(accelerators.LearnerError) as caught:
        accelerators.find_accelerators()
    told = str(caught.value)
    assert told.startswith(f"flash_attn is installed in {tmp_path}")
    assert "cannot open shared object" in told or "no_such_module_x" in told
    assert told.endswith("install a flash-attn that is built for this torch and CUDA, or none")


def test_part_of_a_package_that_fails_is_named_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A Transformer Engine of which only the core can be imported: Megatron would end on it."""
    package(tmp_path, "transformer_engine", "")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(accelerators.LearnerError, match="No module named 'transformer_engine.pyt"):
        accelerators.find_accelerators()
    package(tmp_path / "transformer_engine", "pytorch", "raise FileNotFoundError('no torch lib')")
    importlib.invalidate_caches()
    with pytest.raises(accelerators.LearnerError, match="FileNotFoundError: no torch lib"):
        accelerators.find_accelerators()


def test_package_that_is_whole_is_found_with_its_version_if_it_says_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(package(tmp_path, "apex", "")))
    assert accelerators.find_accelerators() == {"apex": ""}


def test_log_says_what_is_used_and_what_absence_costs(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    accelerators.tell({"transformer_engine": "2.20.2"}, on_cuda=True)
    first, *absent = caplog.messages
    assert first.startswith(
        "accelerators layers=transformer_engine grouped_gemm=transformer_engine "
        "adam=transformer_engine transformer_engine=2.20.2 apex=absent"
    )
    assert [line.split()[2] for line in absent] == [
        f"name={each.name}" for each in accelerators.KNOWN[1:]
    ]
    assert all("cost=" in line for line in absent)
    caplog.clear()
    accelerators.tell({}, on_cuda=False)
    assert len(caplog.messages) == 1 and "adam=torch" in caplog.messages[0]
