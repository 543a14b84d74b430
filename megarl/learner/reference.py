"""The reference of a run: which frozen model it is, and where its numbers come from.

Owns the settings' meaning. How it is parked and takes the policy's place is `megarl.reference`'s.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from functools import partial

from torch import Tensor

from megarl.config.schema import Config
from megarl.learner.distributed import Ranks
from megarl.learner.model import load_checkpoint
from megarl.learner.scoring import ReferencePolicy
from megarl.reference.reference import FrozenModel
from megarl.reshard.layout import Layout

log = logging.getLogger(__name__)


def build_reference(
    config: Config, layout: Layout, ranks: Ranks, weights: Mapping[str, Tensor]
) -> ReferencePolicy:
    """Frozen `weights`, this rank's live ones, or `reference.model` in their layout.

    Raises ModelError where that checkpoint is not whole.
    """
    path, storage = config.reference.model, config.reference.storage
    load = partial(load_checkpoint, path, layout, ranks.rank, weights) if path else None
    reference = FrozenModel(weights, storage, load)
    log.info(
        "reference parked rank=%d storage=%s bytes=%d quantization_error=%.2e",
        ranks.rank,
        storage,
        reference.num_bytes,
        reference.quantization_error,
    )
    return reference
