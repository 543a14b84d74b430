"""Log-probs of whole responses that are given as tokens: of parity at start, of a sync's probe.

Owns the way from sequences to microbatches and back. Knows nothing of group files or losses.
Import it after `megatron_cpu.install()`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from megarl.learner.packing import Multiples, pack_sequences
from megarl.learner.passes import Policy, forward_logprobs


def sequence_logprobs(
    policy: Policy,
    sequences: Sequence[tuple[Sequence[int], Sequence[int]]],
    max_tokens: int,
    multiples: Multiples,
) -> list[list[float]]:
    """Log-probs of the responses of (prompt, response) pairs, on every rank.

    Collective over all ranks. Raises ShapeError where a sequence is longer than `max_tokens` or has
    no prompt.
    """
    ranks = policy.ranks
    microbatches, length = pack_sequences(
        sequences, max_tokens, ranks.mesh.dp, ranks.dp_rank, multiples
    )
    starts = [0]
    for _, response in sequences:
        starts.append(starts[-1] + len(response))
    found = torch.zeros(starts[-1], dtype=torch.float32, device=ranks.device)
    scored = forward_logprobs(policy, microbatches, length) if microbatches else []
    if ranks.reports:
        for microbatch, (logp_T, _) in zip(microbatches, scored, strict=True):
            for segment in microbatch.segments:
                at = int(segment.key)
                found[starts[at] : starts[at + 1]] = logp_T[segment.response]
    dist.all_reduce(found)
    values = found.tolist()
    return [values[start:end] for start, end in zip(starts, starts[1:], strict=False)]
