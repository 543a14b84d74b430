"""From the last stage's hidden states to log-probs, only where a log-prob is needed.

Owns the choice of positions, before the output layer runs, and that no more logits exist at one
time than MAX_LOGITS. Knows nothing of losses or samples. Import it after `megatron_cpu.install()`.

T packed tokens of this microbatch, R of them predict a token whose log-prob is needed, H hidden.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from megarl.learner.logprobs import vocab_parallel_logprobs
from megarl.planning.logits import MAX_LOGITS


@dataclass(frozen=True, slots=True, eq=False)
class Predictions:
    """What is asked of one microbatch: positions_R and their targets_R, both int64.

    `num_tokens` is T; log-probs are at `temperature`, over the first `vocab_size` columns.
    """

    positions_R: Tensor
    targets_R: Tensor
    num_tokens: int
    temperature: float
    vocab_size: int
    tp_rank: int
    tp_group: Any

    @classmethod
    def where(
        cls, mask_T: Tensor, targets_T: Tensor, device: torch.device, **meaning: Any
    ) -> Predictions:
        """Those of the positions in `mask_T`, which is on the CPU: to count on a GPU is to wait."""
        positions_R = mask_T.nonzero().squeeze(1)
        return cls(
            positions_R=positions_R.to(device, non_blocking=True),
            targets_R=targets_T[positions_R].to(device, non_blocking=True),
            num_tokens=len(mask_T),
            **meaning,
        )


def predict(
    *,
    hidden_states: Tensor,
    output_layer: Any,
    output_weight: Tensor | None,
    context: Predictions,
    scale_logits: Any,
    **unused: object,
) -> dict[str, Tensor]:
    """{"logp": log-probs of the targets, "entropy": ...}, fp32 [T], in nats; 0 where none is asked.

    Megatron's `output_processor`: called by GPTModel on the last stage in place of its output
    layer. `hidden_states` is [T, 1, H], or this tensor rank's part of it under sequence
    parallelism. Where the logits would pass MAX_LOGITS they are made in parts, and once more in the
    backward pass. Collective over the tensor ranks.
    """
    is_scattered = output_layer.sequence_parallel
    if is_scattered:
        # The output layer sums the gradient of its input over tensor ranks then, for all to see.
        hidden_states = gather_from_sequence_parallel_region(
            hidden_states, tensor_parallel_output_grad=False, group=output_layer.tp_group
        )

    def part(hidden_R1H: Tensor, targets_R: Tensor) -> tuple[Tensor, Tensor]:
        output_layer.sequence_parallel = False
        try:
            logits_R1V, _ = output_layer(hidden_R1H, weight=output_weight)
        finally:
            output_layer.sequence_parallel = is_scattered
        return vocab_parallel_logprobs(
            scale_logits(logits_R1V).squeeze(1),
            targets_R,
            temperature=context.temperature,
            vocab_size=context.vocab_size,
            tp_rank=context.tp_rank,
            tp_group=context.tp_group,
        )

    hidden_R1H = hidden_states.index_select(0, context.positions_R)
    num_rows = max(1, MAX_LOGITS // output_layer.output_size_per_partition)
    if len(hidden_R1H) <= num_rows:
        values = part(hidden_R1H, context.targets_R)
    else:
        pairs = zip(hidden_R1H.split(num_rows), context.targets_R.split(num_rows), strict=True)
        parts = [
            checkpoint(part, *pair, use_reentrant=False, preserve_rng_state=False) for pair in pairs
        ]
        values = tuple(torch.cat(each) for each in zip(*parts, strict=True))
    zeros_T = values[0].new_zeros(context.num_tokens)
    logp_T, entropy_T = (zeros_T.index_copy(0, context.positions_R, each_R) for each_R in values)
    return {"logp": logp_T, "entropy": entropy_T}  # of several tensors, Megatron takes a dict only
