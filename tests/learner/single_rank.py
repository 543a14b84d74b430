"""One learner of one rank, asked for what only a running Megatron shows. Prints one JSON object.

Arguments: the model folder and a folder to write in. Several learners follow each other here.
"""

from __future__ import annotations

import dataclasses
import json
import math
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from safetensors.numpy import load_file, save_file

from megarl.config.schema import Config, LearnerConfig
from megarl.config.transformer_fields import field_violations
from megarl.errors import MegarlError
from megarl.learner.learner import Learner
from megarl.learner.loss import LossWeights
from megarl.learner.scoring import KeptLogProbs
from megarl.types import Batch, MinibatchPlan
from tests.learner import recorded, tiny_models
from tests.learner.parity_ranks import gradients
from tests.reshard.megatron_cases import deepseek, glm, qwen
from tests.reshard.models import tiny_shape

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
    fields: dict[str, Any] = {
        "recompute_granularty": "full",
        "num_layers": 3,
        "fp8": "hybrid",
        "fp4": "e2m1",
    }
    return {
        name: refusal(lambda one=value, field=name: learner(transformer_config={field: one}))
        for name, value in fields.items()
    }


def moments(of: Learner) -> torch.Tensor:
    """Both moments of all parameters, and the number of steps of each, in one row."""
    (part,) = of.optimizer.megatron.chained_optimizers
    states = part.optimizer.state.values()
    return torch.cat([tensor.flatten() for state in states for tensor in state.values()])


def settable() -> list[str]:
    """Fields that megarl sets and yet `learner.transformer_config` may hold."""
    from megarl.learner.transformer import fixed_fields  # after Megatron's substitution on a CPU

    shapes = (tiny_shape("LlamaForCausalLM"), qwen(), glm(), deepseek())
    ours = {name for shape in shapes for name in fixed_fields(shape, LearnerConfig(), True)}
    return sorted(
        name for name in ours for value in (1, True, "x") if not field_violations({name: value})
    )


def not_a_number(plan: MinibatchPlan) -> dict[str, Any]:
    """Steps whose gradient is not finite: of the data once, then of the weights again and again."""
    refs = [list(microbatch) for microbatch in plan.schedule[0]]
    refs[1][0] = dataclasses.replace(refs[1][0], advantage=math.inf)
    bad = dataclasses.replace(plan, schedule=(tuple(tuple(each) for each in refs),))
    settings = {"lr": 1e-2, "warmup_steps": 4, "max_skipped_steps": 2}
    runs = []
    for plans in ((plan, bad, bad, plan), (plan, plan)):
        one = learner(optimizer=settings)
        metrics, states = [], []
        for each in plans:
            metrics.append(one.step(each))
            states.append((weights(one), moments(one), one.optimizer.state_dict()["num_steps"]))
        runs.append((metrics, states))
    (metrics, states), (expected, expected_states) = runs
    one.weights["decoder.final_layernorm.weight"][0] = math.nan
    before = weights(one)
    skipped = [one.step(plan)["optimizer/skipped_steps"] for _ in range(2)]
    saved = one.optimizer.state_dict()
    again = learner(optimizer=settings)
    again.weights["decoder.final_layernorm.weight"][0] = math.nan
    again.optimizer.load_state_dict(saved)  # it is counted on where it was saved
    return {
        "skipped step": metrics[1],
        "skipped": [each["optimizer/skipped_steps"] for each in metrics],
        "stays": all(map(same, zip(states[0], states[1], strict=True)))
        and all(map(same, zip(states[1], states[2], strict=True))),
        "goes on": metrics[3] == expected[1]
        and all(map(same, zip(states[3], expected_states[1], strict=True))),
        "in a row": skipped,
        "told": refusal(lambda: one.step(plan)),
        "told again": refusal(lambda: again.step(plan)),
        "unchanged": torch.equal(before.nan_to_num(), weights(one).nan_to_num()),
    }


def same(pair: tuple[Any, Any]) -> bool:
    """Whether two values, or all bits of two tensors, are."""
    first, second = pair
    return torch.equal(first, second) if isinstance(first, torch.Tensor) else first == second


def falling(schedule: str) -> dict[str, Any]:
    """Learning rates of ten steps, and of the last six of them after a checkpoint."""
    settings = {"lr": 8e-4, "warmup_steps": 2, "schedule": schedule, "decay_steps": 7}
    settings |= {"min_lr": 1e-4} if schedule != "constant" else {"decay_steps": 0}
    one, again = learner(optimizer=settings), learner(optimizer=settings)

    def rates(of: Learner, steps: int) -> list[float]:
        found = []
        for _ in range(steps):
            of.optimizer.clear()
            found.append(of.optimizer.step()["lr"])
        return found

    first = rates(one, 4)
    one.save(str(FOLDER / f"saved-{schedule}"), 1)
    again.load(str(FOLDER / f"saved-{schedule}"))
    rest = rates(one, 6)
    groups = [
        [sorted({len(p.shape) for p in g["params"]}), g["weight_decay"]]
        for g in again.optimizer.megatron.param_groups
    ]
    return {"lr": first + rest, "again": rates(again, 6), "groups": groups}


