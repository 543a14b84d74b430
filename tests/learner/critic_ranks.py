"""One rank of a run with critics: the recorded minibatch through layouts, and through resumes.

Reads CASES.json; writes beside it what each case answered, and its gradients by Megatron's names.
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
from megarl.learner.wire import decode
from megarl.types import Batch, MinibatchPlan
from tests.learner.critic_oracle import head


def set_head(learner: Learner, name: str) -> None:
    """Give the critic's output layer, where this rank has it, numbers known to all."""
    assert learner.critic is not None
    if learner.ranks.is_last_stage:
        layer = learner.critic.model.model.parts[-1].module.output_layer
        weight, bias = head(name, learner.critic.shape.hidden_size)
        with torch.no_grad():
            layer.weight.copy_(weight[None])
            layer.bias.copy_(bias)


def gradients(learner: Learner, plan: MinibatchPlan) -> dict[str, Any]:
    """The critic's, whole on every rank."""
    from megarl.learner.passes import accumulate_value_gradients

    critic = learner.critic
    assert critic is not None
    microbatches, length = learner._pack(plan)
    targets = [critic._targets(microbatch) for microbatch in microbatches]
    critic.optimizer.clear()
    accumulate_value_gradients(
        critic.model,
        microbatches,
        length,
        targets,
        learner.config.critic.clip,
        plan.num_loss_tokens,
        all_reduce=True,
    )
    named = critic.model.model.named_parameters()
    return {name: parameter.main_grad.clone().numpy() for name, parameter in named}


def steps(
    learner: Learner, plan: MinibatchPlan, first: int, count: int = 2
) -> list[dict[str, float]]:
    """What so many versions answered: score and step."""
    found = []
    for version in range(first, first + count):
        found += [learner.score(Batch(version, (plan,), 0, 7)), learner.step(plan)]
    return found


def run_layout(learner: Learner, plan: MinibatchPlan, path: Path) -> dict[str, Any]:
    """Scored with the first output layer, learned with the second."""
    set_head(learner, "first")
    scored = learner.score(Batch(0, (plan,), 0, 7))
    set_head(learner, "second")
    np.savez(f"{path}.{learner.ranks.rank}.npz", **gradients(learner, plan))
    return {"score": scored, "step": learner.step(plan), "later": steps(learner, plan, 1)}


def run_resume(learner: Learner, plan: MinibatchPlan, path: Path) -> dict[str, Any]:
    """Two versions alone, saved; two more. Or, where it was saved already, only those two."""
    if path.exists():
        version = learner.load(str(path))
        return {"version": version, "later": steps(learner, plan, 2)}
    set_head(learner, "first")
    try:
        learner.step(plan)
        refused = ""
    except MegarlError as error:
        refused = str(error)
    before = {name: weight.clone() for name, weight in learner.weights.items()}
    alone = steps(learner, plan, 0, 1)
    still = all(torch.equal(before[name], weight) for name, weight in learner.weights.items())
    alone += steps(learner, plan, 1, 1)
    learner.save(str(path), 2)
    later = steps(learner, plan, 2)
    return {"refused": refused, "alone": alone, "still": still, "later": later}


def main() -> None:
    """Run every case whose mesh has this rank."""
    cases, rank = Path(sys.argv[1]), int(os.environ["RANK"])
    torch.set_num_threads(1)
    for case in json.loads(cases.read_text()):
        if rank < case["world_size"]:
            path = cases.parent / case["name"]
            store = f"file://{path}.store"
            world_size = case["world_size"]
            dist.init_process_group("gloo", init_method=store, rank=rank, world_size=world_size)
            learner = Learner(Config.model_validate(case["config"]), cases.parent)
            plan = decode(MinibatchPlan, json.dumps([case["plan"]]).encode())
            if case["resumes"]:
                answers = run_resume(learner, plan, cases.parent / case["resumes"])
            else:
                answers = run_layout(learner, plan, path)
            if rank == 0:
                path.with_suffix(".json").write_text(json.dumps(answers))
            learner.close()
            stop()


if __name__ == "__main__":
    main()
