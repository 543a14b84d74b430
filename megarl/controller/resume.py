"""What is saved of a run: which checkpoints are whole, and which one a run continues from.

Owns the reading of `RUN/checkpoints/v%06d/{megatron/, state.json, COMPLETE}`. A checkpoint without
COMPLETE does not exist. Files are compared with their digests by the learner, which reads them.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megarl import run_paths
from megarl.errors import MALFORMED, CheckpointError

COMPLETE = "COMPLETE"
STATE = "state.json"
FILES = "files.json"  # in the learner's folders: name -> "bytes SHA-256"
WEIGHTS = "megatron"
DAMAGED = ".damaged"


@dataclass(frozen=True, slots=True)
class SavedRun:
    """A whole checkpoint: policy version, the state of the prompt source, where the weights are,
    and the metrics that it was saved with."""

    version: int
    prompts: Mapping[str, Any]
    path: Path
    metrics: Mapping[str, float] = field(default_factory=dict)

    @property
    def weights(self) -> Path:
        """The learner's part."""
        return self.path / WEIGHTS


def whole_checkpoints(folder: Path) -> list[Path]:
    """Folders of the complete checkpoints, oldest first; a copy under another name is none."""
    found = [path.parent for path in folder.glob(f"v*/{COMPLETE}")]
    return sorted((path for path in found if run_paths.is_version(path)), key=run_paths.version_of)


def newest(run_dir: Path) -> SavedRun | None:
    """The newest checkpoint that shows no damage, or None where there are none at all.

    Raises CheckpointError where each of them shows some.
    """
    problems: list[str] = []
    for path in reversed(whole_checkpoints(run_dir / run_paths.CHECKPOINTS)):
        try:
            return read_saved(path)
        except CheckpointError as error:
            problems.append(str(error))
    if problems:
        raise none_left(problems)
    return None


def none_left(problems: list[str]) -> CheckpointError:
    """What to tell where every checkpoint of a run is damaged, newest first."""
    return CheckpointError(
        f"none of {len(problems)} checkpoints can be continued from: {'; '.join(problems)}. Bring "
        "back one of them, or remove them all to start anew"
    )


def read_saved(path: Path) -> SavedRun:
    """A complete checkpoint, by what can be seen without reading its weights.

    Raises CheckpointError where its state cannot be read, or a file of it is missing or of another
    size.
    """
    try:
        state = json.loads((path / STATE).read_text())
        if state["version"] != run_paths.version_of(path):
            raise ValueError(f"it is of version {state['version']}")
        metrics = {name: float(value) for name, value in dict(state.get("metrics", {})).items()}
        saved = SavedRun(state["version"], dict(state["prompts"]), path, metrics)
    except (OSError, *MALFORMED) as error:
        raise CheckpointError(f"{path / STATE}: cannot be read ({error!r})") from error
    for listed in sorted(path.glob(f"*/{FILES}")):
        _check_sizes(listed)
    return saved


def _check_sizes(listed: Path) -> None:
    try:
        files = dict(json.loads(listed.read_text()))
        wanted = {name: int(str(text).split()[0]) for name, text in files.items()}
    except (OSError, IndexError, *MALFORMED) as error:
        raise CheckpointError(f"{listed}: cannot be read ({error!r})") from error
    for name, num_bytes in wanted.items():
        try:
            found = (listed.parent / name).stat().st_size
        except OSError as error:
            raise CheckpointError(f"{listed.parent / name}: {error.strerror}") from error
        if found != num_bytes:
            raise CheckpointError(
                f"{listed.parent / name}: it has {found} bytes, and had {num_bytes} when it was "
                "saved"
            )


def set_aside(path: Path) -> Path:
    """Give a damaged checkpoint a name under which it is none; returns it. Raises OSError."""
    aside = path.with_name(path.name + DAMAGED)
    if aside.exists():
        shutil.rmtree(aside)
    return path.rename(aside)
