"""One rank of a critic with ranks of its own, or of a learner beside such a critic.

Reads CASES.json; writes beside it what each case answered, and a critic's gradients by Megatron's
names. What goes from one to the other is given in a case, as the controller would.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from megarl.config.schema import Config
from megarl.errors import MegarlError
from megarl.learner.distributed import stop
from megarl.learner.learner import Learner
from megarl.learner.lone_critic import LoneCritic
from megarl.learner.verbs import Numbers
from megarl.learner.wire import decode, encode
from megarl.types import Batch, MinibatchPlan, TokenNumbers
from tests.learner.critic_ranks import gradients, set_head


def batch(version: int, plan: MinibatchPlan) -> Batch:
    return Batch(version, (plan,), 0, 7)


def listed(numbers: Numbers) -> dict[str, list[float]]:
    """By sample, as they arrive where they are sent to."""
    arrived = decode(Numbers, encode(Numbers, numbers))
    return {each.sample_id: np.frombuffer(each.data, "<f4").tolist() for each in arrived}


def given(case: dict[str, Any]) -> Numbers:
    """What a case gives, for the loss tokens of each sample."""
    return tuple(
        TokenNumbers(name, np.array(numbers, "<f4").tobytes())
        for name, numbers in case["given"].items()
    )


def versions(critic: LoneCritic, plan: MinibatchPlan, rewards: Numbers, first: int) -> list[Any]:
    """What the steps of two versions answered."""
    found: list[Any] = []
    for version in (first, first + 1):
        found += [critic.score(batch(version, plan), rewards).metrics, critic.step(plan)]
    return found


def critic_case(case: dict[str, Any], plan: MinibatchPlan, path: Path) -> dict[str, Any]:
    """Scored with the first output layer, learned with the second; saved, and gone on with. Or what
    another case has saved is gone on with."""
    critic = LoneCritic(Config.model_validate(case["config"]), path.parent, lambda phase: None)
    rewards = given(case)
    if case["from"]:
        version = critic.load(str(path.parent / case["from"]))
        return {"version": version, "later": versions(critic, plan, rewards, 1)}
    try:
        critic.step(plan)
        refused = ""
    except MegarlError as error:
        refused = str(error)
    set_head(critic, "first")
    scored = critic.score(batch(0, plan), rewards)
    set_head(critic, "second")
    np.savez(f"{path}.{critic.ranks.rank}.npz", **gradients(critic, plan))
    answers = {"refused": refused, "score": scored.metrics, "step": critic.step(plan)}
    critic.save(f"{path}.saved", 1)
    later = versions(critic, plan, rewards, 1)
    return {**answers, "advantages": listed(scored.advantages), "later": later}


def policy_case(case: dict[str, Any], plan: MinibatchPlan, path: Path) -> dict[str, Any]:
    """Scored, given advantages, stepped."""
    learner = Learner(Config.model_validate(case["config"]), path.parent)
    learner.score(batch(0, plan))
    rewards = listed(learner.token_rewards())
    try:
        learner.step(plan)
        refused = ""
    except MegarlError as error:
        refused = str(error)
    learner.take_advantages(given(case))
    answers = {"rewards": rewards, "refused": refused, "step": learner.step(plan)}
    learner.close()
    return answers


def main() -> None:
    """Run every case whose mesh has this rank."""
    cases, rank = Path(sys.argv[1]), int(os.environ["RANK"])
    torch.set_num_threads(1)
    for case in json.loads(cases.read_text()):
        if rank < case["world_size"]:
            path = cases.parent / case["name"]
            store, size = f"file://{path}.store", case["world_size"]
            dist.init_process_group("gloo", init_method=store, rank=rank, world_size=size)
            plan = decode(MinibatchPlan, json.dumps([case["plan"]]).encode())
            run = critic_case if case["is_critic"] else policy_case
            answers = run(case, plan, path)
            if rank == 0:
                path.with_suffix(".json").write_text(json.dumps(answers))
            stop()


if __name__ == "__main__":
    main()
