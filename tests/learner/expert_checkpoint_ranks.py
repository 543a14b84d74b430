"""Program, under torchrun with two ranks: a learner with routed experts saves, others continue.

    torchrun --nproc-per-node 2 -m tests.learner.expert_checkpoint_ranks CASES.json

Each case is one model with the learner that saves and those that load; rank 0 writes what their
verbs answered beside CASES.json.
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
from megarl.types import MinibatchPlan


def steps(learner: Learner, case: dict[str, Any], dp: int) -> list[dict[str, float]]:
    """Two optimizer steps."""
    plan = decode(MinibatchPlan, json.dumps([case["plans"][str(dp)]]).encode())
    return [learner.step(plan) for _ in range(2)]


def run_learner(case: dict[str, Any], number: int, folder: Path) -> dict[str, Any]:
    """The learner of a number: the first takes two steps, saves and takes two more."""
    settings = Config.model_validate(case["configs"][number])
    dp, saved = settings.data_parallel, folder / case["name"]
    store = f"file://{folder / case['name']}.{number}.store"
    dist.init_process_group("gloo", init_method=store, rank=int(os.environ["RANK"]), world_size=2)
    learner = Learner(settings, folder)
    if number == 0:
        steps(learner, case, dp)
        learner.save(str(saved), version=2)
    version = 2 if number == 0 else learner.load(str(saved))
    answers = {"version": version, "logprobs": learner.logprobs(case["sequences"])}
    answers["steps"] = steps(learner, case, dp)
    stop()
    return answers


def main() -> None:
    """Every case, one learner after the other."""
    cases = Path(sys.argv[1])
    torch.set_num_threads(1)
    for case in json.loads(cases.read_text()):
        answers = [run_learner(case, n, cases.parent) for n in range(len(case["configs"]))]
        if os.environ["RANK"] == "0":
            (cases.parent / f"{case['name']}.json").write_text(json.dumps(answers))


if __name__ == "__main__":
    main()
