"""One recorded minibatch: group files with samples of uneven lengths, and its schedules."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import numpy as np

from megarl.buffer.groupfile import write_group
from megarl.types import Group, MinibatchPlan, Prompt, Sample, SampleRef

LENGTHS = [(3, 9), (5, 2), (1, 17), (8, 1), (4, 12), (6, 5), (2, 7)]  # (prompt, response) tokens


def record(
    folder: Path, vocab_size: int, logprobs: Callable[[Sample], list[float]], seed: int = 3
) -> list[tuple[Sample, SampleRef]]:
    """Write the samples into two group files; some response tokens are not the loss's.

    Behavior log-probs are those of `logprobs`, off by what makes some ratios clip.
    """
    draw = random.Random(seed)
    made: list[tuple[Sample, SampleRef]] = []
    for number, lengths in enumerate((LENGTHS[:4], LENGTHS[4:])):
        group_id, samples = f"g{number}", []
        for index, (num_prompt, num_response) in enumerate(lengths):
            prompt = tuple(draw.randrange(vocab_size) for _ in range(num_prompt))
            response = tuple(draw.randrange(vocab_size) for _ in range(num_response))
            empty = Sample(f"{group_id}.{index}", group_id, f"p{number}", prompt)
            sample = empty
            true = logprobs(empty.extended(response, [0.0] * num_response, version=0))
            for at, token in enumerate(response):
                logp = float(np.float32(true[at] + draw.gauss(0.0, 0.3)))
                sample = sample.extended([token], [logp], version=0, trainable=at % 5 != 3)
            samples.append(sample)
        group = Group(group_id, Prompt(f"p{number}", (), "", ""), tuple(samples))
        path = write_group(folder, group)
        for index, sample in enumerate(samples):
            advantage = draw.uniform(-1.0, 2.0)
            ref = SampleRef(
                sample.sample_id,
                path,
                index,
                sample.num_tokens,
                sample.num_loss_tokens,
                advantage,
                version=0,
            )
            made.append((sample, ref))
    return made


def plan(refs: list[SampleRef], data_parallel: int) -> MinibatchPlan:
    """Three microbatches on each data-parallel rank; with two ranks the second has an empty one."""
    if data_parallel == 1:
        schedule = (((refs[0], refs[1]), (refs[2], refs[3]), tuple(refs[4:])),)
    else:
        first = ((refs[2],), (refs[0], refs[6]), (refs[4],))
        schedule = (first, ((refs[1], refs[3], refs[5]), (), ()))
    used = [ref for rank in schedule for microbatch in rank for ref in microbatch]
    return MinibatchPlan(
        schedule=schedule,
        microbatch_tokens=max(sum(r.num_tokens for r in m) for rank in schedule for m in rank),
        num_loss_tokens=sum(ref.num_loss_tokens for ref in used),
    )
