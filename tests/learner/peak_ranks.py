"""One rank of learners whose peaks are looked at: what scoring and training take beside the state.

Its argument is CASES.json; each rank writes to NAME.RANK.json beside it what was predicted of each
phase and what torch's allocator gave out, both beside weights, gradients and optimizer state.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megarl.config.schema import Config
from megarl.learner.distributed import stop
from megarl.learner.learner import Learner
from megarl.learner.wire import decode
from megarl.types import Batch, MinibatchPlan
from tests.learner.peak_bytes import PeakBytes


def run_case(case: dict[str, Any], path: Path, rank: int) -> None:
    """The second pass of two: the first one makes tables and the optimizer's state."""
    store = f"file://{path}.store"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=case["world_size"])
    learner = Learner(Config.model_validate(case["config"]), path.parent)
    plan = decode(MinibatchPlan, json.dumps([case["plan"]]).encode())
    batch = Batch(0, (plan,), 0, 7)
    learner.score(batch)
    learner.step(plan)
    with PeakBytes() as score:
        learner.score(batch)
    with PeakBytes() as train:
        learner.step(plan)
    planned = learner.meter.predicted
    beside = {name: planned.peaks[name] - planned.state.total for name in ("score", "train")}
    beside["score"] += planned.host.swapped  # a CPU's memory is all one
    found = {
        name: {"planned": beside[name], "measured": peak.most}
        for name, peak in (("score", score), ("train", train))
    }
    Path(f"{path}.{rank}.json").write_text(json.dumps(found))
    stop()


def main() -> None:
    """Run every case whose mesh has this rank."""
    cases, rank = Path(sys.argv[1]), int(os.environ["RANK"])
    torch.set_num_threads(1)
    for case in json.loads(cases.read_text()):
        if rank < case["world_size"]:
            run_case(case, cases.parent / case["name"], rank)


if __name__ == "__main__":
    main()
