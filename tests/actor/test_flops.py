"""The estimate of operations against those that torch counts in Hugging Face's forward pass."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from megarl.actor.flops import SequenceFlops
from megarl.actor.shape import read_shape
from tests.learner import tiny_models

NUM_TOKENS = 24


def counted(model: Any) -> int:
    """Operations of a forward pass, without the tables of rotary embeddings."""
    model.set_experts_implementation("eager")  # torch does not count what is grouped
    ids = torch.randint(0, tiny_models.VOCAB_SIZE, (1, NUM_TOKENS))
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model(ids)
    tables = (
        sum(operations.values())
        for module, operations in counter.get_flop_counts().items()
        if module.endswith("rotary_emb")
    )
    return int(counter.get_total_flops() - sum(tables))


@pytest.mark.parametrize("family", sorted(tiny_models.FAMILIES))
def test_estimate_is_what_torch_counts_in_a_forward_pass(family: str, tmp_path: Path) -> None:
    model = tiny_models.make(family, tmp_path)
    flops = SequenceFlops.of(read_shape(tmp_path))
    # Eager attention multiplies all pairs of tokens, a causal one half of them.
    expected = NUM_TOKENS * (flops.per_token + flops.per_prediction)
    expected += 2 * flops.per_pair * NUM_TOKENS**2
    assert counted(model) == expected
