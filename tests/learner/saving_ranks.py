"""One of two ranks of a learner that saves while it trains.

Its argument is CASES.json. Rank 0 writes what it saw of each case beside it, in NAME.json, and
checkpoints of one state: NAME-waited was written before the next step, NAME-beside after it, and
NAME-plain has the optimizer's state as Megatron alone copies it.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megarl.config.schema import Config
from megarl.errors import CheckpointError
from megarl.learner import checkpoint
from megarl.learner.checkpoint import Writing
from megarl.learner.distributed import stop
from megarl.learner.learner import Learner
from megarl.learner.wire import decode
from megarl.types import Batch, MinibatchPlan

SMALL_BYTES = 4096  # less than any rank has to write


def refusal(work: Callable[[], object]) -> str:
    """What is told by the CheckpointError of `work()`."""
    try:
        work()
    except CheckpointError as error:
        return str(error)
    return "nothing was refused"


def beside(learner: Learner, step: Callable[[], object], folder: str) -> dict[str, Any]:
    """Save twice as one version: waited for, and with files that are written after a step."""
    learner.save(f"{folder}-waited", 1)
    copied_once, checkpoint.copied_once = checkpoint.copied_once, contextlib.nullcontext
    learner.save(f"{folder}-plain", 1)
    checkpoint.copied_once = copied_once
    written, stepped = Writing.write, threading.Event()

    def late(self: Writing) -> None:
        assert stepped.wait(300)
        written(self)

    Writing.write = late  # type: ignore[method-assign]
    learner.begin_save(f"{folder}-beside", 1)
    seen: dict[str, Any] = {
        "under way": not learner.end_save(False),
        "second": refusal(lambda: learner.begin_save(f"{folder}-second", 1)),
    }
    step()
    seen["there before its end"] = Path(f"{folder}-beside").exists()
    stepped.set()
    seen["ended"] = learner.end_save(True)
    Writing.write = written  # type: ignore[method-assign]
    return seen


def full_disk(learner: Learner, step: Callable[[], object], folder: str) -> dict[str, Any]:
    """Save where a rank cannot write more than a few bytes; then train, and save once more."""
    told = {}
    for rank in (0, 1):
        if dist.get_rank() == rank:
            resource.setrlimit(resource.RLIMIT_FSIZE, (SMALL_BYTES, resource.RLIM_INFINITY))
        learner.begin_save(f"{folder}-full", 2)
        told[f"rank {rank}"] = refusal(lambda: learner.end_save(True))
        told[f"rank {rank} again"] = refusal(lambda: learner.end_save(True))
        limits = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    name = Path(folder).name
    left = [path.name for path in Path(folder).parent.glob(f"{name}-full*")]
    step()
    learner.save(f"{folder}-full", 2)
    assert learner.check_saved(f"{folder}-full") == ""
    return {"full": told, "left": left, "loaded": learner.load(f"{folder}-full")}


def no_folder(learner: Learner, folder: str) -> dict[str, Any]:
    """Save to below a file, where no folder can be made."""
    if dist.get_rank() == 0:
        Path(f"{folder}-file").touch()
    dist.barrier()
    path = f"{folder}-file/v1"
    return {"below a file": refusal(lambda: learner.begin_save(path, 2))}


def run_case(case: dict[str, Any], folder: Path) -> None:
    rank = int(os.environ["RANK"])
    store = f"file://{folder / (case['name'] + '.store')}"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=2)
    learner = Learner(Config.model_validate(case["config"]), folder)
    plan = decode(MinibatchPlan, json.dumps([case["plan"]]).encode())

    def step() -> None:
        learner.score(Batch(0, (plan,), 0, 7))
        learner.step(plan)

    step()
    path = str(folder / case["name"])
    seen = {**beside(learner, step, path), **full_disk(learner, step, path)}
    seen |= no_folder(learner, path)
    step()
    if rank == 0:
        (folder / f"{case['name']}.json").write_text(json.dumps(seen))
    stop()


def main() -> None:
    """Every case."""
    cases = Path(sys.argv[1])
    torch.set_num_threads(1)
    for case in json.loads(cases.read_text()):
        run_case(case, cases.parent)


if __name__ == "__main__":
    main()
