"""One learner of one rank, asked for what only a running Megatron shows. Prints one JSON object.

Arguments: the model folder and a folder to write in. Several learners follow each other here.
"""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from megarl.config.schema import Config
from megarl.errors import MegarlError
from megarl.learner.learner import Learner
from megarl.learner.loss import LossWeights
from megarl.types import Batch, MinibatchPlan
from tests.learner import recorded, tiny_models
from tests.learner.parity_ranks import gradients

MODEL, FOLDER = sys.argv[1], Path(sys.argv[2])


def learner(is_shared: bool = False, temperature: float = 1.0, **settings: Any) -> Learner:
    """A learner in fp32 with these settings of the `learner` group."""
    given = {"precision": {"params": "fp32"}, **settings}
    groups = {
        "actor": {"model": MODEL},
        "rollout": {"sampling": {"temperature": temperature}},
        "learner": given,
        "weight_sync": {"shared_weights": is_shared},
    }
    return Learner(Config.model_validate(groups), FOLDER)


def refusal(work: Any) -> str:
    """What the error of `work()` says; its type first."""
    try:
        work()
    except MegarlError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was refused"


def weights(of: Learner) -> torch.Tensor:
    """All parameters in one row."""
    return torch.cat([weight.flatten().clone() for weight in of.weights.values()])


def refused_fields() -> dict[str, str]:
    """What `learner.transformer_config` must not hold."""
    fields: dict[str, Any] = {"recompute_granularty": "full", "num_layers": 3, "fp8": "hybrid"}
    return {
        name: refusal(lambda one=value, field=name: learner(transformer_config={field: one}))
        for name, value in fields.items()
    }


def not_a_number(plan: MinibatchPlan) -> dict[str, Any]:
    """A step whose gradient is not finite."""
    one = learner(optimizer={"lr": 1e-2})
    one.weights["decoder.final_layernorm.weight"][0] = math.nan
    before = weights(one)
    told = refusal(lambda: one.step(plan))
    return {"told": told, "unchanged": torch.equal(before.nan_to_num(), weights(one).nan_to_num())}


def warmed_up(plan: MinibatchPlan) -> dict[str, Any]:
    """Learning rates of four steps with a warm-up of three, and the same run again."""
    runs = []
    for _ in range(2):
        one = learner(optimizer={"lr": 3e-4, "warmup_steps": 3})
        metrics = [one.step(plan) for _ in range(4)]
        runs.append((metrics, weights(one)))
    (metrics, first), (again, second) = runs
    return {
        "lr": [each["lr"] for each in metrics],
        "loss": [each["loss/total"] for each in metrics],
        "same": metrics == again and torch.equal(first, second),
    }


def gradients_of_heads(plan: MinibatchPlan) -> dict[str, Any]:
    """How far gradients are off, by relative L2 of the worst tensor, where the output layer runs on
    every position instead, and where it runs in parts of a few rows."""
    from megarl.learner import head  # Megatron can be imported only after the first learner is up

    one = learner(temperature=0.8)
    weights_of_loss = LossWeights(0.2, 0.3, entropy_coef=0.01, kl_coef=0.05)
    where, whole = head.Predictions.where, head.MAX_LOGITS
    rows = [0, 0]

    def everywhere(mask_T: torch.Tensor, *args: Any, **meaning: Any) -> Any:
        rows[0] += int(mask_T.sum())
        rows[1] += len(mask_T)
        return where(torch.ones_like(mask_T), *args, **meaning)

    def largest(expected: dict[str, Any]) -> float:
        found = gradients(one, plan, weights_of_loss)
        return max(
            float(np.linalg.norm(found[name] - grad) / np.linalg.norm(grad))
            for name, grad in expected.items()
        )

    expected = gradients(one, plan, weights_of_loss)
    head.MAX_LOGITS = 3 * 256  # three rows of the padded vocabulary
    in_parts = largest(expected)
    head.MAX_LOGITS = whole
    head.Predictions.where = everywhere  # type: ignore[method-assign]
    unselected = largest(expected)
    head.Predictions.where = where  # type: ignore[method-assign]
    again = largest(expected)
    return {"in parts": in_parts, "unselected": unselected, "again": again, "rows": rows}


