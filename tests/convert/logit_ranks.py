"""One rank of real GPTModels that load, by Megatron's own loader, what megarl has converted.

Its argument is a folder with cases.json, a list of {"hf", "made", "mesh", "first"}: for each it
writes its part of the logits of TOKENS, where it has one, to logits-<case>-<rank>.npy there.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from megarl.actor.shape import read_shape
from megarl.compat.megatron_checkpoint import content
from megarl.reshard.mesh import LearnerMesh
from tests.reshard.megatron_cases import Case
from tests.reshard.megatron_models import build_case, logits_of


def run(case: Case, made: str, out: Path) -> None:
    """Build, load and ask one case."""
    from megatron.core import dist_checkpointing, parallel_state

    chunks, held = build_case(case, out)
    with torch.no_grad():
        for tensor in held.values():
            tensor.fill_(float("nan"))  # what is not loaded shows
        state = {f"{v}": c.sharded_state_dict(metadata=content()) for v, c in enumerate(chunks)}
        loaded = dist_checkpointing.load(state, made)
        for v, chunk in enumerate(chunks):
            chunk.load_state_dict(loaded[f"{v}"])
        logits = logits_of(chunks, case)
    if logits is not None:
        np.save(out.with_suffix(".npy"), logits.numpy())
    parallel_state.destroy_model_parallel()


def main() -> None:
    """All cases."""
    rank, ranks, folder = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), Path(sys.argv[1])
    store = dist.FileStore(str(folder / "store"), ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
    for number, told in enumerate(json.loads((folder / "cases.json").read_text())):
        mesh = LearnerMesh(**told["mesh"])
        case = Case(read_shape(Path(told["hf"])), mesh, first=told["first"])
        run(case, told["made"], folder / f"logits-{number}-{rank}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
