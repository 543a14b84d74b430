"""One rank of the timed saves: waited for, and beside steps.

    torchrun --nproc-per-node 2 -m benchmarks.training.saving SETTINGS.json

Rank 0 prints one JSON object. The two ways take turns, and a step alone is timed in each turn.
"""

from __future__ import annotations

import gc
import json
import os
import shutil
import sys
import time
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"

import torch
import torch.distributed as dist

from benchmarks.training.ranks import timed, write_samples
from megarl.actor.flops import SequenceFlops
from megarl.buffer.schedule import ScheduleShape, make_schedule
from megarl.config.schema import Config
from megarl.learner.learner import Learner
from megarl.types import MinibatchPlan


def beside(learner: Learner, plan: MinibatchPlan, path: Path) -> dict[str, float]:
    """A save that steps go on beside: what it stands still for, and how long all of it takes."""
    start = time.perf_counter()
    begin_s = timed(lambda: learner.begin_save(str(path), 1))
    steps: list[float] = []
    while True:
        asked = time.perf_counter()
        is_done = learner.end_save(False)
        end_s = time.perf_counter() - asked
        if is_done:
            break
        steps.append(timed(lambda: learner.step(plan)))
    return {
        "begin_s": begin_s,
        "end_s": end_s,
        "whole_s": time.perf_counter() - start,
        "num_steps": len(steps),
        "steps_s": sum(steps),
    }


def main() -> None:
    """Time both ways in turns."""
    settings = json.loads(Path(sys.argv[1]).read_text())
    folder = Path(sys.argv[1]).parent
    torch.set_num_threads(1)
    learner = Learner(Config.model_validate(settings["config"]), folder)
    gc.collect()
    gc.freeze()  # as the service does
    refs = write_samples(learner, settings["lengths"], folder / "groups")
    max_tokens = learner.config.learner.max_tokens_per_microbatch
    flops = SequenceFlops.of(learner.shape)
    plan = make_schedule(refs, ScheduleShape(learner.ranks.mesh.dp, max_tokens, flops))
    turns = []
    for turn in range(settings["turns"] + 1):  # the first warms up
        steps = [timed(lambda: learner.step(plan)) for _ in range(2)]
        waited_s = timed(lambda: learner.save(str(folder / "saved"), 1))
        found = {"step_s": min(steps), "waited_s": waited_s}
        found |= beside(learner, plan, folder / "beside")
        sizes = [path.stat().st_size for path in (folder / "saved").iterdir()]
        found["bytes"] = sum(sizes)
        dist.barrier()
        if dist.get_rank() == 0:
            shutil.rmtree(folder / "saved")
            shutil.rmtree(folder / "beside")
        turns += [found] if turn else []
    if dist.get_rank() == 0:
        print(json.dumps(turns))
    learner.close()


if __name__ == "__main__":
    main()
