"""`megarl check fp8`: the learner alone, in bf16 and in FP8 on one golden batch.

Owns where that happens and what is printed. How it is computed is `learner/fp8_check.py`'s, how far
apart the two may be `config/fp8_protocol.py`'s.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from megarl import run_paths
from megarl.actor.shape import read_shape
from megarl.config.check_fp8 import block_differences, check_fp8, check_fp8_shape
from megarl.config.fp8 import (
    RECIPES,
    buffer_fields,
    environment,
    environment_faults,
    optimizer_fields,
    token_multiple,
    transformer_fields,
)
from megarl.config.fp8_protocol import bounds, comparison_of, faults, page
from megarl.config.layouts import trained_shape
from megarl.config.render import render_config
from megarl.config.schema import Config
from megarl.errors import ConfigError, LearnerError

SUFFIX = ".check-fp8"
EMULATED = (
    "EMULATED on CPUs: numbers are rounded as the recipe rounds them and multiplied in float32; no "
    "kernel of Transformer Engine has run, and nothing is ever trained so"
)


@dataclasses.dataclass(frozen=True, slots=True)
class GoldenBatch:
    """Group files, and where they are from in words; no files where tokens are drawn."""

    groups: tuple[str, ...]
    origin: str


def golden_batch(config: Config, folder: str = "") -> GoldenBatch:
    """The groups of `folder`; else those that the run's first version made; else none.

    Only the first version's were sampled from the weights that the learner reads, those of
    `actor.model`. Raises ConfigError where `folder` has no group file.
    """
    run_dir = Path(config.run.dir) / config.run.name
    first = run_paths.version_folder(run_dir, 0)
    chosen = Path(folder) if folder else first
    groups = tuple(str(path.absolute()) for path in sorted(chosen.glob("*.safetensors")))
    if groups:
        return GoldenBatch(groups, f"recorded in {chosen}")
    if folder:
        raise ConfigError(
            f"--batch {folder}: no group file (*.safetensors) is there; give a version's folder of "
            "a run, such as runs/NAME/rollouts/v000000"
        )
    return GoldenBatch(
        (),
        f"tokens drawn at random by a fixed seed, as {first} has no groups: its loss says nothing "
        "of the policy's, and there are no log-probs of the rollout engine",
    )


def explain_fp8(config: Config, batch: GoldenBatch) -> str:
    """What FP8 will be for these settings, what would be compared, and what is refused."""
    precision, parallel = config.learner.precision, config.learner.parallel
    lines = [f"fp8         learner.precision.fp8 = {precision.fp8}"]
    if precision.uses_fp8:
        recipe = RECIPES[precision.fp8_recipe]
        multiple = token_multiple(precision, parallel.tp, parallel.cp)
        lines += [
            f"recipe      {precision.fp8_recipe} (Transformer Engine's {recipe.te_class}); GPUs of "
            f"compute capability {recipe.gpus}",
            f"tokens      a microbatch is padded to a multiple of {multiple} over "
            f"learner.parallel.tp x cp = {parallel.tp} x {parallel.cp} ranks",
            f"environment {_words(environment(precision)) or 'nothing is set'}",
            f"servers     {_served(config)}",
            f"TransformerConfig            {_words(transformer_fields(precision))}",
            f"DistributedDataParallelConfig {_words(buffer_fields(precision))}",
            f"OptimizerConfig              {_words(optimizer_fields(precision)) or 'as without'}",
        ]
    lines += [
        f"batch       {batch.origin}",
        f"compared    {bounds()}",
    ]
    refused = list(_refusals(config))
    lines += [f"refused     {text}" for text in refused] or ["refused     nothing"]
    return "\n".join(lines) + "\n"


def run_check_fp8(config: Config, batch: GoldenBatch, emulate: bool) -> tuple[int, str]:
    """Compare on the learner's ranks, here; returns the exit status and what was found.

    0 where all is within its bounds, 1 where it is not. Raises ConfigError where FP8 is off or
    cannot be, LearnerError where the learner fails.
    """
    refused = list(_refusals(config))
    if not config.learner.precision.uses_fp8:
        refused.append("learner.precision.fp8 = off: there is nothing to compare; use e4m3")
    if refused:
        raise ConfigError(refused)
    run_dir = (Path(config.run.dir) / f"{config.run.name}{SUFFIX}").absolute()
    shutil.rmtree(run_dir, ignore_errors=True)  # of an earlier check
    (run_dir / run_paths.LOGS).mkdir(parents=True)
    (run_dir / run_paths.SETTINGS).write_text(render_config(config))
    request = {"groups": batch.groups, "emulate": emulate}
    (run_dir / "request.json").write_text(json.dumps(request))
    _run_learner(config, run_dir)
    found = comparison_of(json.loads((run_dir / "found.json").read_text()))
    wrong = faults(found)
    lines = [EMULATED] if found.emulated else []
    lines += [f"batch       {batch.origin}", page(found), *(f"wrong: {line}" for line in wrong)]
    lines.append(f"FP8: {'not within' if wrong else 'within'} its bounds; {run_dir}")
    return (1 if wrong else 0), "\n".join(lines) + "\n"


def _run_learner(config: Config, run_dir: Path) -> None:
    """The learner's launcher and its ranks, until they have ended."""
    command = [config.launch.learner_python or sys.executable, "-m", "megarl.learner.fp8_check"]
    command += ["--config", str(run_dir / run_paths.SETTINGS), "--run-dir", str(run_dir)]
    log_path = run_dir / run_paths.LOGS / "learner.log"
    with log_path.open("wb") as log:
        env = {**os.environ, "PYTHONUNBUFFERED": "1"}
        done = subprocess.run(command, stdout=log, stderr=subprocess.STDOUT, env=env, check=False)
    if done.returncode == 0:
        return
    failure = run_dir / run_paths.LEARNER_FAILURE
    said = json.loads(failure.read_text())["error"] if failure.exists() else ""
    raise LearnerError(f"the learner ended with status {done.returncode}: {said}; see {log_path}")


def _refusals(config: Config) -> Iterator[str]:
    shape = trained_shape(read_shape(config.actor.model))
    for violation in (*check_fp8(config), *check_fp8_shape(config, shape)):
        yield violation.text
    yield from environment_faults(config.learner.precision, os.environ)


def _served(config: Config) -> str:
    """Whether servers round weights as the learner does."""
    if config.rollout.precision.weights != "fp8":
        return "hold weights in bf16; the learner's products alone are in FP8"
    differing = block_differences(config, trained_shape(read_shape(config.actor.model)))
    if not differing:
        return "hold float8 by the same rule and in the same blocks as the learner's products"
    return f"hold float8 by the same rule, in other blocks for {'; '.join(differing)}"


def _words(fields: dict[str, object] | dict[str, str]) -> str:
    return " ".join(f"{name}={value}" for name, value in fields.items())
