"""The log-prob probe: a server scores a few fixed tokens, and must agree with the learner.

Checksums prove the bytes of parameters. The probe proves what a forward pass makes of them: values
that the engine derives from them, its caches, its label. Owns the comparison and its words. Knows
nothing of HTTP, and not how the learner computes.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from megarl.config.bounds import PROBE_CONTEXT
from megarl.errors import WeightSyncError
from megarl.weight_sync.pending import Pending

CHECKED = (
    "Its parameters have the learner's checksums, so suspect what the engine derives from them: "
    "caches, scales, fused or packed copies"
)
"""What to say of log-probs that differ although checksums agree."""


@dataclass(frozen=True, slots=True)
class Probe:
    """Tokens, and the learner's log-probs of the last of them, in nats, at temperature 1.

    At least the first token has none. `bound` is the largest mean absolute difference that a
    server may show, in nats.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    bound: float


def probe_tokens(num_scored: int, vocab_size: int, seed: int) -> tuple[int, ...]:
    """The tokens of a run's probes, the last of which are scored: the same in every sync.

    They repeat themselves, and are scored after `PROBE_CONTEXT` of them: a trained model foretells
    them by then. On likely tokens bf16 engines agree better than on random ones, and one that
    attends wrongly is far off.

    >>> probe_tokens(2, 512, seed=0)
    (65, 190, 473, 393, 65, 190, 473, 393, 65, 190)
    >>> probe_tokens(0, 512, seed=0)
    ()
    """
    # not the last token of the vocabulary, which SGLang 0.5.23 reports as token 0 in its answer
    draw = random.Random(f"megarl probe {seed}")
    drawn = [min(draw.randrange(vocab_size), vocab_size - 2) for _ in range(PROBE_CONTEXT // 2)]
    num_tokens = PROBE_CONTEXT + num_scored if num_scored else 0
    return tuple(drawn[i % len(drawn)] for i in range(num_tokens))


def largest_difference(probe: Probe, scored: Sequence[float], suspect: str = CHECKED) -> float:
    """The largest absolute difference to what a server scored (all tokens but the first), in nats.

    Raises WeightSyncError where the mean is above the probe's bound, naming the worst position and
    what to `suspect`.

    >>> probe = Probe((7, 8, 9), (-1.0, -2.0), bound=0.1)
    >>> round(largest_difference(probe, [-1.05, -2.1]), 3)
    0.1
    >>> largest_difference(probe, [-1.0, -4.0])
    Traceback (most recent call last):
    megarl.errors.WeightSyncError: its log-probs are not the learner's: they differ by 1 nats in \
the mean of 2 tokens (bound 0.1), most for token 9 at position 2, -4 on the server and -2 in the \
learner. Its parameters have the learner's checksums, so suspect what the engine derives from \
them: caches, scales, fused or packed copies
    """
    num_before = len(probe.token_ids) - len(probe.logprobs)
    pairs = list(zip(probe.logprobs, scored[num_before - 1 :], strict=True))
    differences = [abs(ours - theirs) for ours, theirs in pairs]
    mean = sum(differences) / len(differences)
    if not mean <= probe.bound:  # also where it is not a number
        worst = max(range(len(pairs)), key=lambda index: differences[index])
        ours, theirs = pairs[worst]
        raise WeightSyncError(
            f"its log-probs are not the learner's: they differ by {mean:.3g} nats in the mean of "
            f"{len(pairs)} tokens (bound {probe.bound:.3g}), most for token "
            f"{probe.token_ids[num_before + worst]} at position {num_before + worst}, "
            f"{theirs:.6g} on the server and {ours:.6g} in the learner. {suspect}"
        )
    return max(differences)


class PendingProbe(Pending[Probe | None]):
    """A probe that the learner's ranks still score; None where none is wanted."""

    def __init__(self) -> None:
        super().__init__("score the probe", "set weight_sync.probe_tokens = 0")
