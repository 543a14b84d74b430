"""`megarl check fp8` on the learner's ranks: one golden batch in bf16 and in FP8, compared.

Owns how the two precisions are computed by one learner, with the same weights, and what is summed
of them. Run as a module it is the launcher or, with torch's RANK set, a rank. What the figures mean
is `config/fp8_protocol.py`'s. Writes RUN/found.json.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import logging
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from megarl import run_paths
from megarl.config.fp8_protocol import Comparison, Likeness
from megarl.config.load import read_config
from megarl.config.precision import PrecisionConfig
from megarl.config.schema import Config
from megarl.errors import ConfigError, MegarlError
from megarl.learner import agent
from megarl.learner.golden import Golden, draw, recorded
from megarl.learner.learner import Learner
from megarl.learner.loss import LossWeights
from megarl.learner.packing import check_plan, pack_minibatch
from megarl.learner.parent import leave
from megarl.learner.phases import PhaseFile, write_json

MODULE = "megarl.learner.fp8_check"
REQUEST, FOUND = "request.json", "found.json"

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Request:
    """Group files of the golden batch, none to draw one; whether FP8 is emulated on CPUs."""

    groups: tuple[str, ...] = ()
    emulate: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class Pass:
    """What one precision gave: response log-probs by sample, gradients by parameter (this rank)."""

    logprobs: list[list[float]]
    gradients: dict[str, Tensor]


def check(config: Config, request: Request, run_dir: Path) -> Comparison:
    """Both precisions on the golden batch. Collective over all ranks.

    Raises ConfigError where this process cannot compute in FP8 as set.
    """
    precision = config.learner.precision
    if request.emulate:
        if torch.cuda.is_available():
            raise ConfigError("--emulate is for CPUs; this machine has a GPU: check it without")
        config = _with_precision(config, PrecisionConfig(params="bf16"))
    learner = Learner(config, run_dir)
    golden = _golden(learner, request, run_dir)
    in_fp8 = _emulated if request.emulate else _as_built
    with _without_fp8(learner):
        bf16 = _pass(learner, golden)
    with in_fp8(learner, precision):
        if precision.fp8_recipe == "delayed":
            _pass(learner, golden)  # the scales of a first pass are of no pass before it
        fp8 = _pass(learner, golden)
    found = _compare(learner, golden, bf16, fp8, request)
    learner.close()
    return found


def _golden(learner: Learner, request: Request, run_dir: Path) -> Golden:
    """The recorded batch, or one that rank 0 draws and all read."""
    data_parallel = learner.ranks.mesh.dp
    if request.groups:
        return recorded(request.groups, data_parallel)
    folder = run_dir / "golden"
    if learner.ranks.rank == 0:
        limit = learner.config.learner.max_tokens_per_microbatch
        draw(folder, learner.shape.vocab_size, min(limit, learner.shape.max_positions))
    dist.barrier()
    paths = [str(path) for path in sorted(folder.iterdir())]
    return dataclasses.replace(recorded(paths, data_parallel), behavior=None)


def _pass(learner: Learner, golden: Golden) -> Pass:
    """Log-probs, and the gradient of the mean negative log-prob of loss tokens."""
    logprobs = learner.logprobs(golden.sequences)
    passes = learner._passes
    check_plan(golden.plan, learner.ranks.mesh.dp)
    microbatches, length = pack_minibatch(golden.plan, learner.ranks.dp_rank, learner.multiples)
    device = learner.ranks.device
    own = passes.forward_logprobs(learner.policy, microbatches, length)
    kept = [logp_T.to(device) for logp_T, _ in own]  # a ratio of 1: its gradient is the log-prob's
    empty = [microbatch.behavior_logp_T.to(device) for microbatch in microbatches]
    scores = [passes.Scores(old_T, None) for old_T in kept or empty]
    learner.optimizer.clear()
    weights = LossWeights(clip_low=0.2, clip_high=0.2, entropy_coef=0.0, kl_coef=0.0)
    passes.accumulate_gradients(
        learner.policy,
        microbatches,
        length,
        scores,
        weights,
        golden.plan.num_loss_tokens,
        all_reduce=True,
    )
    named = learner.policy.model.named_parameters()
    return Pass(logprobs, {name: each.main_grad.detach().cpu().clone() for name, each in named})


@contextlib.contextmanager
def _without_fp8(learner: Learner) -> Iterator[None]:
    """Megatron opens FP8 by the field of its configuration, at each forward pass."""
    config = learner.policy.model.config
    before, config.fp8 = config.fp8, None
    try:
        yield
    finally:
        config.fp8 = before


def _as_built(learner: Learner, precision: PrecisionConfig) -> AbstractContextManager[object]:
    return contextlib.nullcontext()


def _emulated(learner: Learner, precision: PrecisionConfig) -> AbstractContextManager[object]:
    from megarl.compat.megatron_fp8_emulation import Rounding, emulated

    if precision.fp8_recipe == "delayed":
        raise ConfigError("delayed scales are of steps before, so one batch cannot emulate them")
    rounding = Rounding(precision.fp8_recipe, hybrid=precision.fp8 == "hybrid")
    layers = (precision.fp8_first_layers_bf16, precision.fp8_last_layers_bf16)
    return emulated(learner.policy.model, rounding, layers)


def _compare(
    learner: Learner, golden: Golden, bf16: Pass, fp8: Pass, request: Request
) -> Comparison:
    pairs = [
        (low, high, rollout)
        for mask, lows, highs, rollouts in zip(
            golden.masks, bf16.logprobs, fp8.logprobs, golden.behavior or bf16.logprobs, strict=True
        )
        for counted, low, high, rollout in zip(mask, lows, highs, rollouts, strict=True)
        if counted
    ]
    count = len(pairs)
    apart = [abs(low - high) for low, high, _ in pairs]

    def off(which: int) -> float | None:
        if golden.behavior is None:
            return None
        return sum(abs(pair[which] - pair[2]) for pair in pairs) / count

    return Comparison(
        num_tokens=count,
        bf16_loss=-sum(low for low, _, _ in pairs) / count,
        fp8_loss=-sum(high for _, high, _ in pairs) / count,
        gradients=_gradients(learner, bf16, fp8),
        mean_abs_logprob=sum(apart) / count,
        max_abs_logprob=max(apart),
        rollout_bf16=off(0),
        rollout_fp8=off(1),
        emulated=request.emulate,
    )


def _gradients(learner: Learner, bf16: Pass, fp8: Pass) -> dict[str, Likeness]:
    """By layer, over all ranks, each element counted once."""
    from megatron.core import parallel_state
    from megatron.core.transformer.transformer_layer import TransformerLayer

    module: Any = learner.policy.model
    layers = {
        f"{name}.": f"layer {layer.layer_number - 1}"
        for name, layer in module.named_modules()
        if isinstance(layer, TransformerLayer)
    }
    sums: dict[str, Likeness] = {}
    for name, parameter in module.named_parameters():
        experts = not getattr(parameter, "allreduce", True)
        replica = (
            parallel_state.get_expert_data_parallel_rank()
            if experts
            else parallel_state.get_data_parallel_rank(with_context_parallel=True)
        )
        cut = getattr(parameter, "tensor_model_parallel", False)
        tensor_rank = (
            parallel_state.get_expert_tensor_parallel_rank() if experts else learner.ranks.tp_rank
        )
        if replica or (tensor_rank and not cut):
            continue
        layer = next((text for prefix, text in layers.items() if name.startswith(prefix)), name)
        low, high = bf16.gradients[name].double(), fp8.gradients[name].double()
        each = Likeness(
            float((low * high).sum()), float(low.square().sum()), float(high.square().sum())
        )
        sums[layer] = sums.get(layer, Likeness(0.0, 0.0, 0.0)) + each
    everywhere: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, sums)
    total: dict[str, Likeness] = {}
    for some in everywhere:
        for layer, each in some.items():
            total[layer] = total.get(layer, Likeness(0.0, 0.0, 0.0)) + each
    return dict(sorted(total.items(), key=lambda item: _order(item[0])))


def _order(layer: str) -> tuple[int, int, str]:
    """Embedding, layers by number, then the rest."""
    if layer.startswith("layer "):
        return 1, int(layer.removeprefix("layer ")), ""
    return (0 if "embedding" in layer else 2), 0, layer


def _with_precision(config: Config, precision: PrecisionConfig) -> Config:
    learner = config.learner.model_copy(update={"precision": precision})
    return config.model_copy(update={"learner": learner})


def main(argv: Sequence[str] | None = None) -> int:
    """Entry: the launcher of the ranks, or one of them."""
    if "RANK" in os.environ:
        _rank(argv)
    return agent.main(argv, MODULE)


def _rank(argv: Sequence[str] | None) -> NoReturn:
    parser = argparse.ArgumentParser(prog=f"python -m {MODULE}", description=__doc__)
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--run-dir", type=Path, required=True)
    options = parser.parse_args(argv)
    phases = PhaseFile(options.run_dir / run_paths.LOGS, int(os.environ["RANK"]))
    phases.begin("check fp8", 0)
    try:
        given = json.loads((options.run_dir / REQUEST).read_text(encoding="utf-8"))
        request = Request(tuple(given["groups"]), given["emulate"])
        found = check(read_config(options.config), request, options.run_dir)
    except MegarlError as error:
        phases.fail(f"{type(error).__name__}: {error}", lost_peer=False)
        log.error("%s", error)
        leave(1)
    if os.environ["RANK"] == "0":
        write_json(options.run_dir / FOUND, dataclasses.asdict(found))
    leave(0)


if __name__ == "__main__":
    sys.exit(main())
