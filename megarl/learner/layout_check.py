"""Program, under torchrun: the gradients of one minibatch in several layouts, against the first's.

    torchrun --nproc-per-node N -m megarl.learner.layout_check FOLDER TRIALS.json

Owns the comparison, by elements of the model's tensors as `reshard` names them. Which layouts are
tried, and what their differences mean, is `launch/check_parallel.py`'s. The trial of one rank
writes its gradients into FOLDER; others compare. Rank 0 writes FOLDER/NAME.result.json for each.
"""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from megarl.config.schema import Config
from megarl.learner import distributed
from megarl.learner.learner import Learner
from megarl.learner.loss import LossWeights
from megarl.learner.packing import PackedMicrobatch, pack_minibatch
from megarl.learner.wire import decode
from megarl.reshard.execute import slices
from megarl.reshard.layout import local_box
from megarl.types import MinibatchPlan

SMALLEST = "smallest"
OLD_LOGPROBS = "old-logprobs.json"
ENTROPY = 0.01  # a weight, so that its gradient is compared too
NOISE = 0.1  # nats between old log-probs and those of the smallest layout, so that some ratios clip

Array = np.ndarray[Any, Any]


def main(build: Callable[[Config, Path], Learner] = Learner) -> None:
    """Run every trial whose layout has this rank."""
    folder, rank = Path(sys.argv[1]), int(os.environ["RANK"])
    torch.set_num_threads(1)
    for trial in json.loads(Path(sys.argv[2]).read_text()):
        if rank < trial["ranks"]:
            run_trial(build, trial, folder, rank)


def run_trial(
    build: Callable[[Config, Path], Learner], trial: dict[str, Any], folder: Path, rank: int
) -> None:
    """One learner: its loss and gradients, and how far they are from the smallest layout's."""
    _join(folder / f"{trial['name']}.store", rank, trial["ranks"])
    learner = build(Config.model_validate(trial["config"]), folder)
    plan = decode(MinibatchPlan, json.dumps([trial["plan"]]).encode())
    if trial["name"] == SMALLEST:
        _keep_logprobs(learner, plan, folder)
    loss, found = _gradients(learner, plan, folder)
    if trial["name"] == SMALLEST:
        _keep_gradients(learner, found, folder)
    off = _differences(learner, found, folder)
    if rank == 0:
        result = {"loss": loss, "off": off}
        (folder / f"{trial['name']}.result.json").write_text(json.dumps(result))
    learner.close()
    distributed.stop()


def _join(store: Path, rank: int, ranks: int) -> None:
    """A process group of this trial's own; the learner finds it there."""
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    dist.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=ranks)


def _packed(learner: Learner, plan: MinibatchPlan) -> tuple[list[PackedMicrobatch], int]:
    return pack_minibatch(plan, learner.ranks.dp_rank, learner.multiples)


def _keep_logprobs(learner: Learner, plan: MinibatchPlan, folder: Path) -> None:
    """What every layout takes for the log-probs of the policy that made the samples."""
    from megarl.learner.passes import forward_logprobs

    microbatches, length = _packed(learner, plan)
    draw, old = torch.Generator().manual_seed(0), {}
    scored = forward_logprobs(learner.policy, microbatches, length)
    for microbatch, (logp_T, _) in zip(microbatches, scored, strict=True):
        for segment in microbatch.segments:
            logp = logp_T[segment.response].cpu()
            old[segment.key] = (logp + NOISE * torch.randn(len(logp), generator=draw)).tolist()
    (folder / OLD_LOGPROBS).write_text(json.dumps(old))


def _gradients(
    learner: Learner, plan: MinibatchPlan, folder: Path
) -> tuple[float, dict[str, Array]]:
    """The loss, and this rank's gradients, whole, by local names."""
    from megarl.learner.passes import Scores, accumulate_gradients

    old = json.loads((folder / OLD_LOGPROBS).read_text())
    microbatches, length = _packed(learner, plan)
    scores = []
    for microbatch in microbatches:
        old_T = torch.zeros(length)
        for segment in microbatch.segments:
            old_T[segment.response] = torch.tensor(old[segment.key])
        scores.append(Scores(old_T.to(learner.ranks.device), None))
    loss = learner.config.loss
    weights = LossWeights(loss.clip_low, loss.clip_high, ENTROPY)
    learner.optimizer.clear()
    sums = accumulate_gradients(
        learner.policy, microbatches, length, scores, weights, plan.num_loss_tokens, all_reduce=True
    )
    if not learner.ranks.reports:
        sums.zero_()
    dist.all_reduce(sums)
    named = learner.policy.model.named_parameters()
    found = {name: weight.main_grad.float().cpu().numpy() for name, weight in named}
    return float(sums[0]) / plan.num_loss_tokens, found


def _keep_gradients(learner: Learner, found: dict[str, Array], folder: Path) -> None:
    """The whole gradient of each tensor, from the one rank that has all."""
    shapes = {p.name: p.shape for p in learner.layout.table.parameters}
    whole: dict[str, Array] = {}
    for piece in learner.layout.rank(0).pieces:
        if piece.local in found:
            part = found[piece.local][slices(local_box(piece.box, piece.at))]
            tensor = whole.setdefault(piece.tensor, np.zeros(shapes[piece.tensor], np.float32))
            tensor[slices(piece.box)] = part.reshape(tensor[slices(piece.box)].shape)
    names = sorted(whole)
    for number, name in enumerate(names):
        np.save(folder / f"gradient-{number}.npy", whole[name])
    (folder / "gradients.json").write_text(json.dumps(names))


def _differences(learner: Learner, found: dict[str, Array], folder: Path) -> dict[str, float]:
    """By tensor, the relative L2 over every copy on every rank; infinity where it is not finite."""
    names = json.loads((folder / "gradients.json").read_text())
    index = {name: number for number, name in enumerate(names)}
    sums = torch.zeros(len(names), 2, dtype=torch.float64)
    for piece in learner.layout.rank(learner.ranks.rank).pieces:
        if piece.local not in found:
            continue  # a buffer, which has no gradient
        number = index[piece.tensor]
        whole = np.load(folder / f"gradient-{number}.npy", mmap_mode="r")
        there = np.asarray(whole[slices(piece.box)], np.float64)
        here = found[piece.local][slices(local_box(piece.box, piece.at))].astype(np.float64)
        sums[number, 0] += float(((here.reshape(there.shape) - there) ** 2).sum())
        sums[number, 1] += float((there**2).sum())
    sums = sums.to(learner.ranks.device)
    dist.all_reduce(sums)
    errors, sizes = sums.T.tolist()
    return {
        name: _relative(error, size) for name, error, size in zip(names, errors, sizes, strict=True)
    }


def _relative(error: float, size: float) -> float:
    if error == 0:
        return 0.0
    return math.sqrt(error / size) if size and math.isfinite(error) else math.inf


if __name__ == "__main__":
    main()
