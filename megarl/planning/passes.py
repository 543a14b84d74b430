"""Bytes that forward and backward passes take on one rank, beside weights and optimizer state.

Owns what is alive when: microbatches in flight over the pipeline, what is computed again, the
output layer. What a layer keeps is `activations.py`'s. Knows nothing of phases.

T tokens of this rank's microbatch, R of them with a loss, H hidden, V columns of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megarl.config.recompute import RecomputeConfig
from megarl.planning.activations import FP32, INDEX, Kept, Sizes, layer_kept
from megarl.planning.logits import MAX_FP32_ELEMENTS, MAX_LOGITS
from megarl.reshard.megatron import padded_vocab_size
from megarl.reshard.pipeline import Chunk


@dataclass(frozen=True, slots=True)
class Work:
    """Bytes beside the state. `kept`: the most that autograd keeps at one time, of all microbatches
    in flight; `forward`, `backward`: the most in a pass that scores, and in one that trains."""

    kept: int = 0
    forward: int = 0
    backward: int = 0


@dataclass(frozen=True, slots=True)
class ChunkKept:
    """Of one microbatch in one model chunk: what it keeps, and what comes to that, at most, while
    its backward pass computes parts of it again. `shared` of it all microbatches share."""

    kept: int
    again: int
    shared: int = 0


def chunk_kept(sizes: Sizes, kinds: Sequence[str], recompute: RecomputeConfig) -> ChunkKept:
    """Of the layers `kinds`, with `learner.recompute`."""
    layers = [layer_kept(sizes, kind) for kind in kinds]
    whole = [layer.total for layer in layers]
    entry = sizes.scattered(sizes.shape.hidden_size)
    step, table = recompute.num_layers, 0
    if recompute.granularity == "none":
        parts = [(size, 0) for size in whole]
    elif recompute.granularity == "selective":
        given_up = [layer.recomputed(recompute.modules) for layer in layers]
        parts = [(size - every, one) for size, (every, one) in zip(whole, given_up, strict=True)]
    else:
        table = _rotary_table(sizes) if kinds else 0
        if recompute.method == "block":
            parts = [(entry, size - entry) for size in whole[:step]]
            parts += [(size, 0) for size in whole[step:]]
        else:
            units = [sum(whole[at : at + step]) for at in range(0, len(whole), step)]
            parts = [(entry, size - entry) for size in units]
    kept = most = table
    for part, again in parts:  # the backward pass takes them from the last on
        kept += part
        most = max(most, kept + again)
    return ChunkKept(kept, most - kept, table)


def _rotary_table(sizes: Sizes) -> int:
    """Angles of all positions, which recomputed layers share: of as many as fill a multiple of 128,
    in fp32 (learner/passes.py)."""
    shape = sizes.shape
    if shape.mla is not None:  # which makes its own
        return 0
    width = round(shape.head_dim * shape.rotary_fraction)
    return -(-sizes.num_tokens // 128) * 128 * width * FP32


def in_flight(pp: int, vpp: int, stage: int, num_microbatches: int | None = None) -> list[int]:
    """For each model chunk of a stage, the microbatches whose backward pass is still to come, where
    they are most. `num_microbatches` None is many.

    Source: megatron-core 0.19.2, pipeline_parallel/schedules.py: the warm-up of 1F1B, and of its
    interleaved form (Narayanan et al. 2021, 2.2), and one more.

    >>> in_flight(pp=4, vpp=1, stage=0), in_flight(4, 1, 3), in_flight(4, 1, 0, num_microbatches=2)
    ([4], [1], [2])
    >>> in_flight(pp=2, vpp=2, stage=0), in_flight(2, 2, 1)
    ([3, 2], [2, 1])
    """
    most = num_microbatches if num_microbatches is not None else 4 * pp * vpp
    if vpp == 1:
        return [min(pp - stage, most)]
    running = min((pp - stage - 1) * 2 + (vpp - 1) * pp + 1, most * vpp)
    chunks = [0] * vpp
    for index in range(running):
        chunks[index // pp % vpp] += 1
    return chunks


@dataclass(frozen=True, slots=True)
class Microbatch:
    """What one context rank sees at one time: `tokens`, of which `predictions` have a loss; `count`
    of them in a minibatch, None many."""

    tokens: int
    predictions: int
    count: int | None = None


@dataclass(frozen=True, slots=True)
class Head:
    """What the end of the last stage takes: `kept` from its forward to its backward pass, and the
    most while either runs, besides."""

    kept: int = 0
    forward: int = 0
    backward: int = 0


def policy_head(sizes: Sizes, num_predictions: int) -> Head:
    """The final norm, the output layer on R tokens, and the log-probs of its logits.

    Where there would be more than MAX_LOGITS, they are made in parts, and once more for the
    backward pass.
    """
    hidden, columns = sizes.shape.hidden_size, _columns(sizes)
    rows = sizes.element * num_predictions * hidden
    logits = min(num_predictions * columns, max(MAX_LOGITS, columns)) * sizes.element
    in_fp32 = 2 * FP32 * min(num_predictions * columns, max(MAX_FP32_ELEMENTS, columns))
    in_parts = num_predictions * columns > MAX_LOGITS
    entry, normed = sizes.scattered(hidden), sizes.normed(hidden)
    gathered = sizes.whole(hidden) if sizes.cuts.sequence > 1 else 0
    # Of a prediction: place, target among these columns and whether it is there, its norm and
    # entropy, and its log-prob; of a token the loss's numbers.
    numbers = num_predictions * (2 * INDEX + 1 + 3 * FP32) + sizes.whole(1, 1 + 5 * FP32)
    weight = columns * hidden * sizes.element
    return Head(
        kept=entry + normed + rows + numbers + (0 if in_parts else logits),
        forward=2 * entry + normed + gathered + rows + logits + in_fp32,
        backward=logits * (2 if in_parts else 1) + max(in_fp32, weight + rows),
    )


def value_head(sizes: Sizes) -> Head:
    """The final norm and the critic's one column, which is computed in fp32."""
    hidden = sizes.shape.hidden_size
    entry, in_fp32 = sizes.scattered(hidden), sizes.scattered(hidden, FP32)
    kept = entry + sizes.normed(hidden) + in_fp32 + sizes.whole(1, 1 + 5 * FP32)
    return Head(kept=kept, forward=kept + entry, backward=in_fp32 + entry)