def decayed(plan: MinibatchPlan) -> dict[str, float]:
    """How far one step with weight decay is from one without: of matrices from -lr * decay * w, of
    vectors from nothing at all; the largest differences."""
    found = []
    for decay in (0.0, 0.5):
        one = learner(optimizer={"lr": 1e-2, "weight_decay": decay})
        before = {name: weight.clone() for name, weight in one.weights.items()}
        one.step(plan)
        found.append({name: weight.clone() for name, weight in one.weights.items()})
    plain, with_decay = found
    off = {1: 0.0, 2: 0.0}
    largest = 0.0
    for name, weight in before.items():
        expected = -1e-2 * 0.5 * weight if weight.dim() > 1 else torch.zeros_like(weight)
        difference = (with_decay[name] - plain[name] - expected).abs().max()
        off[weight.dim()] = max(off[weight.dim()], float(difference))
        largest = max(largest, float(expected.abs().max()))
    return {"vectors": off[1], "matrices": off[2], "largest": largest}


def clipped(plan: MinibatchPlan) -> dict[str, float]:
    """The gradient norm as told, that of the gradients that were applied, and of the moment."""
    one = learner(optimizer={"lr": 1e-3, "clip_grad": 0.25})
    told = one.step(plan)["grad_norm"]
    (part,) = one.optimizer.megatron.chained_optimizers
    moment = torch.cat([state["exp_avg"].flatten() for state in part.optimizer.state.values()])
    applied = float(one.optimizer.megatron.get_grad_norm())
    return {"told": told, "applied": applied, "moment": float(moment.norm())}


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
            tensors = [*one.weights.values(), *one.policy.model.parameters()]
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


def of_another_checkpoint(plan: MinibatchPlan) -> dict[str, Any]:
    """The log-probs of a reference of another checkpoint against those of that policy itself.

    `policy`: kept as it is; `fp8`: in float8. Of each, the largest difference, and whether the
    policy's weights and its step are as they are without scoring.
    """
    other = FOLDER / "other"
    shutil.copytree(MODEL, other)
    stored = load_file(other / "model.safetensors")
    turned = {
        name: array[::-1].copy() if array.ndim > 1 else array for name, array in stored.items()
    }
    save_file(turned, other / "model.safetensors", {"format": "pt"})

    def made(actor: str, **groups: Any) -> Learner:
        given = {"actor": {"model": actor}, "learner": {"precision": {"params": "fp32"}}, **groups}
        return Learner(Config.model_validate(given), FOLDER)

    def kept(of: KeptLogProbs) -> torch.Tensor:
        return torch.cat([of._by_sample[key] for key in sorted(of._by_sample)])

    batch = Batch(0, (plan,), 0, 7)
    private = {"weight_sync": {"shared_weights": False}}
    itself = made(str(other), correction={"old_logprobs": "recomputed"}, **private)
    itself.score(batch)
    found = {}
    for storage in ("policy", "fp8"):
        reference = {"model": str(other), "storage": storage}
        is_shared = {"weight_sync": {"shared_weights": storage == "fp8"}}
        one = made(MODEL, kl={"coef": 0.1}, reference=reference, **is_shared)
        before = weights(one)
        one.score(batch)
        off = kept(one._reference_logprobs) - kept(itself._old)
        found[storage] = {"off": float(off.abs().max()), "stays": same((before, weights(one)))}
        found[storage]["bytes"] = one._reference.num_bytes  # type: ignore[union-attr]
        found[storage]["error"] = one._reference.quantization_error  # type: ignore[union-attr]
        found[storage]["is shared"] = one.shared_memory is not None
        found[storage]["kl"] = one.step(plan)["kl/mean"]
        one.close()
    return found


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
        "settable": settable(),
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
        "schedules": {name: falling(name) for name in ("constant", "linear", "cosine")},
        "decayed": decayed(plan),
        "clipped": clipped(plan),
        "heads": gradients_of_heads(plan),
        "bf16": in_bf16(plan, sequences),
        "shared": in_shared_memory(plan),
        "reference": of_another_checkpoint(plan),
    }
    print(json.dumps(answers))


if __name__ == "__main__":
    main()
