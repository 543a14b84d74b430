"""The parity gate: both sides score the same tokens with the same weights, and must agree.

Owns the comparison and the verdict. A server samples short responses; the learner scores them.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

from megarl.config.bounds import mean_difference_bound, probe_bound
from megarl.config.schema import Config
from megarl.config.served import served_block
from megarl.controller.turn import Turn
from megarl.errors import ParityError
from megarl.learner.client import LearnerClient
from megarl.rollout.collect import Collector
from megarl.types import Prompt, ServerEndpoint

log = logging.getLogger(__name__)
MAX_NEW_TOKENS = 16


def verdict(mean: float, allowed: float, baseline: float | None) -> str:
    """What to suspect, from when the two sides disagree.

    >>> verdict(2.0, 1e-4, None)
    'the same checkpoint gives different log-probs: precision, or how the model is processed'
    >>> verdict(2.0, 1e-4, 1e-6)
    'equal before the weight sync, different after it: the layout of the sent weights'
    """
    if baseline is not None and baseline <= allowed < mean:
        return "equal before the weight sync, different after it: the layout of the sent weights"
    return "the same checkpoint gives different log-probs: precision, or how the model is processed"


async def mean_difference(
    rollout: Collector,
    learner: LearnerClient,
    turn: Turn,
    prompts: Sequence[Prompt],
    server: ServerEndpoint,
) -> float:
    """Mean |learner - server| log-prob over sampled tokens of `prompts`, in nats."""
    samples = await rollout.probe(server, prompts, MAX_NEW_TOKENS)
    async with turn.visit("syncing"):
        scored = await learner.logprobs([(s.prompt_ids, s.response_ids) for s in samples])
    differences = [
        abs(ours - theirs)
        for sample, logprobs in zip(samples, scored, strict=True)
        for ours, theirs in zip(logprobs, sample.behavior_logprobs, strict=True)
    ]
    return sum(differences) / len(differences)


def check(config: Config, mean: float, baseline: float | None, when: str) -> None:
    """Raise ParityError where `mean` is above the bound, with the verdict."""
    allowed = mean_difference_bound(config, baseline)
    weights = "float8" if served_block(config) else config.learner.precision.params
    log.info(
        "parity when=%s mean_abs_logprob=%.2e bound=%.0e weights=%s", when, mean, allowed, weights
    )
    if not mean <= allowed:  # also where it is not a number
        raise ParityError(
            f"log-probs of learner and rollout server differ by {mean:.2e} nats in the mean {when} "
            f"(bound {allowed:.0e} for {weights} servers): {verdict(mean, allowed, baseline)}. "
            "Raise parity.max_mean_abs_logprob only if you know why they differ"
        )


def check_batch(config: Config, scores: Mapping[str, float], version: int) -> None:
    """Hold what servers sampled at `version` to the bound of a sync's probe, in a colocated run.

    Its syncs have no probe: servers have no KV cache then. `scores` are the learner's `mismatch/*`
    of the batch, before its first optimizer step. Raises ParityError.
    """
    if config.placement.mode != "colocated" or not config.weight_sync.probe_tokens:
        return
    mean, allowed = scores["mismatch/mean_abs_logprob"], probe_bound(config)
    if not mean <= allowed:  # also where it is not a number
        raise ParityError(
            f"what servers sampled at version {version} has log-probs that differ from the "
            f"learner's by {mean:.2e} nats in the mean (bound {allowed:.0e}); the weights were not "
            "changed. Parameters had the learner's checksums, so suspect what the engine derives "
            "from them after its memory was released. weight_sync.probe_tokens = 0 turns this off"
        )
