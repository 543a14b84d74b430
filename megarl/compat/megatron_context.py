"""Megatron's order of packed tokens over context-parallel ranks.

Owns which tokens a rank holds: each sequence is cut into 2 x ranks chunks of one length, and rank r
has the r-th from its beginning and the r-th from its end, so that causal attention costs each rank
the same. Needs torch alone.

For: megatron-core 0.19.2, `_get_thd_freqs_on_this_cp_rank` and `get_batch_on_this_cp_rank`. Ends
with that order.
"""

from __future__ import annotations

import torch
from torch import Tensor


# T packed tokens, K sequences
def context_places(cu_seqlens: Tensor, ranks: int, rank: int) -> Tensor:
    """Which of T packed tokens context rank `rank` of `ranks` holds, int64 [T / ranks], in order.

    `cu_seqlens` [K + 1] are the ends of the sequences. Raises ValueError where there is more than
    one rank and a length is no multiple of 2 x `ranks`.

    >>> context_places(torch.tensor([0, 4, 12]), 2, 0).tolist()
    [0, 3, 4, 5, 10, 11]
    >>> context_places(torch.tensor([0, 4, 12]), 2, 1).tolist()
    [1, 2, 6, 7, 8, 9]
    """
    lengths, total = cu_seqlens.diff(), int(cu_seqlens[-1])
    if ranks == 1:
        return torch.arange(total, device=cu_seqlens.device)
    if (lengths % (2 * ranks)).any():
        raise ValueError(f"sequences of {lengths.tolist()} tokens are not cut over {ranks} ranks")
    mine = lengths // ranks
    within = torch.arange(total // ranks, device=cu_seqlens.device)
    within = within - torch.repeat_interleave(cu_seqlens[:-1] // ranks, mine)
    start, chunk = (torch.repeat_interleave(each, mine) for each in (cu_seqlens[:-1], mine // 2))
    first = torch.where(within < chunk, rank, 2 * (ranks - 1) - rank)
    return start + first * chunk + within
