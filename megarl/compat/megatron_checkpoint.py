"""Megatron-Core's torch_dist checkpoints as megarl uses them: written in the ranks themselves.

Owns what a save or a load needs beyond Megatron's own calls. Knows nothing of megarl's learner.

Megatron's own way of saving in the background (AsyncCallsQueue) is not used. It forks the rank, and
what it takes for a copy is none on a CPU: a tensor that is a whole storage is saved as it lies
there, and shared memory stays shared with the fork, so that later steps end up in the checkpoint.
Its results come through a Manager whose process outlives a rank that is killed, an error of
writing as the name of its class, and a disk that is full at the last file leaves the other ranks
waiting for rank 0. What is used is Megatron's plan and its writer of files; `Prepared` has them.

For: megatron-core 0.19.2. Ends when it saves copies of CPU tensors in the background.
"""

from __future__ import annotations

import queue
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any


def content() -> dict[str, Any]:
    """What a checkpoint is made of, for Megatron's `metadata` arguments; a new dict for each call.

    The only optimizer format that loads into other TP, PP and DP sizes and is not deprecated.
    Megatron writes the data-parallel group of the moment into the dict that it is given.
    """
    return {"distrib_optim_sharding_type": "fully_reshardable", "chained_optim_avoid_prefix": True}


class Prepared:
    """A checkpoint of which this rank has planned its files and copied their numbers.

    `write` may run in any thread, while the tensors change; rank 0 then calls `finish` with what
    all ranks have written.
    """

    def __init__(self, writer: Any, metadata: Any, live: Iterable[Any]) -> None:
        on_cpu = (tensor for tensor in live if tensor.device.type == "cpu")
        kept = {tensor.untyped_storage().data_ptr() for tensor in on_cpu}
        buckets = writer.preload_tensors(writer.write_buckets, True)
        self._writer, self._metadata = writer, metadata
        self._buckets = [_copied(bucket, kept) for bucket in buckets]
        self.names = tuple(name for _, name, _ in buckets)
        """The files that this rank writes."""

    def write(self) -> list[Any]:
        """Write this rank's files, down to the disk, and let go of the numbers.

        Returns what `finish` needs of it. Raises OSError or RuntimeError.
        """
        transforms = [self._writer.transforms] if hasattr(self._writer, "transforms") else []
        written = []
        for number, bucket in enumerate(self._buckets):
            _, result = self._writer.write_preloaded_data(
                transforms, number, bucket, None, None, use_fsync=True
            )
            if isinstance(result, BaseException):
                raise result
            written += result
        self._buckets = []
        return written

    def finish(self, written: list[list[Any]]) -> None:
        """Write what makes the files a checkpoint: on rank 0, of what each rank has written.

        Raises OSError or RuntimeError.
        """
        from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config

        self._writer.finish(self._metadata, written)
        save_config(CheckpointingConfig("torch_dist", 1), self._writer.checkpoint_dir)


def prepare(state: dict[str, Any], folder: Path, live: Iterable[Any]) -> Prepared:
    """Plan a checkpoint of the sharded `state` in `folder`, and copy what this rank writes of it.

    Collective over all ranks. `live` are the tensors that may change meanwhile: of those that are
    saved as they lie in memory, copies are made. Raises as `dist_checkpointing.save` does.
    """
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy

    planned: list[tuple[Any, Any]] = []

    class Planning(TorchDistSaveShardedStrategy):
        """Keeps the writer and the metadata that the request would be finished with."""

        def _get_save_and_finalize_callbacks(
            self, writer: Any, state: Any, async_strategy: str
        ) -> Any:
            planned.append((writer, state[1]))
            return super()._get_save_and_finalize_callbacks(writer, state, async_strategy)

    write_in_process()
    dist_checkpointing.save(
        state,
        str(folder),
        Planning(),
        content_metadata=content(),
        async_sharded_save=True,
        async_strategy="mcore",
    )
    ((writer, metadata),) = planned
    return Prepared(writer, metadata, live)


def write_in_process() -> None:
    """Have the next save pass its results through a queue of this process, of its own.

    Megatron's own is a Manager's, meant for saves in another process: it costs about 4 s once, and
    its process outlives a rank that is killed. Source: strategies/filesystem_async.py.
    """
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    filesystem_async._results_queue = queue.Queue()


def _copied(bucket: Any, live: set[int]) -> Any:
    """One file's numbers, none of them in storages that are still in use."""
    path, name, (objects, tensors) = bucket
    own = [
        (item, tensor.clone() if tensor.untyped_storage().data_ptr() in live else tensor)
        for item, tensor in tensors
    ]
    return path, name, (objects, own)


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
