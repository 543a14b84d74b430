"""One rank of the tests of `optimizer.offload_fraction`, over a pretended GPU.

Megatron offloads what says that it is on a GPU. Here every tensor says so, but for the copies that
it makes with `cpu()`, while it sorts what goes where: the arithmetic and the books are those of a
GPU, memory and streams are not. Reads FOLDER/cases.json; each rank writes
FOLDER/CASE.RANK.json.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megarl.config.schema import Config
from megarl.learner.distributed import stop
from megarl.learner.learner import Learner
from tests.learner.parity_ranks import plan_of

STEPS = 3


class Host(Tensor):
    """A tensor in host memory; all others pretend to be on a GPU."""


@contextmanager
def gpu() -> Iterator[None]:
    """Tensors pretend."""
    names = ("is_cuda", "cpu", "pin_memory")
    before = {name: Tensor.__dict__.get(name) for name in names}
    tensor: Any = Tensor
    tensor.is_cuda = property(lambda self: not isinstance(self, Host))
    tensor.cpu = lambda self: self.as_subclass(Host)
    tensor.pin_memory = lambda self: self
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                delattr(tensor, name)
            else:
                setattr(tensor, name, value)


def pretend() -> None:
    """Have Megatron's hybrid optimizer see a GPU where it sorts parameters."""
    from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer

    sort = HybridDeviceOptimizer._get_sub_optimizer_param_groups

    def sort_on_gpu(self: Any, fraction: float) -> Any:
        with gpu():
            return sort(self, fraction)

    HybridDeviceOptimizer._get_sub_optimizer_param_groups = sort_on_gpu


def learner_of(config: dict[str, Any], folder: Path, name: str, rank: int, size: int) -> Learner:
    store = f"file://{folder / (name + '.store')}"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=size)
    return Learner(Config.model_validate(config), folder)


def hosted(learner: Learner) -> tuple[int, int]:
    """Elements whose masters and moments are in host memory, and all of this rank's."""
    inside = total = 0
    for part in learner.optimizer.megatron.chained_optimizers:
        inner = part.optimizer
        total += sum(p.numel() for group in inner.param_groups for p in group["params"])
        inside += sum(p.numel() for p in getattr(inner, "gpu_params_map_cpu_copy", {}))
    return inside, total


def run_case(case: dict[str, Any], folder: Path, rank: int) -> None:
    plan, size, name = plan_of(case["plan"]), case["world_size"], case["name"]
    plain = case["config"]
    hybrid = json.loads(json.dumps(plain))
    hybrid["learner"]["optimizer"]["offload_fraction"] = case["fraction"]

    learner = learner_of(plain, folder, f"{name}-plain", rank, size)
    expected = [learner.step(plan) for _ in range(STEPS)]
    weights = {n: w.clone() for n, w in learner.weights.items()}
    stop()

    learner = learner_of(hybrid, folder, f"{name}-hybrid", rank, size)
    found = [learner.step(plan) for _ in range(STEPS)]
    seen: dict[str, Any] = {"hosted": hosted(learner), "metrics": [expected, found]}
    seen["off"] = max(
        float((w.float() - weights[n].float()).norm() / weights[n].float().norm())
        for n, w in learner.weights.items()
    )
    stop()
    (folder / f"{name}.{rank}.json").write_text(json.dumps(seen))


def main() -> None:
    """Every case."""
    folder, rank = Path(sys.argv[1]), int(os.environ["RANK"])
    torch.set_num_threads(1)
    from megarl.compat import megatron_cpu

    megatron_cpu.install()
    pretend()
    for case in json.loads((folder / "cases.json").read_text()):
        if rank < case["world_size"]:
            run_case(case, folder, rank)


if __name__ == "__main__":
    main()
