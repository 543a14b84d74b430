"""Forward and backward passes of packed microbatches through Megatron's schedules.

Owns the way from microbatches to log-probs, to loss sums and to gradients, and which of their
tokens a context-parallel rank computes: callers have whole microbatches only. Knows nothing of
files, optimizers or verbs. Import it after `megatron_cpu.install()`.

T packed tokens, C of them on this context-parallel rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from megarl.compat.megatron_context import context_places
from megarl.learner.chunks import Chunks
from megarl.learner.distributed import Ranks
from megarl.learner.head import Predictions, predict
from megarl.learner.loss import LossWeights, policy_loss
from megarl.learner.packing import PackedMicrobatch, aligned_length

Values = dict[str, Tensor]  # what `head.predict` makes


@dataclass(frozen=True, slots=True)
class Policy:
    """A model on this rank, and what its log-probs mean."""

    model: Chunks
    ranks: Ranks
    vocab_size: int
    temperature: float

    def predictions(self, part: PackedMicrobatch) -> Predictions:
        """What the output layer is asked for: the part's loss tokens, and no others."""
        return Predictions.where(
            part.loss_mask_T,
            part.targets_T,
            self.ranks.device,
            temperature=self.temperature,
            vocab_size=self.vocab_size,
            tp_rank=self.ranks.tp_rank,
            tp_group=self.ranks.tp_group,
        )


@dataclass(frozen=True, slots=True, eq=False)
class Scores:
    """What the loss compares the policy with, per microbatch; on the last pipeline stage only."""

    old_logp_T: Tensor
    reference_logp_T: Tensor | None


def forward_logprobs(
    policy: Policy, microbatches: Sequence[PackedMicrobatch], length: int
) -> list[tuple[Tensor, Tensor]]:
    """(logp_T, entropy_T) of each microbatch, fp32; on the last pipeline stage, else empty.

    They are those of the loss tokens, and 0 elsewhere.

    Collective over the tensor, context and pipeline ranks of one data-parallel rank. Uses whatever
    weights the model holds now, and leaves no gradient.
    """

    def collect(
        part: PackedMicrobatch, _: int, values: Values, non_loss_data: bool = True
    ) -> tuple[Tensor, Tensor]:
        return values["logp"], values["entropy"]

    policy.model.train(False)
    with torch.no_grad():
        scored = _run(policy, microbatches, length, collect, forward_only=True)
        return [
            _whole(policy.ranks, microbatch, *parts_C)
            for microbatch, parts_C in zip(microbatches, scored, strict=False)
        ]


def _whole(
    ranks: Ranks, microbatch: PackedMicrobatch, logp_C: Tensor, entropy_C: Tensor
) -> tuple[Tensor, Tensor]:
    """Both [T], from all context-parallel ranks."""
    size = ranks.mesh.cp
    if size == 1:
        return logp_C, entropy_C
    mine = torch.stack([logp_C, entropy_C], dim=1)
    parts = [torch.empty_like(mine) for _ in range(size)]
    dist.all_gather(parts, mine, group=ranks.cp_group)
    places = [context_places(microbatch.cu_seqlens, size, rank) for rank in range(size)]
    back_T = torch.cat(places).argsort().to(mine.device)
    logp_T, entropy_T = torch.cat(parts)[back_T].unbind(dim=1)
    return logp_T, entropy_T


def accumulate_gradients(
    policy: Policy,
    microbatches: Sequence[PackedMicrobatch],
    length: int,
    scores: Sequence[Scores],
    weights: LossWeights,
    num_loss_tokens: int,
    all_reduce: bool = False,
) -> Tensor:
    """Add d(loss)/d(weights) of the whole minibatch to the gradients, reduced over all ranks.

    Returns the loss sums of this data-parallel rank's microbatches (`LossSums.stacked`, float64),
    zeros but on the last pipeline stage. `num_loss_tokens` is the minibatch's, over all ranks.
    Collective over all ranks. Gradients end in this rank's shard of the distributed optimizer; with
    `all_reduce`, whole on every data-parallel rank.
    """

    ranks = policy.ranks

    def loss(part: PackedMicrobatch, index: int, values: Values) -> tuple[Tensor, Tensor, Tensor]:
        logp_C, entropy_C = values["logp"], values["entropy"]
        mine = context_places(part.cu_seqlens, ranks.mesh.cp, ranks.cp_rank)
        old_T, reference_T = scores[index].old_logp_T, scores[index].reference_logp_T
        sums = policy_loss(
            logp_C,
            entropy_C,
            old_logp_T=old_T[mine],
            advantage_T=part.advantage_T,
            loss_mask_T=part.loss_mask_T,
            reference_logp_T=None if reference_T is None else reference_T[mine],
            weights=weights,
        )
        tokens = torch.zeros((), dtype=torch.int, device=logp_C.device)
        return sums.total / num_loss_tokens, tokens, sums.stacked()

    for part in policy.model.parts:
        part.force_all_reduce = all_reduce  # of what is reduced while gradients are computed
    policy.model.train()
    found = _run(policy, microbatches, length, loss, forward_only=False, all_reduce=all_reduce)
    sums = sum(found, start=torch.zeros(5, dtype=torch.float64, device=ranks.device))
    if ranks.mesh.cp > 1:
        dist.all_reduce(sums, group=ranks.cp_group)
    return sums


def _run(
    policy: Policy,
    microbatches: Sequence[PackedMicrobatch],
    length: int,
    on_values: Callable[..., Any],
    forward_only: bool,
    all_reduce: bool = False,
) -> list[Any]:
    """Megatron's schedule over `microbatches`; what `on_values` gave for each, on the last stage.

    `length` is that of every microbatch where there is a pipeline, whose stages send fixed shapes.
    `on_values` is given the part of the microbatch that this rank computes.
    """
    ranks, chunks = policy.ranks, policy.model.parts

    def forward_step(iterator: Any, model: Any) -> tuple[Any, Callable[..., Any]]:
        index, microbatch = next(iterator)
        part = microbatch.part(ranks.mesh.cp, ranks.cp_rank)
        asked = policy.predictions(part)
        part = part.to(ranks.device)
        output = model(
            input_ids=part.tokens_T[None],
            position_ids=part.positions_T[None],
            attention_mask=None,
            packed_seq_params=_packed_params(part, len(microbatch.tokens_T)),
            output_processor=predict,
            output_processor_context=asked,
        )
        return output, partial(on_values, part, index)

    iterators = [enumerate(microbatches) for _ in chunks]
    results: list[Any] = get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=iterators if len(chunks) > 1 else iterators[0],
        model=chunks,
        num_microbatches=len(microbatches),
        seq_length=length,
        micro_batch_size=1,
        forward_only=forward_only,
        collect_non_loss_data=forward_only,
        force_all_reduce=all_reduce,
    )
    return results if ranks.is_last_stage else []


def _packed_params(microbatch: PackedMicrobatch, length: int) -> Any:
    longest = aligned_length(microbatch.longest, 128)  # RoPE tables are cached by this number
    if longest == length:
        longest += 128  # Megatron takes a table as long as all tokens for one of packed positions
    return PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=microbatch.cu_seqlens,
        cu_seqlens_kv=microbatch.cu_seqlens,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
    )
