"""The policy of a run as a Hugging Face folder, for transformers, SGLang and others to load.

Owns what the run's settings say of it. Every rank writes its own intervals: `checkpoint_files`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch.distributed as dist
from torch import Tensor

from megarl.actor.shape import ModelShape
from megarl.config.schema import Config
from megarl.learner.distributed import Ranks
from megarl.reshard.layout import Layout
from megarl.weight_sync.checkpoint_files import CheckpointWriter


def export(
    config: Config,
    shape: ModelShape,
    layout: Layout,
    ranks: Ranks,
    weights: Mapping[str, Tensor],
    folder: Path,
) -> int:
    """Write the weights to `folder`, with the tokenizer and config.json of `actor.model`.

    `layout` is the learner's, of `shape`; `weights` are this rank's. Returns the bytes of the files
    of weights. Collective over all ranks, which all reach the folder. Raises CheckpointError, on
    every rank, where it exists or cannot be written; nothing is left then.
    """
    settings, precision = config.export, config.learner.precision
    dtype = precision.params if settings.dtype == "auto" else settings.dtype
    writer = CheckpointWriter(
        shape, layout, ranks.rank, weights, dtype, Path(config.actor.model), dist.group.WORLD
    )
    writer.write(folder)
    return writer.num_bytes
