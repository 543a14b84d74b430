"""Samples to packed microbatches: token ids, targets, masks and log-probs in one row of T tokens.

Owns the packed form and the way back to samples. Reads group files; knows nothing of models or
losses.

Everything per token stands at the *predicting* position: entry t speaks of token t + 1 of its
sequence. T packed tokens, the padding among them; K sequences, with those that are padding. What a
sequence is padded with belongs to it: it comes after its last token, so that no token of the sample
attends to it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from megarl.buffer.groupfile import GroupTokens, SampleTokens, read_group
from megarl.compat.megatron_context import context_places
from megarl.errors import ShapeError
from megarl.reshard.mesh import LearnerMesh
from megarl.types import MinibatchPlan, SampleRef

PADDING_TOKENS = 1024  # of one padding sequence at most: attention's cost is quadratic


@dataclass(frozen=True, slots=True)
class Multiples:
    """What the parts of a minibatch are padded to, so that ranks can share them.

    `sequence` and `microbatch` are tokens, whose multiple they are, `microbatch` itself a multiple
    of `sequence`; `count` is microbatches of one data-parallel rank. With `one_length` all
    microbatches of the minibatch have as many tokens, on every rank.
    """

    sequence: int = 1
    microbatch: int = 1
    count: int = 1
    one_length: bool = False

    @classmethod
    def of(cls, mesh: LearnerMesh, tokens: int) -> Multiples:
        """For the ranks of `mesh`, where a microbatch is a multiple of `tokens` at least.

        Context ranks take two chunks of each sequence. Stages of a pipeline send fixed shapes, and
        Megatron's interleaved schedule takes as many microbatches as a multiple of the stages.

        >>> Multiples.of(LearnerMesh(tp=2, cp=2, pp=2, vpp=2), tokens=4)
        Multiples(sequence=4, microbatch=4, count=2, one_length=True)
        """
        sequence, count = mesh.sequence_multiple, mesh.pp if mesh.vpp > 1 else 1
        return cls(sequence, math.lcm(sequence, tokens), count, mesh.pp > 1)


@dataclass(frozen=True, slots=True)
class Segment:
    """One sequence of a microbatch: its tokens are packed at [start, start + length).

    Padding of its own may follow. Its response begins at token `prompt_length` of it.
    """

    key: str
    start: int
    length: int
    prompt_length: int

    @property
    def response(self) -> slice:
        """The predicting positions of its response tokens."""
        return slice(self.start + self.prompt_length - 1, self.start + self.length - 1)


@dataclass(frozen=True, slots=True, eq=False)
class PackedMicrobatch:
    """What one forward pass of one data-parallel rank sees. Log-probs are in nats.

    tokens_T, targets_T, positions_T int64; loss_mask_T bool; behavior_logp_T, advantage_T float32;
    cu_seqlens int32 [K + 1], the last sequences being padding where there is any; the longest of
    all has `longest` tokens.
    """

    tokens_T: Tensor
    targets_T: Tensor
    positions_T: Tensor
    loss_mask_T: Tensor
    behavior_logp_T: Tensor
    advantage_T: Tensor
    cu_seqlens: Tensor
    longest: int
    segments: tuple[Segment, ...]

    def to(self, device: torch.device) -> PackedMicrobatch:
        """This microbatch with its tensors on `device`."""
        moved = (tensor.to(device, non_blocking=True) for tensor in self._tensors().values())
        return replace(self, **dict(zip(self._tensors(), moved, strict=True)))

    def part(self, ranks: int, rank: int) -> PackedMicrobatch:
        """The tokens that context rank `rank` of `ranks` computes; `cu_seqlens` are still of all.

        `segments` and `longest` too speak of the whole microbatch.
        """
        if ranks == 1:
            return self
        places = context_places(self.cu_seqlens, ranks, rank)
        per_token = {n: t[places] for n, t in self._tensors().items() if n.endswith("_T")}
        return replace(self, **per_token)

    def _tensors(self) -> dict[str, Any]:
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: value for name, value in values.items() if isinstance(value, Tensor)}


def aligned_length(num_tokens: int, multiple: int) -> int:
    """The smallest positive multiple of `multiple` that holds `num_tokens`.

    >>> aligned_length(33, 4), aligned_length(0, 4)
    (36, 4)
    """
    return max(1, -(-num_tokens // multiple)) * multiple


def pack(
    rows: Sequence[tuple[SampleTokens, float]], length: int, multiple: int = 1
) -> PackedMicrobatch:
    """Pack (tokens, advantage) rows into `length` tokens, on the CPU.

    Each sequence, padding too, takes a multiple of `multiple` tokens, and so must `length` be.
    Raises ShapeError where they do not fit, or where a loss token has no token before it.
    """
    total = sum(aligned_length(len(sample.tokens), multiple) for sample, _ in rows)
    if total > length:
        raise ShapeError(
            f"a microbatch of {total} tokens does not fit {length}; the schedule and "
            "learner.max_tokens_per_microbatch disagree"
        )
    tokens = np.zeros(length, np.int64)
    targets = np.zeros(length, np.int64)
    mask = np.zeros(length, np.bool_)
    behavior = np.zeros(length, np.float32)
    advantages = np.zeros(length, np.float32)
    segments: list[Segment] = []
    ends: list[int] = []
    start = 0
    for sample, advantage in rows:
        end = start + len(sample.tokens)
        if len(sample.tokens) == 0 or sample.loss_mask[0]:
            raise ShapeError(
                f"{sample.sample_id}: its first token is a loss token, or it has none; "
                "a response needs a prompt of at least one token"
            )
        tokens[start:end] = sample.tokens
        targets[start : end - 1] = sample.tokens[1:]
        mask[start : end - 1] = sample.loss_mask[1:] != 0
        behavior[start : end - 1] = sample.behavior_logprobs[1:]
        advantages[start:end] = advantage
        segments.append(Segment(sample.sample_id, start, end - start, sample.prompt_length))
        start += aligned_length(end - start, multiple)
        ends.append(start)
    step = aligned_length(PADDING_TOKENS, multiple)
    padding = [*range(start + step, length, step), length]
    cu_seqlens = np.array([0, *ends, *(padding if start < length else ())], np.int32)
    positions = np.arange(length) - np.repeat(cu_seqlens[:-1], np.diff(cu_seqlens))
    return PackedMicrobatch(
        tokens_T=torch.from_numpy(tokens),
        targets_T=torch.from_numpy(targets),
        positions_T=torch.from_numpy(positions.astype(np.int64)),
        loss_mask_T=torch.from_numpy(mask),
        behavior_logp_T=torch.from_numpy(behavior),
        advantage_T=torch.from_numpy(advantages),
        cu_seqlens=torch.from_numpy(cu_seqlens),
        longest=int(np.diff(cu_seqlens).max()),
        segments=tuple(segments),
    )


def check_plan(plan: MinibatchPlan, data_parallel: int) -> None:
    """Prove that the schedule fits this learner, the same way on every rank.

    Raises ShapeError where data-parallel ranks differ in their number of microbatches (collectives
    would hang), where the number of ranks differs, where a microbatch has more tokens than the plan
    says, or where loss tokens do not add up to the denominator.
    """
    counts = [len(microbatches) for microbatches in plan.schedule]
    if len(counts) != data_parallel or len(set(counts)) != 1 or counts[0] == 0:
        raise ShapeError(
            f"the schedule has microbatches {counts}; the learner has {data_parallel} "
            "data-parallel ranks, and each needs the same number, at least one"
        )
    most = max(sum(r.num_tokens for r in refs) for rank in plan.schedule for refs in rank)
    if most > plan.microbatch_tokens:
        raise ShapeError(
            f"a microbatch of {most} tokens, where the plan says {plan.microbatch_tokens} at most; "
            "the schedule and learner.max_tokens_per_microbatch disagree"
        )
    refs = [ref for rank in plan.schedule for microbatch in rank for ref in microbatch]
    num_loss_tokens = sum(ref.num_loss_tokens for ref in refs)
    if num_loss_tokens != plan.num_loss_tokens or num_loss_tokens == 0:
        raise ShapeError(
            f"the samples of the minibatch have {num_loss_tokens} loss tokens, its plan says "
            f"{plan.num_loss_tokens}; it must be their sum and above 0"
        )


def pack_minibatch(
    plan: MinibatchPlan, dp_rank: int, multiples: Multiples
) -> tuple[list[PackedMicrobatch], int]:
    """This data-parallel rank's microbatches, from group files, and the longest length of all.

    Empty microbatches make up `multiples.count`. Raises DataError where a group file is missing or
    broken, ShapeError where it and the schedule disagree.
    """

    def length_of(refs: Sequence[SampleRef]) -> int:
        tokens = sum(aligned_length(ref.num_tokens, multiples.sequence) for ref in refs)
        return aligned_length(tokens, multiples.microbatch)

    longest = max(length_of(refs) for microbatches in plan.schedule for refs in microbatches)
    mine = [*plan.schedule[dp_rank]]
    mine += [()] * (-len(mine) % multiples.count)
    groups: dict[str, GroupTokens] = {}
    packed = []
    for refs in mine:
        rows = [(_read(ref, groups), ref.advantage) for ref in refs]
        length = longest if multiples.one_length else length_of(refs)
        packed.append(pack(rows, length, multiples.sequence))
    return packed, longest


def token_counts(microbatches: Sequence[PackedMicrobatch]) -> Tensor:
    """[tokens of samples, all packed tokens], float64; the rest of them is padding."""
    tokens = sum(segment.length for each in microbatches for segment in each.segments)
    packed = sum(len(each.tokens_T) for each in microbatches)
    return torch.tensor([tokens, packed], dtype=torch.float64)


def pack_sequences(
    sequences: Sequence[tuple[Sequence[int], Sequence[int]]],
    max_tokens: int,
    data_parallel: int,
    dp_rank: int,
    multiples: Multiples,
) -> tuple[list[PackedMicrobatch], int]:
    """This rank's share of (prompt, response) pairs, in order, by a token budget.

    Segments are keyed by the pairs' indices. Every rank gets the same number of microbatches, a
    multiple of `multiples.count`. What a sequence is padded with counts to the budget, but where it
    is alone. Returns them and their one length. Raises ShapeError where a sequence is longer than
    the budget or has no prompt.
    """
    bins: list[list[int]] = []
    sizes: list[int] = []
    for index, (prompt, response) in enumerate(sequences):
        size = len(prompt) + len(response)
        if size > max_tokens or not prompt:
            raise ShapeError(
                f"sequence {index} has {len(prompt)} prompt and {size} tokens; it needs a prompt, "
                f"and at most learner.max_tokens_per_microbatch={max_tokens} tokens"
            )
        padded = aligned_length(size, multiples.sequence)
        if not bins or sizes[-1] + padded > max_tokens:
            bins.append([])
            sizes.append(0)
        bins[-1].append(index)
        sizes[-1] += padded
    length = aligned_length(max(sizes, default=0), multiples.microbatch)
    bins += [[] for _ in range(-len(bins) % (data_parallel * multiples.count))]
    mine = bins[dp_rank::data_parallel]
    packed = [
        pack([(_plain(i, *sequences[i]), 0.0) for i in each], length, multiples.sequence)
        for each in mine
    ]
    return packed, length


def _read(ref: SampleRef, groups: dict[str, GroupTokens]) -> SampleTokens:
    if ref.path not in groups:
        groups[ref.path] = read_group(ref.path)
    sample = groups[ref.path].sample(ref.index)
    if ref.is_truncated:
        sample = sample.first(ref.num_tokens)
    found = (sample.sample_id, len(sample.tokens), int(np.count_nonzero(sample.loss_mask)))
    if found != (ref.sample_id, ref.num_tokens, ref.num_loss_tokens):
        raise ShapeError(
            f"{ref.path} row {ref.index}: (sample, tokens, loss tokens) is {found}, the schedule "
            f"says {(ref.sample_id, ref.num_tokens, ref.num_loss_tokens)}; the file belongs to "
            "another run"
        )
    return sample


def _plain(index: int, prompt: Sequence[int], response: Sequence[int]) -> SampleTokens:
    tokens: npt.NDArray[np.int32] = np.array([*prompt, *response], np.int32)
    return SampleTokens(
        sample_id=str(index),
        prompt_length=len(prompt),
        tokens=tokens,
        loss_mask=(np.arange(len(tokens)) >= len(prompt)).astype(np.uint8),
        behavior_logprobs=np.zeros(len(tokens), np.float32),
        versions=np.full(len(tokens), -1, np.int32),
    )
