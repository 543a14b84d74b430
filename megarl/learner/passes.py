"""Forward and backward passes of packed microbatches through Megatron's schedules.

Owns the way from microbatches to log-probs, to loss sums and to gradients. Knows nothing of files,
optimizers or verbs. Import it after `megatron_cpu.install()`.

T packed tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from megarl.learner.distributed import Ranks
from megarl.learner.head import Predictions, predict
from megarl.learner.loss import LossWeights, policy_loss
from megarl.learner.packing import PackedMicrobatch, aligned_length

Values = dict[str, Tensor]  # what `head.predict` makes


@dataclass(frozen=True, slots=True)
class Policy:
    """A model on this rank, and what its log-probs mean."""

    model: Any
    ranks: Ranks
    vocab_size: int
    temperature: float

    def predictions(self, microbatch: PackedMicrobatch) -> Predictions:
        """What the output layer is asked for: the microbatch's loss tokens, and no others."""
        return Predictions.where(
            microbatch.loss_mask_T,
            microbatch.targets_T,
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

    Collective over the tensor and pipeline ranks of one data-parallel rank. Uses whatever weights
    the model holds now, and leaves no gradient.
    """

    def collect(
        microbatch: PackedMicrobatch, _: int, values: Values, non_loss_data: bool = True
    ) -> tuple[Tensor, Tensor]:
        return values["logp"], values["entropy"]

    policy.model.eval()
    with torch.no_grad():
        return _run(policy, microbatches, length, collect, forward_only=True)


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

    Returns the loss sums of this rank's microbatches (`LossSums.stacked`, float64), zeros but on
    the last pipeline stage. `num_loss_tokens` is the minibatch's, over all ranks. Collective over
    all ranks. Gradients end in this rank's shard of the distributed optimizer; with `all_reduce`,
    whole on every data-parallel rank.
    """

    def loss(
        microbatch: PackedMicrobatch, index: int, values: Values
    ) -> tuple[Tensor, Tensor, Tensor]:
        logp_T, entropy_T = values["logp"], values["entropy"]
        sums = policy_loss(
            logp_T,
            entropy_T,
            old_logp_T=scores[index].old_logp_T,
            advantage_T=microbatch.advantage_T,
            loss_mask_T=microbatch.loss_mask_T,
            reference_logp_T=scores[index].reference_logp_T,
            weights=weights,
        )
        tokens = torch.zeros((), dtype=torch.int, device=logp_T.device)
        return sums.total / num_loss_tokens, tokens, sums.stacked()

    policy.model.train()
    sums = _run(policy, microbatches, length, loss, forward_only=False, all_reduce=all_reduce)
    zeros = torch.zeros(5, dtype=torch.float64, device=policy.ranks.device)
    return sum(sums, start=zeros)


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
    """

    def forward_step(iterator: Any, model: Any) -> tuple[Any, Callable[..., Any]]:
        index, microbatch = next(iterator)
        asked = policy.predictions(microbatch)
        microbatch = microbatch.to(policy.ranks.device)
        output = model(
            input_ids=microbatch.tokens_T[None],
            position_ids=microbatch.positions_T[None],
            attention_mask=None,
            packed_seq_params=_packed_params(microbatch),
            output_processor=predict,
            output_processor_context=asked,
        )
        return output, partial(on_values, microbatch, index)

    results: list[Any] = get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=enumerate(microbatches),
        model=[policy.model],
        num_microbatches=len(microbatches),
        seq_length=length,
        micro_batch_size=1,
        forward_only=forward_only,
        collect_non_loss_data=forward_only,
        force_all_reduce=all_reduce,
    )
    return results if policy.ranks.is_last_stage else []


def _packed_params(microbatch: PackedMicrobatch) -> Any:
    longest = aligned_length(microbatch.longest, 128)  # RoPE tables are cached by this number
    if longest == len(microbatch.tokens_T):
        longest += 128  # Megatron takes a table as long as all tokens for one of packed positions
    return PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=microbatch.cu_seqlens,
        cu_seqlens_kv=microbatch.cu_seqlens,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
    )
