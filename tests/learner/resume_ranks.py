"""One of two ranks of a learner that goes on in one layout after the other.

Its argument is CASES.json.

Each case is a model, the layout that is never left, and the layouts of a chain, each of which loads
what the one before has saved. Both take the same batches, one a step. Rank 0 writes what the verbs
answered beside CASES.json, in NAME.json; what both saved last is in NAME-straight and NAME-chain.
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

STEPS = 2  # of each layout


class Course:
    """The learners of one case, one after the other, and what they answered."""

    def __init__(self, case: dict[str, Any], folder: Path) -> None:
        self._case, self._folder, self._number = case, folder, 0

    def start(self, config: dict[str, Any]) -> Learner:
        self._number += 1
        store = f"file://{self._folder / self._case['name']}.{self._number}.store"
        rank = int(os.environ["RANK"])
        dist.init_process_group("gloo", init_method=store, rank=rank, world_size=2)
        return Learner(Config.model_validate(config), self._folder)

    def steps(self, learner: Learner, first: int) -> list[dict[str, float]]:
        """Optimizer steps on the batches from `first` on."""
        plans = self._case["plans"][str(learner.ranks.mesh.dp)][first : first + STEPS]
        written = (json.dumps([plan]).encode() for plan in plans)
        return [learner.step(decode(MinibatchPlan, each)) for each in written]

    def straight(self) -> dict[str, Any]:
        """All steps in one layout."""
        learner = self.start(self._case["straight"])
        legs, logprobs = [], []
        for leg in range(len(self._case["chain"])):
            logprobs.append(learner.logprobs(self._case["sequences"]))
            legs.append(self.steps(learner, leg * STEPS))
        learner.save(str(self._folder / f"{self._case['name']}-straight"), version=1)
        stop()
        return {"steps": legs, "logprobs": logprobs}

    def chain(self) -> dict[str, Any]:
        """As many, each pair of them in another layout."""
        saved = str(self._folder / f"{self._case['name']}-chain")
        legs, logprobs = [], []
        for leg, config in enumerate(self._case["chain"]):
            learner = self.start(config)
            if leg:
                assert learner.load(saved) == leg
            logprobs.append(learner.logprobs(self._case["sequences"]))
            legs.append(self.steps(learner, leg * STEPS))
            learner.save(saved, version=leg + 1)
            stop()
        return {"steps": legs, "logprobs": logprobs}


def main() -> None:
    """Every case."""
    cases = Path(sys.argv[1])
    torch.set_num_threads(1)
    for case in json.loads(cases.read_text()):
        course = Course(case, cases.parent)
        answers = {"straight": course.straight(), "chain": course.chain()}
        if os.environ["RANK"] == "0":
            (cases.parent / f"{case['name']}.json").write_text(json.dumps(answers))


if __name__ == "__main__":
    main()
