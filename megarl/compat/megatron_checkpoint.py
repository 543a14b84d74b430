"""Megatron-Core's torch_dist checkpoints as megarl uses them: synchronous, in the ranks themselves.

Owns what a save or a load needs beyond Megatron's own calls. Knows nothing of megarl's learner.

For: megatron-core 0.19.2. Ends when its synchronous save starts no multiprocessing Manager.
"""

from __future__ import annotations

import queue
from collections.abc import Mapping
from typing import Any


def content() -> dict[str, Any]:
    """What a checkpoint is made of, for Megatron's `metadata` arguments; a new dict for each call.

    The only optimizer format that loads into other TP, PP and DP sizes and is not deprecated.
    Megatron writes the data-parallel group of the moment into the dict that it is given.
    """
    return {"distrib_optim_sharding_type": "fully_reshardable", "chained_optim_avoid_prefix": True}


def write_in_process() -> None:
    """Have synchronous saves pass their results through a queue of this process.

    Megatron's own is a Manager's, meant for saves in the background: it costs about 4 s once, and
    its process outlives a rank that is killed. Source: strategies/filesystem_async.py.
    """
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    if filesystem_async._results_queue is None:
        filesystem_async._results_queue = queue.Queue()


def keep_settings(optimizer: Any, state: Mapping[Any, Any]) -> None:
    """Give the loaded optimizer `state` the settings that `optimizer` was built with, in place.

    Megatron restores learning rates, betas and decay with the moments; a run that goes on with
    other settings would silently keep the old ones, or fail to match its parameter groups. Only the
    number of steps is kept. `optimizer` is a ChainedOptimizer.
    """
    parts = optimizer.chained_optimizers
    states = [state] if len(parts) == 1 else [state[index] for index in range(len(parts))]
    for part, part_state in zip(parts, states, strict=True):
        loaded = part_state["optimizer"]
        steps = {group["step"] for group in loaded["param_groups"] if "step" in group}
        assert len(steps) <= 1, steps  # every parameter takes every step
        kept = [dict(group) for group in part.optimizer.state_dict()["param_groups"]]
        for group in kept:
            group.pop("params")
            group.update(zip(["step"], steps, strict=False))
        loaded["param_groups"] = kept
