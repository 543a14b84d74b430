"""One rank of the memory tests: learners of one model and mesh, each recomputing other activations.

Reads FOLDER/cases.json; each rank writes to FOLDER/CASE.RANK.json how far its gradients are from
those of the first of its variants, and the bytes that were found.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from megarl.config.schema import Config
from megarl.learner.distributed import stop
from megarl.learner.learner import Learner
from megarl.learner.loss import LossWeights
from megarl.learner.verbs import PARTS
from megarl.types import Batch
from tests.learner.parity_ranks import gradients, off_by, plan_of


class _Kept:
    """What autograd holds in place of a tensor; `held` counts those of its storage."""

    def __init__(self, tensor: Tensor, held: dict[int, _Held]) -> None:
        self.tensor, self._held = tensor, held
        storage = tensor.untyped_storage()
        self._key = storage._cdata
        held.setdefault(self._key, _Held(storage)).count += 1

    def __del__(self) -> None:
        self._held[self._key].count -= 1
        if not self._held[self._key].count:
            del self._held[self._key]


@dataclass
class _Held:
    """A storage of so many tensors that are saved for backward."""

    storage: torch.UntypedStorage
    count: int = 0


class SavedBytes:
    """While open, the most bytes that tensors saved for backward have, weights left out.

    Each storage counts once, and as large as it is when it is looked at.
    """

    def __init__(self, without: list[Tensor]) -> None:
        self._without = {tensor.untyped_storage()._cdata for tensor in without}
        self._held: dict[int, _Held] = {}
        self.most = 0

    def __enter__(self) -> SavedBytes:
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._keep, lambda kept: kept.tensor)
        self._hooks.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._hooks.__exit__(*error)

    def _keep(self, tensor: Tensor) -> _Kept:
        kept = _Kept(tensor, self._held)
        counted = (each.storage for key, each in self._held.items() if key not in self._without)
        self.most = max(self.most, sum(storage.nbytes() for storage in counted))
        return kept


def state_bytes(learner: Learner) -> dict[str, int]:
    """Bytes of weights, gradients and optimizer state of this rank, as torch holds them."""
    found = [state_of(learner.policy.model, learner.optimizer.megatron)]
    if learner.critic is not None:
        found.append(state_of(*learner.critic.tensors))
    return {part: sum(each[part] for each in found) for part in found[0]}


def state_of(model: Any, optimizer: Any) -> dict[str, int]:
    """Of one model. Found by the tensors themselves, as autograd and Megatron hold them."""
    weights, gradients, state = {}, {}, {}
    for parameter in model.parameters():
        weights |= storage_of(parameter)
        gradients |= storage_of(parameter.main_grad)
    for part in optimizer.chained_optimizers:
        for parameter, kept in part.optimizer.state.items():
            for tensor in (parameter, *kept.values()):
                state |= storage_of(tensor)
    own = {name: size for name, size in state.items() if name not in weights}
    parts = {"weights": weights, "gradients": gradients, "optimizer": own}
    return {name: sum(storages.values()) for name, storages in parts.items()}


def storage_of(tensor: Tensor) -> dict[int, int]:
    """Its storage's identity and bytes."""
    storage = tensor.untyped_storage()
    return {storage._cdata: storage.nbytes()}


def run_case(case: dict[str, Any], folder: Path, rank: int) -> None:
    """Every variant of a case, against its first."""
    expected: dict[str, np.ndarray] = {}
    found: dict[str, Any] = {}
    for name, config in case["variants"].items():
        store = f"file://{folder / (case['name'] + '.' + name + '.store')}"
        dist.init_process_group("gloo", init_method=store, rank=rank, world_size=case["world_size"])
        learner = Learner(Config.model_validate(config), folder)
        plan, weights = plan_of(case["plan"]), LossWeights(**case["weights"])
        with SavedBytes(list(learner.weights.values())) as saved:
            grads = gradients(learner, plan, weights)
        expected = expected or grads
        off = max(off_by(grads, expected).values())
        found[name] = {"off": off, "saved": saved.most}
        learner.score(Batch(0, (plan,), 0, 7))
        learner.step(plan)
        found[name] |= {
            "state": state_bytes(learner),
            "state by parts": {part: learner.state.num_bytes([part]) for part in PARTS},
            "names": [each for each, _ in learner.policy.model.named_parameters()],
            "metrics": learner.peaks(),
            "frozen": 0 if learner._reference is None else learner._reference.num_bytes,
        }
        stop()
    (folder / f"{case['name']}.{rank}.json").write_text(json.dumps(found))


def main() -> None:
    """Run every case whose mesh has this rank."""
    folder, rank = Path(sys.argv[1]), int(os.environ["RANK"])
    torch.set_num_threads(1)
    for case in json.loads((folder / "cases.json").read_text()):
        if rank < case["world_size"]:
            run_case(case, folder, rank)


if __name__ == "__main__":
    main()
