"""The distributed optimizer's state for a checkpoint, copied once where no rank shares it.

Megatron describes the state of a whole data-parallel group: it fills buffers with zeros, copies the
rank's shards into them, gathers, joins and copies again, and saves a copy of parts of that. Where
the group is one rank, which holds all of it, each tensor is copied once instead. Nothing else
differs.

For: megatron-core 0.19.2. Ends when its distributed optimizer does so for a group of one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor


@contextmanager
def copied_once() -> Iterator[None]:
    """Inside, sharded states of optimizers hold copies that nothing else does, if they can."""
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    original = DistributedOptimizer.get_parameter_state_dp_zero

    def state(self: Any, *args: Any, empty_data: bool = False, **kwargs: Any) -> Any:
        if empty_data or self.data_parallel_group.size() > 1:
            return original(self, *args, empty_data=empty_data, **kwargs)
        return _state(self)

    DistributedOptimizer.get_parameter_state_dp_zero = state
    try:
        yield
    finally:
        DistributedOptimizer.get_parameter_state_dp_zero = original


class _Numbers:
    """One kind of state of a buffer's parameters: a slice that is a parameter's is its numbers."""

    def __init__(self, optimizer: Any, key: str, parameters: Mapping[tuple[int, int], Any]) -> None:
        self._optimizer, self._key, self._parameters = optimizer, key, parameters

    def __getitem__(self, span: slice) -> Tensor:
        parameter = self._parameters[span.start, span.stop]
        shard = self._optimizer._get_main_param_and_optimizer_states(parameter)[self._key]
        own = shard.detach().to("cpu", torch.float32, copy=True).view(-1)
        assert len(own) == span.stop - span.start, "a group of one holds whole parameters"
        return own


def _state(optimizer: Any) -> dict[Any, Any]:
    """As `get_parameter_state_dp_zero` returns it."""
    state: dict[Any, Any] = {"buckets_coalesced": True}
    for index, ranges in enumerate(optimizer.gbuf_ranges):
        (dtype,) = ranges
        buffer = optimizer.buffers[index]
        spans = {(start, end): p for p, (start, end, *_) in buffer.param_index_map.items()}
        keys = ("param", *optimizer.optimizer_state_keys)
        numbers = {key: _Numbers(optimizer, key, spans) for key in keys}
        state[index] = {dtype: {**numbers, "numel_unpadded": buffer.numel_unpadded}}
    return state
