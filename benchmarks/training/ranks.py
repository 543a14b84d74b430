"""One rank of the timed steps: megarl's, a bare Megatron loop's, and that of padded batches.

    torchrun --nproc-per-node 2 -m benchmarks.training.ranks SETTINGS.json

Rank 0 prints one JSON object. Every step is timed from a barrier on, on the slowest rank; the ways
take turns, so that a busy machine slows them alike.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"

import torch
import torch.distributed as dist

from benchmarks.training.model import VOCAB_SIZE
from megarl.actor.flops import SequenceFlops
from megarl.buffer.groupfile import write_group
from megarl.buffer.schedule import ScheduleShape, make_schedule
from megarl.config.schema import Config
from megarl.learner.learner import Learner
from megarl.types import Group, MinibatchPlan, Prompt, Sample, SampleRef

WARM_UP = 2


def timed(work: Callable[[], Any]) -> float:
    """Seconds of `work()` on the slowest rank."""
    dist.barrier()
    start = time.perf_counter()
    work()
    took = torch.tensor([time.perf_counter() - start], dtype=torch.float64)
    dist.all_reduce(took, op=dist.ReduceOp.MAX)
    return float(took)


def write_samples(
    learner: Learner, lengths: list[tuple[int, int]], folder: Path
) -> list[SampleRef]:
    """Random samples of these lengths in group files; behavior log-probs are the learner's own."""
    rng = random.Random(1)
    pairs = [
        tuple(tuple(rng.randrange(VOCAB_SIZE) for _ in range(size)) for size in both)
        for both in lengths
    ]
    logprobs = learner.logprobs(pairs)
    refs = []
    for index, ((prompt, response), values) in enumerate(zip(pairs, logprobs, strict=True)):
        name = f"g{index:04d}"
        sample = Sample(f"{name}-0", name, name, prompt).extended(response, values, version=0)
        path = folder / f"{name}.safetensors"
        if learner.ranks.rank == 0:
            write_group(folder, Group(name, Prompt(name, prompt, "", ""), (sample,)))
        size, advantage = len(prompt) + len(response), rng.uniform(-1.0, 1.0)
        ref = SampleRef(sample.sample_id, str(path), 0, size, len(response), advantage, version=0)
        refs.append(ref)
    dist.barrier()
    return refs


def everywhere(learner: Learner, plan: MinibatchPlan) -> None:
    """megarl's step with the output layer on every position, as the bare loop has it."""
    from megarl.learner import head

    where = head.Predictions.where

    def whole(mask_T: torch.Tensor, *args: Any, **meaning: Any) -> Any:
        return where(torch.ones_like(mask_T), *args, **meaning)

    head.Predictions.where = whole  # type: ignore[method-assign]
    try:
        learner.step(plan)
    finally:
        head.Predictions.where = where  # type: ignore[method-assign]


def main() -> None:
    """Build both, check that their gradients agree, and time their steps in turns."""
    settings = json.loads(Path(sys.argv[1]).read_text())
    folder = Path(sys.argv[1]).parent
    torch.set_num_threads(1)
    learner = Learner(Config.model_validate(settings["config"]), folder)
    from benchmarks.training import bare

    loop = bare.BareMegatron(learner)
    refs = write_samples(learner, settings["lengths"], folder / "groups")
    max_tokens = learner.config.learner.max_tokens_per_microbatch
    flops = SequenceFlops.of(learner.shape)
    plan = make_schedule(refs, ScheduleShape(learner.ranks.mesh.dp, max_tokens, flops))
    microbatches, _ = learner._pack(plan)
    longest = max(ref.num_tokens for ref in refs)
    packed = [bare.packed(each) for each in microbatches]
    padded = bare.padded(microbatches, longest, max_tokens)
    ways: dict[str, Callable[[], Any]] = {
        "megarl": lambda: learner.step(plan),
        "bare": lambda: loop.step(packed, plan.num_loss_tokens),
        "megarl_everywhere": lambda: everywhere(learner, plan),
        "padded": lambda: loop.step(padded, plan.num_loss_tokens),
    }
    norms = {"megarl": learner.step(plan)["grad_norm"], "bare": ways["bare"]()}
    for _ in range(WARM_UP - 1):
        for way in ways.values():
            timed(way)
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(settings["steps"]):
        names = list(ways)[turn % len(ways) :] + list(ways)[: turn % len(ways)]
        for name in names:
            seconds[name].append(timed(ways[name]))
    if dist.get_rank() == 0:
        tokens = sum(ref.num_tokens for ref in refs)
        facts = {"microbatches": len(plan.schedule[0]), "tokens": tokens, "longest": longest}
        print(json.dumps({"seconds": seconds, "grad_norms": norms, **facts}))
    learner.close()


if __name__ == "__main__":
    main()
