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
from megarl.learner.value_head import predict_values
from megarl.learner.value_loss import value_loss

Values = dict[str, Tensor]  # what `head.predict` or `value_head.predict_values` makes


@dataclass(frozen=True, slots=True)
class Policy:
    """A model on this rank, and what its log-probs mean."""

    model: Chunks
    ranks: Ranks
    vocab_size: int
    temperature: float

    processor = staticmethod(predict)

    def asked(self, part: PackedMicrobatch) -> Predictions:
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


@dataclass(frozen=True, slots=True)
class ValueModel:
    """The critic's model on this rank."""

    model: Chunks
    ranks: Ranks

    processor = staticmethod(predict_values)

    def asked(self, part: PackedMicrobatch) -> None:
        """Nothing: its output layer is small, and runs on all tokens."""


@dataclass(frozen=True, slots=True, eq=False)
class ValueTargets:
    """What the critic's loss compares a microbatch's values with; on the last stage only."""

    old_value_T: Tensor
    return_T: Tensor


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

    scored = _forward(policy, microbatches, length, collect)
    return [(logp_T, entropy_T) for logp_T, entropy_T in scored]


def forward_values(
    critic: ValueModel, microbatches: Sequence[PackedMicrobatch], length: int
) -> list[Tensor]:
    """value_T of each microbatch, fp32 [T]; on the last pipeline stage, else empty.

    At each token it is the value of the text that ends with it. Collective as `forward_logprobs`.
    """

    def collect(
        part: PackedMicrobatch, _: int, values: Values, non_loss_data: bool = True
    ) -> tuple[Tensor]:
        return (values["value"],)

    return [value_T for (value_T,) in _forward(critic, microbatches, length, collect)]


def _forward(
    network: Policy | ValueModel,
    microbatches: Sequence[PackedMicrobatch],
    length: int,
    collect: Callable[..., tuple[Tensor, ...]],
) -> list[tuple[Tensor, ...]]:
    """What `collect` took of each microbatch's values, all of its tokens."""
    network.model.train(False)
    with torch.no_grad():
        found = _run(network, microbatches, length, collect, forward_only=True)
        return [
            _whole(network.ranks, microbatch, *parts_C)
            for microbatch, parts_C in zip(microbatches, found, strict=False)
        ]


def _whole(ranks: Ranks, microbatch: PackedMicrobatch, *values_C: Tensor) -> tuple[Tensor, ...]:
    """Each [T], from all context-parallel ranks."""
    size = ranks.mesh.cp
    if size == 1:
        return values_C
    mine = torch.stack(values_C, dim=1)
    parts = [torch.empty_like(mine) for _ in range(size)]
    dist.all_gather(parts, mine, group=ranks.cp_group)
    places = [context_places(microbatch.cu_seqlens, size, rank) for rank in range(size)]
    back_T = torch.cat(places).argsort().to(mine.device)
    return torch.cat(parts)[back_T].unbind(dim=1)


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

    return _accumulate(policy, microbatches, length, loss, 5, all_reduce)


def accumulate_value_gradients(
    critic: ValueModel,
    microbatches: Sequence[PackedMicrobatch],
    length: int,
    targets: Sequence[ValueTargets],
    clip: float,
    num_loss_tokens: int,
    all_reduce: bool = False,
) -> Tensor:
    """As `accumulate_gradients`, of the critic's loss; returns `ValueSums.stacked`."""
    ranks = critic.ranks

    def loss(part: PackedMicrobatch, index: int, values: Values) -> tuple[Tensor, Tensor, Tensor]:
        mine = context_places(part.cu_seqlens, ranks.mesh.cp, ranks.cp_rank)
        sums = value_loss(
            values["value"],
            old_value_T=targets[index].old_value_T[mine],
            return_T=targets[index].return_T[mine],
            loss_mask_T=part.loss_mask_T,
            clip=clip,
        )
        tokens = torch.zeros((), dtype=torch.int, device=sums.loss.device)
        return sums.loss / num_loss_tokens, tokens, sums.stacked()

    return _accumulate(critic, microbatches, length, loss, 2, all_reduce)


def _accumulate(
    network: Policy | ValueModel,
    microbatches: Sequence[PackedMicrobatch],
    length: int,
    loss: Callable[..., tuple[Tensor, Tensor, Tensor]],
    num_sums: int,
    all_reduce: bool,
) -> Tensor:
    """The sums that `loss` gives last, over all microbatches; its gradients are accumulated."""
    ranks = network.ranks
    for part in network.model.parts:
        part.force_all_reduce = all_reduce  # of what is reduced while gradients are computed
    network.model.train()
    found = _run(network, microbatches, length, loss, forward_only=False, all_reduce=all_reduce)
    sums = sum(found, start=torch.zeros(num_sums, dtype=torch.float64, device=ranks.device))
    if ranks.mesh.cp > 1:
        dist.all_reduce(sums, group=ranks.cp_group)
    return sums


def _run(
    network: Policy | ValueModel,
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
    ranks, chunks = network.ranks, network.model.parts

    def forward_step(iterator: Any, model: Any) -> tuple[Any, Callable[..., Any]]:
        index, microbatch = next(iterator)
        part = microbatch.part(ranks.mesh.cp, ranks.cp_rank)
        asked = network.asked(part)
        part = part.to(ranks.device)
        output = model(
            input_ids=part.tokens_T[None],
            position_ids=part.positions_T[None],
            attention_mask=None,
            packed_seq_params=_packed_params(part, len(microbatch.tokens_T)),
            output_processor=network.processor,
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