def _columns(sizes: Sizes) -> int:
    """V on one tensor rank, with padding."""
    tp = sizes.cuts.tp
    return padded_vocab_size(sizes.shape.vocab_size, tp) // tp


def stage_work(
    sizes: Sizes,
    chunks: Sequence[Chunk],
    recompute: RecomputeConfig,
    waiting: Sequence[int],
    head: Head,
    is_pipelined: bool,
) -> Work:
    """Of one rank: its chunks, the microbatches that wait in each, and the `head` of the last stage
    (an empty one elsewhere).

    In a forward pass the widest part of a layer is alive at one time; in a backward pass besides
    that part again, as gradients, and the gradient of its weights.
    """
    hidden, kinds = sizes.shape.hidden_size, sizes.shape.layer_kinds
    entry = sizes.scattered(hidden)
    gathered = sizes.whole(hidden) if sizes.cuts.sequence > 1 else 0
    kept = sent = again = 0
    for chunk, number in zip(chunks, waiting, strict=True):
        here = chunk_kept(sizes, kinds[chunk.first : chunk.end], recompute)
        own = here.kept - here.shared + (sizes.whole(1, INDEX) if chunk.embedding else 0)
        kept += number * own + here.shared
        again = max(again, here.again)
        if is_pipelined and not chunk.loss:
            sent += number * entry  # outputs, which the schedule holds
    held = {kinds[layer] for chunk in chunks for layer in range(chunk.first, chunk.end)}
    widest = max((_widest(layer_kept(sizes, kind)) for kind in held), default=0)
    layer = 2 * entry + gathered + widest
    return Work(
        kept=kept + max(head.kept, again),
        forward=max(layer, head.forward),
        backward=kept + sent + max(head.kept + head.backward, again + layer),
    )


def _widest(layer: Kept) -> int:
    """The part of a layer that takes most while it is computed."""
    parts = (layer.attention + layer.heads + layer.core, layer.mlp, layer.moe + layer.moe_passing)
    return max(parts) + layer.passing
