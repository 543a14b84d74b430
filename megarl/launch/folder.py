"""The run folder: locked for one run at a time, with the settings, versions and id of that run in
it.

Owns RUN/run.lock, RUN/config.toml and RUN/env.json, and the rule of which settings may change
between two starts of one run. Starts nothing.
"""

from __future__ import annotations

import fcntl
import json
import os
import secrets
import socket
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from megarl import run_paths
from megarl.config.load import read_config
from megarl.config.render import render_config
from megarl.config.schema import Config
from megarl.controller.resume import whole_checkpoints
from megarl.errors import ConfigError
from megarl.learner.phases import write_json

LOCK = "run.lock"
# What may differ when a run is continued: how long, where and in which layout it runs, not what it
# computes.
CHANGEABLE = (
    "loop.versions",
    "run.dir",
    "run.name",
    "critic.gpus",
    "critic.ranks",
    "rollout.servers",
    "weight_sync.mode",
    "weight_sync.hf_route",
    "weight_sync.disk_dir",
)
CHANGEABLE_GROUPS = (
    "checkpoint.",
    "critic.parallel.",
    "deadline.",
    "export.",
    "launch.",
    "learner.parallel.",
    "learner.recompute.",
    "observe.",
    "placement.",
    "rollout.parallel.",
)


@dataclass(frozen=True, slots=True)
class RunFolder:
    """An open run folder. `run_id` is of this start alone; `earlier_run_id` of the one before, or
    "".
    """

    path: Path
    run_id: str
    earlier_run_id: str

    @property
    def run_ids(self) -> tuple[str, ...]:
        """This start's id, then the earlier one where there is one."""
        return tuple(name for name in (self.run_id, self.earlier_run_id) if name)


@contextmanager
def open_run_folder(config: Config, run_dir: Path) -> Iterator[RunFolder]:
    """Make or take up the folder of a run and hold its lock.

    Raises ConfigError where another run holds it, or where it holds a run with other settings.
    """
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        lock = (run_dir / LOCK).open("a+", errors="replace")
    except OSError as error:
        raise ConfigError(
            f"the run folder {run_dir} cannot be used: {error.strerror}; choose another run.dir"
        ) from error
    with lock:
        earlier = _take(lock, run_dir)
        _check_settings(config, run_dir)
        folder = RunFolder(run_dir, new_run_id(), earlier)
        _sign(lock, folder.run_id)
        (run_dir / run_paths.SETTINGS).write_text(render_config(config))
        yield folder


def new_run_id() -> str:
    """A new id, such as 1130-004512-9f31c2: sortable within a year, and short, for file names."""
    return f"{time.strftime('%m%d-%H%M%S')}-{secrets.token_hex(3)}"


def _take(lock: IO[str], run_dir: Path) -> str:
    """Lock the file; returns the run id that an earlier start left in it. Ends with our process."""
    lock.seek(0)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        holder = _signature(lock.read())
        who = f" (process {holder['pid']} on {holder['host']})" if holder else ""
        raise ConfigError(
            f"another run is using {run_dir}{who}; wait for it, or choose another name: --run.name"
        ) from None
    return str(_signature(lock.read()).get("run_id", ""))


def _signature(text: str) -> Mapping[str, object]:
    try:
        facts = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return facts if isinstance(facts, dict) and {"pid", "host", "run_id"} <= facts.keys() else {}


def _sign(lock: IO[str], run_id: str) -> None:
    lock.seek(0)
    lock.truncate()
    json.dump({"run_id": run_id, "host": socket.gethostname(), "pid": os.getpid()}, lock)
    lock.flush()


def _check_settings(config: Config, run_dir: Path) -> None:
    """Refuse to continue a run with settings that would make it another one."""
    if not ((run_dir / run_paths.SETTINGS).exists() and has_begun(run_dir)):
        return
    try:
        old = read_config(run_dir / run_paths.SETTINGS)
    except ConfigError as error:
        raise ConfigError(
            f"{run_dir} holds a run whose settings this version of megarl does not read; continue "
            f"it with the version that began it, or name a new run: --run.name. {error}"
        ) from error
    changed = differing(old, config)
    if changed:
        texts = [f"{name} was {old!r}, is {new!r}" for name, old, new in changed]
        raise ConfigError(
            f"{run_dir} holds a run with other settings: {'; '.join(texts)}. Continue it with its "
            "own, or name a new run: --run.name"
        )


def has_begun(run_dir: Path) -> bool:
    """Whether there is something in the folder that a run continues, or would overwrite."""
    metrics = run_dir / run_paths.METRICS
    has_steps = metrics.exists() and metrics.stat().st_size > 0
    return has_steps or bool(whole_checkpoints(run_dir / run_paths.CHECKPOINTS))


def differing(old: Config, new: Config) -> list[tuple[str, object, object]]:
    """The settings, with both values, that differ and may not: (dotted name, old, new)."""
    before, after = _leaves(old.model_dump()), _leaves(new.model_dump())
    return [
        (name, before.get(name), after.get(name))
        for name in sorted(before.keys() | after.keys())
        if before.get(name) != after.get(name)
        and name not in CHANGEABLE
        and not name.startswith(CHANGEABLE_GROUPS)
    ]


def _leaves(tree: Mapping[str, object], prefix: str = "") -> dict[str, object]:
    leaves: dict[str, object] = {}
    for key, value in tree.items():
        if isinstance(value, dict) and value:
            leaves |= _leaves(value, f"{prefix}{key}.")
        else:
            leaves[f"{prefix}{key}"] = value
    return leaves


def write_environment(run_dir: Path, facts: Mapping[str, object]) -> None:
    """RUN/env.json: versions of everything, code revision, data hash."""
    write_json(run_dir / "env.json", facts)
