"""One optimizer step as a plain Megatron-Core loop does it, on packed or on padded batches.

Its loss is the advantage times the negative log-prob, by GPTModel's own cross entropy over every
position. Tensors are ready before a step; nothing is read, checked, counted or logged. Import it
after the learner is built, which joins the ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.gpt import GPTModel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from megarl.compat.megatron_layers import block_spec
from megarl.learner.learner import Learner
from megarl.learner.packing import PackedMicrobatch
from megarl.learner.transformer import transformer_config
from megarl.reshard.megatron import padded_vocab_size


@dataclass(frozen=True, eq=False)
class Microbatch:
    """[B, S] tokens and targets, the weight of each position's loss, and how rows are packed."""

    tokens: Tensor
    targets: Tensor
    positions: Tensor
    weights: Tensor
    packed: Any = None


class BareMegatron:
    """A copy of the learner's model with Megatron's DDP and optimizer, in fp32, on a CPU."""

    def __init__(self, learner: Learner) -> None:
        shape, settings = learner.shape, learner.config.learner
        config = transformer_config(shape, settings, True)
        model = GPTModel(
            config=config,
            transformer_layer_spec=block_spec(config, shape.num_layers),
            vocab_size=padded_vocab_size(shape.vocab_size, learner.ranks.mesh.tp),
            max_sequence_length=shape.max_positions,
            share_embeddings_and_output_weights=shape.tie_embeddings,
            position_embedding_type="rope",
            rotary_base=shape.rope_theta,
        )
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.copy_(learner.weights[name])
        ddp = DistributedDataParallelConfig(
            grad_reduce_in_fp32=True, use_distributed_optimizer=True
        )
        self.model = DistributedDataParallel(config, ddp, model)
        optimizer = settings.optimizer
        self.optimizer = get_megatron_optimizer(
            OptimizerConfig(
                optimizer="adam",
                lr=optimizer.lr,
                weight_decay=optimizer.weight_decay,
                adam_beta1=optimizer.beta1,
                adam_beta2=optimizer.beta2,
                adam_eps=optimizer.eps,
                params_dtype=torch.float32,
                use_distributed_optimizer=True,
                clip_grad=optimizer.clip_grad,
            ),
            [self.model],
        )

    def step(self, microbatches: Sequence[Microbatch], num_loss_tokens: int) -> float:
        """One optimizer step; the gradient norm before clipping."""

        def loss(microbatch: Microbatch, losses: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            total = (losses * microbatch.weights).sum() / num_loss_tokens
            return total, torch.zeros((), dtype=torch.int), total.detach().clone()

        def forward_step(iterator: Any, model: Any) -> tuple[Tensor, Any]:
            microbatch = next(iterator)
            losses = model(
                input_ids=microbatch.tokens,
                position_ids=microbatch.positions,
                attention_mask=None,
                labels=microbatch.targets,
                packed_seq_params=microbatch.packed,
            )
            return losses, partial(loss, microbatch)

        self.model.zero_grad_buffer()
        self.optimizer.zero_grad()
        rows, length = microbatches[0].tokens.shape
        get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=iter(microbatches),
            model=[self.model],
            num_microbatches=len(microbatches),
            seq_length=length,
            micro_batch_size=rows,
            forward_only=False,
        )
        _, norm, _ = self.optimizer.step()
        return float(norm)


def packed(microbatch: PackedMicrobatch) -> Microbatch:
    """The learner's own packing of a microbatch."""
    longest = -(-microbatch.longest // 128) * 128
    longest += 128 * (longest == len(microbatch.tokens_T))
    return Microbatch(
        tokens=microbatch.tokens_T[None],
        targets=microbatch.targets_T[None],
        positions=microbatch.positions_T[None],
        weights=torch.where(microbatch.loss_mask_T, microbatch.advantage_T, 0.0)[None],
        packed=PackedSeqParams(
            qkv_format="thd",
            cu_seqlens_q=microbatch.cu_seqlens,
            cu_seqlens_kv=microbatch.cu_seqlens,
            max_seqlen_q=longest,
            max_seqlen_kv=longest,
        ),
    )


def padded(
    microbatches: Sequence[PackedMicrobatch], length: int, max_tokens: int
) -> list[Microbatch]:
    """The same samples, each a row of `length` tokens, as many rows at once as the budget takes."""
    samples = [
        (each, slice(segment.start, segment.start + segment.length))
        for each in microbatches
        for segment in each.segments
    ]
    rows = max(1, max_tokens // length)
    found = []
    for start in range(0, len(samples), rows):
        some = samples[start : start + rows]
        filled = {
            name: torch.stack([_row(getattr(each, name)[at], length) for each, at in some])
            for name in ("tokens_T", "targets_T", "loss_mask_T", "advantage_T")
        }
        found.append(
            Microbatch(
                tokens=filled["tokens_T"],
                targets=filled["targets_T"],
                positions=torch.arange(length).expand(len(some), length),
                weights=torch.where(filled["loss_mask_T"], filled["advantage_T"], 0.0),
            )
        )
    return found


def _row(values: Tensor, length: int) -> Tensor:
    return torch.cat([values, values.new_zeros(length - len(values))])
