"""A learner without a model, for the service's own ways with errors; toy_ranks runs it."""

import os
import time

import torch
import torch.distributed as dist

from megarl.errors import CheckpointError
from megarl.learner import service

FAILS_ALONE, HANGS, FAILS_AFTER = 1, 2, 3  # what `score` does, by the batch's version


class Toy:
    def __init__(self, config, run_dir, mark):
        dist.init_process_group("gloo")
        self.rank, self.mark = dist.get_rank(), mark

    def info(self):
        size = dist.get_world_size()
        return {"tp": size, "pp": 1, "dp": 1, "world_size": size, "version": 0}

    def score(self, batch):
        self.mark("together")
        if self.rank == 1 and batch.version == FAILS_ALONE:
            raise ValueError("the toy fails before it joins the others")
        if self.rank == 1 and batch.version == HANGS:
            time.sleep(600)
        total = torch.ones(1)
        dist.all_reduce(total)
        if self.rank == 1 and batch.version == FAILS_AFTER:
            raise ValueError("the toy fails after it joined the others")
        return {"mismatch/mean_ratio": float(total), "mismatch/k3_kl": float("nan")}

    def step(self, minibatch):
        raise ValueError("the toy cannot step")

    def logprobs(self, sequences):
        return [[-0.5] * len(response) for _, response in sequences]

    def save(self, path, version):
        raise CheckpointError(f"{path}: the toy saves nothing")

    def close(self):
        self.mark("closing")


if __name__ == "__main__":
    if os.environ["RANK"] == os.environ.get("TOY_DIES_EARLY"):
        os._exit(9)
    service.main(build=Toy)
