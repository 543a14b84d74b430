"""One rank of the offload test: the same steps with the state kept here, and with it sent away.

Reads FOLDER/cases.json; each rank writes to FOLDER/CASE.RANK.json what it saw, bit for bit.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megarl.config.schema import Config
from megarl.errors import MegarlError
from megarl.learner.distributed import stop
from megarl.learner.learner import Learner
from megarl.learner.verbs import PARTS
from megarl.learner.wire import decode
from megarl.types import Batch, MinibatchPlan
from megarl.weight_sync.checksum import box_checksum

STEPS = 3


def state_of(learner: Learner) -> dict[str, Tensor]:
    """Copies of the weights, and of masters and moments of this rank."""
    learner.state.gather_weights()  # a step with overlap_param_gather leaves that for later
    found = {name: weight.clone() for name, weight in learner.weights.items()}
    optimizers = [learner.optimizer.megatron]
    if learner.critic is not None:
        named = learner.critic.model.model.named_parameters()
        found |= {f"critic {name}": parameter.detach().clone() for name, parameter in named}
        optimizers.append(learner.critic.optimizer.megatron)
    parts = [part for optimizer in optimizers for part in optimizer.chained_optimizers]
    for number, part in enumerate(parts):
        parameters = [p for group in part.optimizer.param_groups for p in group["params"]]
        for index, parameter in enumerate(parameters):
            found[f"master {number} {index}"] = parameter.detach().clone()
            for name, value in part.optimizer.state[parameter].items():
                found[f"{name} {number} {index}"] = torch.as_tensor(value).clone()
    return found


def checksum(learner: Learner) -> list[int]:
    """What a weight sync sums over this rank's live weights, as the whole of a tensor each."""
    return [
        box_checksum(weight, name, weight.shape, [(0, size) for size in weight.shape])
        for name, weight in learner.weights.items()
    ]


def refusal(work: Any) -> str:
    """What the error of `work()` says."""
    try:
        work()
    except MegarlError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was refused"


def one_step(learner: Learner, plan: MinibatchPlan) -> dict[str, float]:
    scores = learner.score(Batch(0, (plan,), 0, 7))
    return {**scores, **learner.step(plan)}


def plain(
    learner: Learner, plan: MinibatchPlan
) -> tuple[list[dict[str, float]], dict[str, Tensor]]:
    """Steps with everything on the device all the time."""
    return [one_step(learner, plan) for _ in range(STEPS)], state_of(learner)


def refusals(learner: Learner, plan: MinibatchPlan, folder: Path) -> dict[str, str]:
    """What is told of verbs while everything is away."""
    return {
        "score": refusal(lambda: learner.score(Batch(0, (plan,), 0, 7))),
        "step": refusal(lambda: learner.step(plan)),
        "logprobs": refusal(lambda: learner.logprobs([((1,), (2,))])),
        "publish": refusal(lambda: learner.publish(1, [])),
        "save": refusal(lambda: learner.save(str(folder / "refused"), 1)),
        "load": refusal(lambda: learner.load(str(folder / "refused"))),
        "twice": refusal(lambda: learner.offload(["weights"])),
        "unknown": refusal(lambda: learner.onload(["moments"])),
    }


def sent_away(
    learner: Learner, plan: MinibatchPlan, folder: Path
) -> tuple[list[dict[str, float]], dict[str, Tensor], dict[str, Any]]:
    """The same steps, with parts offloaded and onloaded around each; once saved and loaded too."""
    parameters = dict(learner.policy.model.named_parameters())
    objects = {name: id(parameter) for name, parameter in parameters.items()}
    bytes_here: dict[str, list[int]] = {"all": [], "none": [], "weights": []}
    metrics, told = [], {}
    learner.offload(PARTS)
    for step in range(STEPS):
        bytes_here["none"].append(learner.memory()["learner_state_bytes"])
        if step == 1:
            told = refusals(learner, plan, folder)
            learner.onload(["weights", "optimizer"])
            learner.save(str(folder / "saved"), 1)
            learner.offload(["optimizer", "weights"])
            learner.onload(["optimizer", "weights"])
            assert learner.load(str(folder / "saved")) == 1
            learner.onload(["gradients"])
        else:
            learner.onload(PARTS)
        metrics.append(one_step(learner, plan))
        bytes_here["all"].append(learner.memory()["learner_state_bytes"])
        learner.offload(["gradients", "optimizer"])
        bytes_here["weights"].append(learner.memory()["learner_state_bytes"])
        learner.logprobs([((1, 2), (3, 4))])
        before = checksum(learner)
        learner.offload(["weights"])
        learner.onload(["weights"])
        assert checksum(learner) == before
        told["misses one"] = refusal(lambda: learner.step(plan))
        learner.offload(["weights"])
    learner.onload(PARTS)
    seen = {
        "told": told,
        "bytes": bytes_here,
        "same objects": objects == {name: id(p) for name, p in parameters.items()},
        "views of the buffers": are_views(learner),
        "generation": learner.state.generation,
        "memory": learner.memory(),
    }
    return metrics, state_of(learner), seen


def are_views(learner: Learner) -> bool:
    """Whether parameters, and weights by the layout's names, lie in Megatron's buffers still."""
    model = learner.policy.model
    buffers = [each.param_data for each in (*model.buffers, *model.expert_parallel_buffers)]
    spans = [(data.data_ptr(), data.data_ptr() + data.nbytes) for data in buffers]
    no_parameters = {buffer.data_ptr() for _, buffer in model.named_buffers()}  # the router's bias
    weights = [w for w in learner.weights.values() if w.data_ptr() not in no_parameters]
    tensors = [*model.parameters(), *weights]
    return all(any(start <= t.data_ptr() < end for start, end in spans) for t in tensors)


def learner_of(case: dict[str, Any], folder: Path, name: str, rank: int) -> Learner:
    store = f"file://{folder / (case['name'] + name + '.store')}"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=4)
    return Learner(Config.model_validate(case["config"]), folder)


def run_case(case: dict[str, Any], folder: Path, rank: int) -> None:
    plan = decode(MinibatchPlan, json.dumps([case["plan"]]).encode())
    expected_metrics, expected = plain(learner_of(case, folder, "plain", rank), plan)
    stop()
    learner = learner_of(case, folder, "away", rank)
    metrics, state, seen = sent_away(learner, plan, folder / case["name"])
    stop()
    seen["same metrics"] = metrics == expected_metrics
    seen["differing"] = [n for n in expected if not torch.equal(state[n], expected[n])]
    seen["names"] = sorted(expected)
    seen["trained"] = [m["loss/total"] for m in metrics]
    (folder / f"{case['name']}.{rank}.json").write_text(json.dumps(seen))


def main() -> None:
    """Every case."""
    folder, rank = Path(sys.argv[1]), int(os.environ["RANK"])
    torch.set_num_threads(1)
    for case in json.loads((folder / "cases.json").read_text()):
        run_case(case, folder, rank)


if __name__ == "__main__":
    main()
