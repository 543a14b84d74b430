"""The record of what a run was made of."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from pathlib import Path

import megarl
from megarl.config.record import code_revision, data_hashes, environment_record


def test_record_is_json_and_names_the_engines(place) -> None:
    record = json.loads(json.dumps(environment_record(place.load())))
    packages = record["environments"]["controller"]["packages"]
    assert packages["sglang"] == "0.5.23"
    assert packages["megatron-core"] == "0.19.2"


def test_data_is_recorded_by_its_hash_and_weights_by_their_size(place) -> None:
    config = place.load()
    found = data_hashes(config)
    prompts = Path(config.prompts.path).read_bytes()
    assert found[config.prompts.path] == hashlib.sha256(prompts).hexdigest()
    weights = place.model / "model.safetensors"
    assert found[str(weights)] == f"{weights.stat().st_size} bytes"


def test_another_environment_is_asked_for_its_versions(place) -> None:
    config = place.load("--launch.rollout_python", sys.executable)
    asked = environment_record(config)["environments"]
    assert asked["rollout"]["packages"] == asked["controller"]["packages"]


def test_code_revision_is_the_commit_of_the_checkout(monkeypatch, tmp_path) -> None:
    package = tmp_path / "megarl"
    package.mkdir()
    (package / "__init__.py").write_text("")
    git = ["git", "-C", str(tmp_path), "-c", "user.name=n", "-c", "user.email=e@example.org"]
    for arguments in (["init", "-q"], ["add", "."], ["commit", "-qm", "x"]):
        subprocess.run([*git, *arguments], check=True)
    monkeypatch.setattr(megarl, "__file__", str(package / "__init__.py"))
    found = code_revision()
    assert found is not None
    assert (len(found["commit"]), found["changed"]) == (40, False)
    (package / "__init__.py").write_text("x = 1\n")
    assert code_revision() == {**found, "changed": True}


def test_code_revision_is_unknown_where_megarl_is_installed(monkeypatch, tmp_path) -> None:
    monkeypatch.setattr(megarl, "__file__", str(tmp_path / "megarl" / "__init__.py"))
    assert code_revision() is None
