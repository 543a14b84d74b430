"""One rank of the parity run: the recorded minibatch through every layout of a list.

Reads CASES.json; writes beside it gradients, by Megatron's names, what the verbs answered, and
digests of the weights after two steps.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from megarl.config.schema import Config
from megarl.learner.distributed import stop
from megarl.learner.learner import Learner
from megarl.learner.loss import LossWeights
from megarl.learner.wire import decode
from megarl.types import Batch, MinibatchPlan


def digest(array: np.ndarray) -> str:
    """Of all bits of an array."""
    return hashlib.sha256(array.tobytes()).hexdigest()


def gradients(learner: Learner, plan: MinibatchPlan, weights: LossWeights) -> dict[str, Any]:
    """Every gradient of this rank, whole; the reference log-probs are made from the behavior's."""
    microbatches, length = learner._pack(plan)
    passes = learner._passes
    scores = [passes.Scores(m.behavior_logp_T, 0.9 * m.behavior_logp_T) for m in microbatches]
    learner.optimizer.clear()
    passes.accumulate_gradients(
        learner.policy, microbatches, length, scores, weights, plan.num_loss_tokens, all_reduce=True
    )
    named = learner.policy.model.module.named_parameters()
    return {name: parameter.main_grad.clone().numpy() for name, parameter in named}


def without_end(plan: MinibatchPlan) -> MinibatchPlan:
    """The plan with an advantage that is not finite, in the last rank's first sample."""
    *ranks, last = (list(rank) for rank in plan.schedule)
    at = next(index for index, refs in enumerate(last) if refs)
    first, *others = last[at]
    last[at] = (replace(first, advantage=math.inf), *others)
    return replace(plan, schedule=tuple(tuple(rank) for rank in (*ranks, last)))


def run_case(case: dict[str, Any], folder: Path, rank: int) -> None:
    """Build the learner of one layout, and record its gradients and its verbs' answers."""
    store = f"file://{folder / (case['name'] + '.store')}"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=case["world_size"])
    learner = Learner(Config.model_validate(case["config"]), folder)
    from megarl.learner import head  # Megatron can be imported only now

    head.MAX_LOGITS = case["max_logits"] or (1 << 27)
    plan = decode(MinibatchPlan, json.dumps([case["plan"]]).encode())
    grads = gradients(learner, plan, LossWeights(**case["weights"]))
    np.savez(folder / f"{case['name']}.{rank}.npz", **grads)
    learner.optimizer.megatron.prepare_grads()
    norm = float(learner.optimizer.megatron.get_grad_norm())
    answers = {
        "norm": norm,
        "info": learner.info(),
        "logprobs": learner.logprobs(case["sequences"]),
        "score": learner.score(Batch(0, (plan,), 0, 7)),
        "step": learner.step(plan),
        "norm after clipping": float(learner.optimizer.megatron.get_grad_norm()),
        "step again": learner.step(plan),
    }
    digests = {name: digest(weight.numpy()) for name, weight in learner.weights.items()}
    answers["skipped"] = learner.step(without_end(plan))["optimizer/skipped_steps"]
    after = {name: digest(weight.numpy()) for name, weight in learner.weights.items()}
    assert after == digests, "a skipped step changed weights"
    (folder / f"{case['name']}.{rank}.json").write_text(json.dumps(digests))
    if rank == 0:
        (folder / f"{case['name']}.json").write_text(json.dumps(answers))
    stop()


def main() -> None:
    """Run every case whose mesh has this rank."""
    cases, rank = Path(sys.argv[1]), int(os.environ["RANK"])
    torch.set_num_threads(1)
    for case in json.loads(cases.read_text()):
        if rank < case["world_size"]:
            run_case(case, cases.parent, rank)


if __name__ == "__main__":
    main()
