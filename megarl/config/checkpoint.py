"""Settings of what a run writes to go on from, and for others to use."""

from __future__ import annotations

from typing import Literal

from megarl.config.group import Group, NonNegative, NonNegativeFloat, Positive


class CheckpointConfig(Group):
    """Saving and resuming."""

    every: NonNegative = 50
    """Save after every so many versions, and after the last one. 0 saves only the last."""
    keep: Positive = 2
    """How many of the newest checkpoints stay."""
    keep_every: NonNegative = 0
    """Save after every so many versions too, and keep these for good. 0 keeps none so."""
    best: str = ""
    """Name of a metric, such as "eval/accuracy": the checkpoint whose step has the best of it
    stays as well. One of a version without it (`eval.every`) is not the best. Empty keeps none."""
    best_is: Literal["highest", "lowest"] = "highest"
    """Which value of `best` is the best."""
    background: bool = True
    """Training goes on while files are written: it stands still only while the state is copied
    to host memory, which has room for it then, up to 16 bytes a parameter of a rank in all."""
    before_end_s: NonNegativeFloat = 300.0
    """So many seconds before the time limit of the Slurm job, or `launch.time_limit_s`, the run is
    ended as by SIGUSR1: what is being generated is dropped, a pass that learns already is
    finished, and the newest version is saved. It must be enough for that, and less than the limit.
    0 does not."""


class ExportConfig(Group):
    """The policy as Hugging Face folders, written by all learner ranks at once, each its own part.
    They load in transformers and SGLang as they are."""

    every: NonNegative = 0
    """Export after every so many versions. 0 does not."""
    last: bool = False
    """Export after the last version."""
    dir: str = ""
    """Folder on a file system that all nodes share; each run has a folder in it, with one such as
    v000050 for each version. Empty means `export` in the run's own folder. Relative to the working
    directory."""
    dtype: Literal["auto", "fp32", "bf16"] = "auto"
    """Type of the numbers. `auto`: that of `learner.precision.params`."""
