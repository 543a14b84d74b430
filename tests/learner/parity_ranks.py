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
from megarl.learner.packing import PackedMicrobatch
from megarl.learner.wire import decode
from megarl.types import Batch, MinibatchPlan


def digest(array: np.ndarray) -> str:
    """Of all bits of an array."""
    return hashlib.sha256(array.tobytes()).hexdigest()


def gradients(
    learner: Learner, plan: MinibatchPlan, weights: LossWeights, planted: float | None = None
) -> dict[str, np.ndarray]:
    """Every gradient of this rank, whole; the reference log-probs are made from the behavior's.

    `planted` takes the place of every number that no loss token has.
    """
    microbatches, length = learner._pack(plan)
    if planted is not None:
        microbatches = [_planted(each, planted) for each in microbatches]
    passes = learner._passes
    scores = [passes.Scores(m.behavior_logp_T, 0.9 * m.behavior_logp_T) for m in microbatches]
    learner.optimizer.clear()
    passes.accumulate_gradients(
        learner.policy, microbatches, length, scores, weights, plan.num_loss_tokens, all_reduce=True
    )
    named = learner.policy.model.named_parameters()
    return {name: parameter.main_grad.clone().numpy() for name, parameter in named}


def without_end(plan: MinibatchPlan) -> MinibatchPlan:
    """The plan with an advantage that is not finite, in the last rank's first sample."""
    *ranks, last = (list(rank) for rank in plan.schedule)
    at = next(index for index, refs in enumerate(last) if refs)
    first, *others = last[at]
    last[at] = (replace(first, advantage=math.inf), *others)
    return replace(plan, schedule=tuple(tuple(rank) for rank in (*ranks, last)))


def _planted(microbatch: PackedMicrobatch, value: float) -> PackedMicrobatch:
    mask = microbatch.loss_mask_T
    names = ("behavior_logp_T", "advantage_T")
    return replace(
        microbatch,
        **{n: torch.where(mask, getattr(microbatch, n), value) for n in names},
    )


def variants(
    learner: Learner, case: dict[str, Any], expected: dict[str, np.ndarray]
) -> dict[str, float]:
    """How far the gradients of other plans, and with NaN off the mask, are from `expected`."""
    weights = LossWeights(**case["weights"])
    found = {name: gradients(learner, plan_of(p), weights) for name, p in case["variants"].items()}
    plan = plan_of(case["plan"])
    found["NaN off the mask"] = gradients(learner, plan, weights, planted=math.nan)
    return {name: max(off_by(each, expected).values()) for name, each in found.items()}


def off_by(found: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> dict[str, float]:
    """The relative L2 of each gradient tensor's difference."""
    sizes = {name: float(np.linalg.norm(each)) for name, each in expected.items()}
    return {
        name: float(np.linalg.norm(found[name] - each)) / sizes[name] if sizes[name] else 0.0
        for name, each in expected.items()
    }


def plan_of(written: dict[str, Any]) -> MinibatchPlan:
    """A plan out of a case."""
    return decode(MinibatchPlan, json.dumps([written]).encode())


def run_case(case: dict[str, Any], folder: Path, rank: int) -> None:
    """Build the learner of one layout, and record its gradients and its verbs' answers."""
    store = f"file://{folder / (case['name'] + '.store')}"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=case["world_size"])
    learner = Learner(Config.model_validate(case["config"]), folder)
    from megarl.learner import head  # Megatron can be imported only now

    head.MAX_LOGITS = case["max_logits"] or (1 << 26)
    plan = plan_of(case["plan"])
    grads = gradients(learner, plan, LossWeights(**case["weights"]))
    np.savez(folder / f"{case['name']}.{rank}.npz", **grads)
    learner.optimizer.megatron.prepare_grads()
    norm = float(learner.optimizer.megatron.get_grad_norm())
    if case["variants"]:
        off = variants(learner, case, grads)
        (folder / f"{case['name']}.{rank}.variants.json").write_text(json.dumps(off))
    answers = {
        "norm": norm,
        "info": learner.info(),
        "logprobs": learner.logprobs(case["sequences"]),
        "score": learner.score(Batch(0, (plan,), 0, 7)),
        "step": learner.step(plan),
        "norm after clipping": float(learner.optimizer.megatron.get_grad_norm()),
        "step again": learner.step(plan),
    }
    learner.offload(["gradients"])  # as every verb but a step, it needs the weights to be whole
    learner.onload(["gradients"])
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
