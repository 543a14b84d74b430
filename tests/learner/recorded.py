"""One recorded minibatch: group files with samples of uneven lengths, and its schedules."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import numpy as np

from megarl.buffer.groupfile import write_group
from megarl.types import Group, MinibatchPlan, Prompt, Sample, SampleRef

Schedule = tuple[tuple[tuple[SampleRef, ...], ...], ...]

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


def record_maskless(folder: Path, vocab_size: int) -> list[SampleRef]:
    """A group without a loss token: one sample longer than all others, and one of two tokens."""
    draw, samples = random.Random(4), []
    for index, (num_prompt, num_response) in enumerate(((11, 30), (1, 1))):
        prompt = tuple(draw.randrange(vocab_size) for _ in range(num_prompt))
        response = tuple(draw.randrange(vocab_size) for _ in range(num_response))
        sample = Sample(f"masked.{index}", "masked", "p", prompt)
        logps = [-1.0] * num_response
        samples.append(sample.extended(response, logps, version=0, trainable=False))
    path = write_group(folder, Group("masked", Prompt("p", (), "", ""), tuple(samples)))
    return [
        SampleRef(sample.sample_id, path, index, sample.num_tokens, 0, 1.5, version=0)
        for index, sample in enumerate(samples)
    ]


def plan(refs: list[SampleRef], data_parallel: int) -> MinibatchPlan:
    """Few microbatches on each data-parallel rank; all but the first rank have an empty one."""
    a, b, c, d, e, f, g = refs
    schedules: dict[int, Schedule] = {
        1: (((a, b), (c, d), (e, f, g)),),
        2: (((c,), (a, g), (e,)), ((b, d, f), (), ())),
        4: (((c,), (a, g)), ((e,), ()), ((b, f), ()), ((d,), ())),
    }
    return scheduled(schedules[data_parallel])


def scheduled(schedule: Schedule) -> MinibatchPlan:
    """A schedule with its numbers of tokens."""
    used = [ref for rank in schedule for microbatch in rank for ref in microbatch]
    return MinibatchPlan(
        schedule=schedule,
        microbatch_tokens=max(sum(r.num_tokens for r in m) for rank in schedule for m in rank),
        num_loss_tokens=sum(ref.num_loss_tokens for ref in used),
    )


def variants(
    refs: list[SampleRef], maskless: list[SampleRef], data_parallel: int
) -> dict[str, MinibatchPlan]:
    """The same minibatch in other microbatches, and with samples that have no loss token."""
    shuffled = random.Random(9).sample(refs, len(refs))
    long, short = maskless

    def cut(order: list[SampleRef], count: int) -> Schedule:
        """Every rank's share in `count` microbatches, of which some may be empty."""
        shares = [order[rank::data_parallel] for rank in range(data_parallel)]
        return tuple(tuple(tuple(share[i::count]) for i in range(count)) for share in shares)

    return {
        "1 microbatch": scheduled(cut(refs, 1)),
        "3 microbatches, shuffled": scheduled(cut(shuffled, 3)),
        "7 microbatches": scheduled(cut(refs, 7)),
        "with samples without a loss token": scheduled(cut([long, *refs, short], 3)),
    }