def still(plan: MinibatchPlan) -> bool:
    """Whether a learning rate of 0 leaves every weight as it is."""
    one = learner(optimizer={"lr": 0.0, "weight_decay": 0.1})
    before = weights(one)
    one.step(plan)
    return torch.equal(before, weights(one))


def in_bf16(plan: MinibatchPlan, sequences: Any) -> dict[str, Any]:
    """Log-probs, types and two steps in bf16."""
    one = learner(precision={"params": "bf16"}, optimizer={"lr": 1e-3})
    answers = {
        "logprobs": one.logprobs(sequences),
        "types": sorted({str(weight.dtype) for weight in one.weights.values()}),
        "losses": [one.step(plan)["loss/total"] for _ in range(2)],
    }
    return answers


def in_shared_memory(plan: MinibatchPlan) -> dict[str, Any]:
    """The same steps with weights in private and in shared memory, one of them saved and loaded."""
    seen: dict[str, Any] = {}
    runs = []
    for is_shared in (False, True):
        one = learner(is_shared, optimizer={"lr": 1e-3})
        metrics = [one.step(plan) for _ in range(2)]
        one.save(str(FOLDER / f"saved-{is_shared}"), 2)
        one.step(plan)
        one.load(str(FOLDER / f"saved-{is_shared}"))
        metrics.append(one.step(plan))
        runs.append((metrics, weights(one)))
        if one.shared_memory is not None:
            low, size = one.shared_memory.data.data_ptr(), one.shared_memory.ref.num_bytes
            buffers = one.policy.model.buffers
            tensors = [*one.weights.values(), *one.policy.model.module.parameters()]
            tensors += [bucket.param_data for buffer in buffers for bucket in buffer.buckets]
            starts = [tensor.data_ptr() - low for tensor in tensors]
            seen["inside"] = all(
                0 <= at <= size - tensor.nbytes for at, tensor in zip(starts, tensors, strict=True)
            )
            path = Path("/dev/shm") / one.shared_memory.ref.name
            seen["file"] = path.is_file()
            again = learner(True)  # the name is taken: it does without
            seen["second"] = again.shared_memory is None
        one.close()
    seen["closed"] = not path.exists()
    (metrics, first), (again, second) = runs
    return {**seen, "same": metrics == again and torch.equal(first, second)}


def main() -> None:
    """Everything, in one process."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{FOLDER}/store", rank=0, world_size=1)
    plain = learner()

    def true_logprobs(sample: Any) -> list[float]:
        return plain.logprobs([(sample.prompt_ids, sample.response_ids)])[0]

    made = recorded.record(FOLDER / "groups", tiny_models.VOCAB_SIZE, true_logprobs)
    sequences = [(sample.prompt_ids, sample.response_ids) for sample, _ in made]
    plan = recorded.plan([ref for _, ref in made], 1)
    two_ranks = recorded.plan([ref for _, ref in made], 2)
    epochs = Batch(0, (plan, plan), 0, 7)
    answers = {
        "fields": refused_fields(),
        "one epoch": plain.score(Batch(0, (plan,), 0, 7)),
        "two epochs": plain.score(epochs),
        "no sample": plain.score(Batch(0, (), 0, 0)),
        "no sequence": plain.logprobs([]),
        "fp32 logprobs": plain.logprobs(sequences),
        "two ranks": refusal(lambda: plain.step(two_ranks)),
        "processes": refusal(lambda: learner(parallel={"tp": 2})),
        "not a number": not_a_number(plan),
        "warm-up": warmed_up(plan),
        "still": still(plan),
        "heads": gradients_of_heads(plan),
        "bf16": in_bf16(plan, sequences),
        "shared": in_shared_memory(plan),
    }
    print(json.dumps(answers))


if __name__ == "__main__":
    main()
