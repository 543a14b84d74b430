"""A golden batch: few samples that never change, for two ways of computing the same to be compared.

Owns where it comes from, a run's group files or a seed, and its schedule. Knows nothing of models.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from megarl.buffer.groupfile import read_group, write_group
from megarl.errors import DataError
from megarl.types import Group, MinibatchPlan, Prompt, Sample, SampleRef

NUM_SAMPLES = 16
NUM_TOKENS, NUM_PROMPT = 128, 16  # of a sample that is drawn
SEED = 20


@dataclass(frozen=True, slots=True, eq=False)
class Golden:
    """The batch: its schedule, its (prompt, response) pairs, the rollout's log-probs if any."""

    plan: MinibatchPlan
    sequences: list[tuple[list[int], list[int]]]
    masks: list[list[bool]]
    behavior: list[list[float]] | None


def recorded(paths: Sequence[str], data_parallel: int) -> Golden:
    """Samples of group files, at most so many, each a microbatch of its own.

    Raises DataError where they have no loss token.
    """
    refs, sequences, masks, behavior = [], [], [], []
    for path in paths:
        group = read_group(path)
        for index in range(len(group)):
            sample = group.sample(index)
            counted = int(sample.loss_mask.sum())
            if counted and len(refs) < NUM_SAMPLES:
                at = sample.prompt_length
                tokens = sample.tokens.tolist()
                refs.append(
                    SampleRef(sample.sample_id, path, index, len(tokens), counted, 1.0, version=0)
                )
                sequences.append((tokens[:at], tokens[at:]))
                masks.append((sample.loss_mask[at:] != 0).tolist())
                behavior.append(sample.behavior_logprobs[at:].tolist())
    if not refs:
        raise DataError(f"{', '.join(paths)}: no sample has a loss token; give other groups")
    return Golden(_plan(refs, data_parallel), sequences, masks, behavior)


def draw(folder: Path, vocab_size: int, longest: int) -> None:
    """Write samples of tokens drawn at random, by a fixed seed, as a group file into `folder`."""
    length = min(NUM_TOKENS, longest)
    prompt_length = min(NUM_PROMPT, length // 2)
    drawn = np.random.default_rng(SEED).integers(vocab_size, size=(NUM_SAMPLES, length)).tolist()
    samples = []
    for index, tokens in enumerate(drawn):
        response = tokens[prompt_length:]
        sample = Sample(f"golden.{index}", "golden", "golden", tuple(tokens[:prompt_length]))
        samples.append(sample.extended(response, [0.0] * len(response), version=0))
    write_group(folder, Group("golden", Prompt("golden", (), "", ""), tuple(samples)))


def _plan(refs: list[SampleRef], data_parallel: int) -> MinibatchPlan:
    each = [refs[rank::data_parallel] for rank in range(data_parallel)]
    count = max(len(mine) for mine in each)
    schedule = tuple(tuple((ref,) for ref in mine) + ((),) * (count - len(mine)) for mine in each)
    return MinibatchPlan(
        schedule, max(ref.num_tokens for ref in refs), sum(ref.num_loss_tokens for ref in refs)
    )
