"""What this machine allows of a configuration: its interpreters, Slurm, variables and ports.

Owns also whether a run is Slurm's. Knows nothing of models or engines.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from typing import Literal

from megarl import ports
from megarl.config.fp8 import environment_faults
from megarl.config.schema import Config
from megarl.config.violation import Violation

MAX_PORT = 65535
IN_A_JOB = "SLURM_JOB_ID"
"""Set by Slurm for what runs inside a job."""

Kind = Literal["local", "slurm"]


def launch_kind(config: Config, environ: Mapping[str, str]) -> Kind:
    """How processes of the run are started; `check_machine` refuses slurm outside a job."""
    if config.launch.kind == "auto":
        return "slurm" if IN_A_JOB in environ else "local"
    return config.launch.kind


def check_machine(config: Config, environ: Mapping[str, str]) -> list[Violation]:
    """Settings against this machine: interpreters, Slurm, variables, and ports of a local run."""
    found = list(_interpreters(config))
    kind = launch_kind(config, environ)
    if kind == "slurm" and IN_A_JOB not in environ:
        found.append(
            Violation(
                f"launch.kind = slurm outside a Slurm job ({IN_A_JOB} is not set); "
                "submit slurm/train.sbatch, or use launch.kind = local",
                ("launch.kind",),
            )
        )
    for text in environment_faults(config.learner.precision, environ):
        found.append(Violation(text, ("learner.precision.fp8_recipe",)))
    found += _ports(config, check_taken=kind == "local")
    return found


def _interpreters(config: Config) -> Iterator[Violation]:
    for name, python in (
        ("launch.learner_python", config.launch.learner_python),
        ("launch.rollout_python", config.launch.rollout_python),
    ):
        if python and shutil.which(python) is None:
            yield Violation(
                f"{name} = {python!r} is no program that can be run here; name the python of an "
                "environment, or leave it empty for this one",
                (name,),
            )


def _ports(config: Config, check_taken: bool) -> Iterator[Violation]:
    """Fixed ports: in range, apart from each other, and free on this host."""
    first, servers = config.launch.rollout_port, config.rollout.servers
    learner = config.launch.learner_port
    fixed = [("launch.learner_port", learner)] if learner else []
    if first:
        last = first + servers - 1
        if last > MAX_PORT:
            yield Violation(
                f"launch.rollout_port = {first} with rollout.servers = {servers} reaches port "
                f"{last}, above {MAX_PORT}; use {MAX_PORT - servers + 1} or less",
                ("launch.rollout_port", "rollout.servers"),
            )
        if first <= learner <= last:
            yield Violation(
                f"launch.learner_port = {learner} is one of the servers' ports {first} to {last} "
                "(launch.rollout_port); move one",
                ("launch.learner_port", "launch.rollout_port"),
            )
        fixed += [("launch.rollout_port", port) for port in range(first, min(last, MAX_PORT) + 1)]
    for name, port in fixed:
        if check_taken and not ports.is_free("", port):
            yield Violation(
                f"{name}: port {port} is taken on this host by another process; end it, use "
                "another port, or 0 for a free one",
                (name,),
            )
