"""One of two ranks with all groups of a mesh: prints its threads of Gloo's, and what groups sum."""

from __future__ import annotations

import json
from pathlib import Path

import torch
import torch.distributed as dist

from megarl.learner import distributed
from megarl.reshard.mesh import LearnerMesh


def main() -> None:
    """Start, sum over several groups at once, tell."""
    ranks = distributed.start(LearnerMesh(tp=2))
    groups = [None, ranks.tp_group, dist.new_group([0, 1]), dist.new_group([0])]
    mine = [group for group in groups if group is None or dist.get_rank(group) >= 0]
    sums = [torch.full((1000,), float(1 + dist.get_rank())) for _ in mine]
    works = [
        dist.all_reduce(each, group=group, async_op=True)
        for each, group in zip(sums, mine, strict=True)
    ]
    for work in works:
        work.wait()
    names = [
        task.joinpath("comm").read_text().strip() for task in Path("/proc/self/task").iterdir()
    ]
    told = [
        names.count("gloo_tcp_loop"),
        names.count("pt_gloo_runloop"),
        [s.mean().item() for s in sums],
    ]
    if dist.get_rank() == 0:
        print(json.dumps(told))
    distributed.stop()
