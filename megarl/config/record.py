"""What a run was made of, for its env.json: versions, code, data, host.

Owns that record. Reads versions from package metadata and imports no engine.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import platform
import socket
import subprocess
import sys
from pathlib import Path

import megarl
from megarl.config.schema import Config

PACKAGES = (
    "megatron-core",
    "sglang",
    "torch",
    "transformer-engine",
    "transformers",
    "tokenizers",
    "safetensors",
    "numpy",
    "pydantic",
    "reasoning-gym",
    "wandb",
)
METADATA_DEADLINE_S = 30.0

_PRINT_VERSIONS = """
import importlib.metadata, json, sys
found = {}
for name in sys.argv[1:]:
    try:
        found[name] = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        pass
print(json.dumps({"python": sys.version.split()[0], "packages": found}))
"""


def environment_record(config: Config) -> dict[str, object]:
    """Plain values for JSON: what has to be the same for a run to be the same again."""
    environments: dict[str, object] = {"controller": _own_versions()}
    if config.launch.learner_python:
        environments["learner"] = _versions_of(config.launch.learner_python)
    if config.launch.rollout_python:
        environments["rollout"] = _versions_of(config.launch.rollout_python)
    return {
        "megarl": megarl.__version__,
        "revision": code_revision(),
        "environments": environments,
        "host": {
            "name": socket.gethostname(),
            "platform": platform.platform(),
            "cpus": os.cpu_count(),
            "slurm_job": os.environ.get("SLURM_JOB_ID"),
        },
        "data": data_hashes(config),
    }


def code_revision() -> dict[str, object] | None:
    """Commit of the checkout that megarl runs from, and whether files differ from it; else None."""
    package = Path(megarl.__file__).parent
    if _git(package, "ls-files", "--error-unmatch", "__init__.py") is None:
        return None  # installed, perhaps inside somebody else's checkout
    commit, status = _git(package, "rev-parse", "HEAD"), _git(package, "status", "--porcelain")
    if commit is None or status is None:
        return None
    return {"commit": commit, "changed": bool(status)}


def data_hashes(config: Config) -> dict[str, str]:
    """SHA-256 of every file that the settings name, and of the model's small files, by path.

    Weights are recorded by their size: hashing them would read the whole model.
    """
    function, _, _ = config.reward.function.rpartition(":")
    named = [config.prompts.path, config.eval.prompts, function]
    reference = config.reference.model or config.actor.model
    names = (config.actor.model, config.critic_model, reference)
    models = dict.fromkeys(Path(name) for name in names)
    found = {path: _sha256(Path(path)) for path in named if path and Path(path).is_file()}
    for path in [path for model in models if model.is_dir() for path in sorted(model.iterdir())]:
        if path.suffix == ".safetensors":
            found[str(path)] = f"{path.stat().st_size} bytes"
        elif path.is_file():
            found[str(path)] = _sha256(path)
    return found


def _own_versions() -> dict[str, object]:
    found = {}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return {"python": platform.python_version(), "executable": sys.executable, "packages": found}


def _versions_of(python: str) -> dict[str, object]:
    """The same of another environment, asked from its interpreter."""
    command = [python, "-c", _PRINT_VERSIONS, *PACKAGES]
    try:
        answer = subprocess.run(
            command, capture_output=True, check=True, timeout=METADATA_DEADLINE_S, text=True
        )
        return {"executable": python, **json.loads(answer.stdout)}
    except (OSError, subprocess.SubprocessError, json.JSONDecodeError) as error:
        return {"executable": python, "error": str(error)}


def _git(folder: Path, *arguments: str) -> str | None:
    """What git prints, or None where there is no git or it fails."""
    try:
        answer = subprocess.run(
            ["git", "-C", str(folder), *arguments],
            capture_output=True,
            check=True,
            timeout=METADATA_DEADLINE_S,
            text=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return answer.stdout.strip()


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
