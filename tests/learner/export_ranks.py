"""One of four ranks that load Hugging Face folders, export them, train, and export again.

Its argument is CASES.json. Beside it are then NAME-v0 and NAME-v1, the exports, NAME-other, which
is version 0 in the other one of bf16 and fp32, and NAME.json: the bytes that each rank has read,
log-probs after the step, and what of refused exports was told.
"""

from __future__ import annotations

import json
import os
import resource
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from megarl.actor.parameters import block_table
from megarl.config.layouts import learner_mesh
from megarl.config.schema import Config
from megarl.errors import CheckpointError
from megarl.learner import model
from megarl.learner.distributed import stop
from megarl.learner.learner import Learner
from megarl.learner.wire import decode
from megarl.types import MinibatchPlan
from tests.reshard.learner_slices import megatron_slices

VOCAB_DIVISOR = 128
SMALL_BYTES = 4096


class Counted:
    """An array of a file that counts the bytes that are read of it."""

    read_bytes = 0

    def __init__(self, array: Any) -> None:
        self._array = array

    def __getitem__(self, index: Any) -> Any:
        part = self._array[index]
        Counted.read_bytes += part.nbytes
        return part


def counting(mapped: Callable[..., dict[str, Any]]) -> Callable[..., dict[str, Any]]:
    return lambda *given: {name: Counted(array) for name, array in mapped(*given).items()}


def exported(learner: Learner, folder: Path) -> list[str]:
    """The tensors of this rank that are not, bit for bit, what plain slicing of an export gives."""
    stored: dict[str, np.ndarray] = {}
    for path in folder.glob("*.safetensors"):
        for name, tensor in load_file(path).items():
            bits = torch.int16 if tensor.dtype is torch.bfloat16 else tensor.dtype
            stored[name] = tensor.view(bits).numpy()
    table = block_table(learner.shape).parameters
    assert sorted(stored) == sorted(name for p in table for name in p.stored_names())
    arrays = {
        p.name: np.stack([stored[n] for n in p.stored_names()]) if p.stacked else stored[p.name]
        for p in table
    }
    mesh, rank = learner_mesh(learner.config), dist.get_rank()
    wanted = megatron_slices(learner.shape, mesh, rank, arrays, VOCAB_DIVISOR)
    assert wanted.keys() == learner.weights.keys()
    differing = []
    for name, weight in learner.weights.items():
        bits = weight.view(torch.int16) if weight.dtype is torch.bfloat16 else weight
        if not np.array_equal(bits.numpy(), wanted[name]):
            differing.append(name)
    return differing


def refusal(work: Callable[[], object]) -> str:
    """What is told by the CheckpointError of `work()`."""
    try:
        work()
    except CheckpointError as error:
        return str(error)
    return "nothing was refused"


def refused(learner: Learner, path: str) -> dict[str, str]:
    """Exports to a folder that is there, below a file, and where rank 3 has no room."""
    told = {
        "there": refusal(lambda: learner.export(f"{path}-v0")),
        "below a file": refusal(lambda: learner.export(f"{path}-v0/config.json/v1")),
    }
    if dist.get_rank() == 3:
        resource.setrlimit(resource.RLIMIT_FSIZE, (SMALL_BYTES, resource.RLIM_INFINITY))
    told["full"] = refusal(lambda: learner.export(f"{path}-full"))
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    return told


def run_case(case: dict[str, Any], folder: Path, rank: int) -> None:
    path = folder / case["name"]
    store = f"file://{path}.store"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=4)
    Counted.read_bytes = 0
    learner = Learner(Config.model_validate(case["config"]), folder)
    read: list[int] = [0] * 4
    dist.all_gather_object(read, Counted.read_bytes)
    num_bytes = learner.export(f"{path}-v0")
    assert not exported(learner, Path(f"{path}-v0"))
    own = learner.config
    dtype = "fp32" if own.learner.precision.params == "bf16" else "bf16"
    settings = own.export.model_copy(update={"dtype": dtype})
    learner.config = own.model_copy(update={"export": settings})
    learner.export(f"{path}-other")
    learner.config = own
    told = refused(learner, str(path))
    learner.step(decode(MinibatchPlan, json.dumps([case["plan"]]).encode()))
    Path(f"{path}-v1.partial").mkdir(exist_ok=True)  # as a killed export leaves one
    (Path(f"{path}-v1.partial") / "model.safetensors").touch()
    dist.barrier()
    learner.export(f"{path}-v1")
    differing = exported(learner, Path(f"{path}-v1"))
    assert not differing, differing
    logprobs = learner.logprobs(case["sequences"])
    if rank == 0:
        seen = {"read": read, "bytes": num_bytes, "logprobs": logprobs, "told": told}
        path.with_name(f"{path.name}.json").write_text(json.dumps(seen))
    stop()


def main() -> None:
    """Every case."""
    cases = Path(sys.argv[1])
    torch.set_num_threads(1)
    model.map_tensors = counting(model.map_tensors)
    for case in json.loads(cases.read_text()):
        run_case(case, cases.parent, int(os.environ["RANK"]))


if __name__ == "__main__":
    main()
