"""What lies where in a run's folder: the names that controller, learner and servers share.

Owns the names alone; what is in a file, and who may write it, is its writer's. Imports nothing of
megarl and no engine.
"""

from __future__ import annotations

import re
from pathlib import Path

SETTINGS = "config.toml"
METRICS = "metrics.jsonl"
LOGS = "logs"
SAMPLES = "samples.jsonl"
"""In the folder of a version: what was written there by the model, and its rewards."""

ROLLOUTS = "rollouts"
CHECKPOINTS = "checkpoints"
EXPORTS = "export"
LEARNER = "learner"
CRITIC = "critic"
"""Who answers in a folder's endpoints: the learner, and a critic with ranks of its own."""


def endpoint(role: str) -> str:
    """Where `role` answers, written by its rank 0 when it is ready.

    >>> endpoint(LEARNER)
    'endpoints/learner.json'
    """
    return f"endpoints/{role}.json"


def failure(role: str) -> str:
    """Which rank of `role` failed first, and why.

    >>> failure(CRITIC)
    'logs/critic-failure.json'
    """
    return f"{LOGS}/{role}-failure.json"


LEARNER_ENDPOINT = endpoint(LEARNER)
LEARNER_FAILURE = failure(LEARNER)


def version_folder(run_dir: Path, version: int) -> Path:
    """Where the groups are that were asked for with policy `version`.

    >>> str(version_folder(Path("run"), 12))
    'run/rollouts/v000012'
    """
    return run_dir / ROLLOUTS / f"v{version:06d}"


def is_version(folder: Path) -> bool:
    """Whether a folder's name is that of a version, and not of somebody's copy.

    >>> [is_version(Path(name)) for name in ("v000012", "v1000000", "v000012-best")]
    [True, True, False]
    """
    return re.fullmatch(r"v[0-9]{6,}", folder.name) is not None


def version_of(folder: Path) -> int:
    """The version in the name of a folder, for which `is_version` holds.

    >>> version_of(Path("checkpoints/v000012"))
    12
    """
    return int(folder.name[1:])
