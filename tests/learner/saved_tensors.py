"""What a learner's checkpoint holds, read without a learner."""

from __future__ import annotations

from pathlib import Path

import torch
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.metadata import TensorStorageMetadata


def saved_tensors(path: Path, vocab_size: int) -> dict[str, torch.Tensor]:
    """Every tensor of a torch_dist checkpoint, whole, the optimizer's among them.

    Rows of embedding and head beyond the vocabulary are left out: layouts differ in them.
    """
    reader = dcp.FileSystemReader(path)
    found = reader.read_metadata().state_dict_metadata
    state = {
        name: torch.empty(facts.size, dtype=facts.properties.dtype)
        for name, facts in found.items()
        if isinstance(facts, TensorStorageMetadata)
    }
    dcp.load(state, storage_reader=reader, no_dist=True)
    ends = ("embedding", "output_layer")
    return {
        name: tensor[:vocab_size] if any(end in name for end in ends) else tensor
        for name, tensor in state.items()
    }
