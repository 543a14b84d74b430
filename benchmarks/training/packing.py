"""How full microbatches are and how level data-parallel ranks, from lengths alone."""

from __future__ import annotations

import itertools
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.reshard.models import QWEN3_30B
from benchmarks.training.lengths import draw, references
from megarl.actor.flops import SequenceFlops
from megarl.buffer.schedule import ScheduleShape, dp_imbalance, make_schedule
from megarl.types import MinibatchPlan, SampleRef

TP = 4  # packed lengths are its multiples
SIZES = [(256, 2), (256, 8), (1024, 2), (1024, 8), (1024, 32)]  # samples of a step, ranks


@dataclass(frozen=True)
class Packed:
    """Of one row: real tokens / packed ones, and the busiest rank's work / the mean - 1.

    `in_order_*` are those of samples packed in the order they came and dealt in turns;
    `padded_efficiency` is that of one row for each sample, as long as the longest.
    """

    samples: int
    data_parallel: int
    max_tokens: int
    is_pipelined: bool
    microbatches: int
    efficiency: float
    imbalance: float
    in_order_efficiency: float
    in_order_imbalance: float
    padded_efficiency: float


def measure(file: Path | None) -> list[dict[str, Any]]:
    """Every row, of a Qwen3-30B-A3B."""
    found = []
    flops = SequenceFlops.of(QWEN3_30B)
    rows = itertools.product(SIZES, (2048, 8192), (False, True))
    for (samples, data_parallel), max_tokens, is_pipelined in rows:
        refs = references(draw(samples, seed=samples, file=file))
        shape = ScheduleShape(data_parallel, max_tokens, flops, is_pipelined)
        plan, plain = make_schedule(refs, shape), in_order(refs, shape)
        longest = max(ref.num_tokens for ref in refs)
        found.append(
            Packed(
                samples,
                data_parallel,
                max_tokens,
                is_pipelined,
                microbatches=len(plan.schedule[0]),
                efficiency=efficiency(plan, is_pipelined),
                imbalance=dp_imbalance([plan], shape),
                in_order_efficiency=efficiency(plain, is_pipelined),
                in_order_imbalance=dp_imbalance([plain], shape),
                padded_efficiency=sum(ref.num_tokens for ref in refs) / (longest * len(refs)),
            )
        )
    return [asdict(row) for row in found]


def efficiency(plan: MinibatchPlan, is_pipelined: bool) -> float:
    """Tokens of samples / packed tokens, as the learner pads them."""
    tokens = [sum(ref.num_tokens for ref in each) for rank in plan.schedule for each in rank]
    padded = [max(1, -(-each // TP)) * TP for each in tokens]
    return sum(tokens) / (max(padded) * len(padded) if is_pipelined else sum(padded))


def in_order(refs: list[SampleRef], shape: ScheduleShape) -> MinibatchPlan:
    """Samples fill microbatches as they come, and these go to the ranks in turns."""
    bins: list[list[SampleRef]] = [[]]
    for ref in refs:
        if sum(each.num_tokens for each in bins[-1]) + ref.num_tokens > shape.max_tokens:
            bins.append([])
        bins[-1].append(ref)
    bins += [[] for _ in range(-len(bins) % shape.data_parallel)]
    ranks = (bins[rank :: shape.data_parallel] for rank in range(shape.data_parallel))
    schedule = tuple(tuple(map(tuple, rank)) for rank in ranks)
    longest = max(sum(ref.num_tokens for ref in each) for each in bins)
    return MinibatchPlan(schedule, longest, sum(ref.num_loss_tokens for ref in refs))
