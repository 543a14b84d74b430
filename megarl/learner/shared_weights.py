"""A CPU learner's weights in shared memory, so that servers of its node read them in place.

Owns whether they go there, and the name of a start's shared memory. How they are read and proved is
`weight_sync/`'s.
"""

from __future__ import annotations

import logging
import os
from typing import Any

from megarl.compat import megatron_buffers
from megarl.config.schema import Config
from megarl.errors import LearnerError, WeightSyncError
from megarl.learner.distributed import Ranks
from megarl.nodes import RUN_ID_VARIABLE
from megarl.weight_sync.transport.in_place import live_memory
from megarl.weight_sync.transport.shared import Arena

log = logging.getLogger(__name__)


def run_id() -> str:
    """The name of this start."""
    return os.environ.get(RUN_ID_VARIABLE, f"pid{os.getppid()}")


def share(config: Config, model: Any, ranks: Ranks) -> Arena | None:
    """Move the weights of `model` (Megatron's DistributedDataParallel) into shared memory.

    None, with nothing changed, on a GPU, where `weight_sync.shared_weights` is off, where weights
    must be able to leave (placement.mode = "colocated"), and, with a warning, where they cannot be
    moved.
    """
    if ranks.device.type != "cpu" or not config.weight_sync.shared_weights:
        return None
    if config.placement.mode == "colocated":
        return None
    memory = None
    try:
        memory = live_memory(run_id(), ranks.rank, megatron_buffers.parameter_bytes(model))
        megatron_buffers.move_parameters(model, memory.data)
    except (WeightSyncError, LearnerError) as error:
        log.warning("weights stay in private memory rank=%d why=%s", ranks.rank, error)
        if memory is not None:
            memory.close()
        return None
    return memory
