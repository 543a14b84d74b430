"""What a phase takes at most is within what was planned of it: real ranks, torch's allocator."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import pytest

from megarl.buffer.groupfile import write_group
from megarl.types import Group, MinibatchPlan, Prompt, Sample, SampleRef
from tests.learner import recorded, tiny_models
from tests.learner.parity import Case
from tests.megatron_engine import Engine

NUM_PROMPT, NUM_TOKENS = 8, 64  # of each sample, of which two fill a microbatch
MAX_RATIO = {"score": 2.25, "train": 1.5}  # planned over measured, beside the state
# Measured over planned, at most: 0.90 to 1.11 was seen. Gloo lets go of what it has exchanged a
# moment later, and the profiler's clock may swap an allocation with a release before it.
LATE = 1.15
UNEVEN = 1.25  # where ranks of experts take uneven parts of the tokens

CRITIC = {"advantage": {"estimator": "gae"}}
FROZEN = {"kl": {"coef": 0.1}, "reference": {"storage": "fp8"}}
FULL = {"recompute": {"granularity": "full"}}


@dataclass(frozen=True)
class Taken:
    """A learner whose peaks are looked at; `learner` are more of its settings."""

    case: Case
    params: str = "fp32"
    learner: Mapping[str, Any] = field(default_factory=dict)

    def config(self, folder: Path) -> dict[str, Any]:
        """Its settings."""
        config = self.case.config(folder / self.case.model).model_dump()
        config["learner"] |= {"max_tokens_per_microbatch": 2 * NUM_TOKENS, **self.learner}
        config["learner"]["precision"]["params"] = self.params
        config["weight_sync"]["shared_weights"] = False
        return config


QUICK = {
    "dense": Taken(Case("qwen3")),
    "dense-full": Taken(Case("qwen3"), learner=FULL),
    "critic": Taken(Case("qwen2", more=CRITIC)),
    "tp2": Taken(Case("qwen3", 1, {"tp": 2})),
    "experts": Taken(Case("qwen3-moe", 1)),
}
SLOW = {
    "dense-bf16": Taken(Case("qwen3"), params="bf16"),
    "frozen": Taken(Case("qwen3", more=FROZEN)),
    "pp2": Taken(Case("qwen3", 1, {"pp": 2})),
    "pp2-vpp2": Taken(Case("qwen3", 1, {"pp": 2, "vpp": 2})),
    "cp2": Taken(Case("qwen2", 1, {"cp": 2})),
    "dp2": Taken(Case("qwen2", 2)),
    "experts-tp2-ep2": Taken(Case("qwen3-moe", 1, {"tp": 2, "ep": 2})),
    "latent": Taken(Case("deepseek-v3", 1)),
    "latent-ep2-dp2": Taken(Case("deepseek-v3", 2, {"ep": 2})),
}
CASES = {**QUICK, **SLOW}


def samples(folder: Path, count: int) -> list[SampleRef]:
    """So many, each of NUM_TOKENS tokens."""
    draw, made = random.Random(5), []
    num_response = NUM_TOKENS - NUM_PROMPT
    for number in range(count):
        tokens = [draw.randrange(tiny_models.VOCAB_SIZE) for _ in range(NUM_TOKENS)]
        sample = Sample(f"g{number}.0", f"g{number}", "p", tuple(tokens[:NUM_PROMPT]))
        sample = sample.extended(tokens[NUM_PROMPT:], [-5.0] * num_response, version=0)
        made.append(sample)
    refs = []
    for sample in made:
        path = write_group(folder, Group(sample.group_id, Prompt("p", (), "", ""), (sample,)))
        refs.append(SampleRef(sample.sample_id, path, 0, NUM_TOKENS, num_response, 1.0, version=0))
    return refs


def full_plan(refs: list[SampleRef], dp: int) -> MinibatchPlan:
    """Four microbatches, over all data-parallel ranks, of two samples each."""
    pairs = [(refs[at], refs[at + 1]) for at in range(0, len(refs), 2)]
    return recorded.scheduled(tuple(tuple(pairs[rank::dp]) for rank in range(dp)))


Found = Mapping[str, list[Mapping[str, Mapping[str, int]]]]


def take(folder: Path, cases: Mapping[str, Taken], engine: Engine) -> Found:
    """What every rank of all cases took in each phase, and what was planned."""
    refs = samples(folder / "groups", 8)
    for model in {taken.case.model for taken in cases.values()}:
        tiny_models.make(model, folder / model, False)
    written = [
        {
            "name": name,
            "world_size": taken.case.world_size,
            "config": taken.config(folder),
            "plan": asdict(full_plan(refs, taken.case.dp)),
        }
        for name, taken in cases.items()
    ]
    (folder / "cases.json").write_text(json.dumps(written))
    engine.run("tests.learner.peak_ranks", folder / "cases.json", ranks=2)
    return {
        name: [
            json.loads((folder / f"{name}.{rank}.json").read_text())
            for rank in range(taken.case.world_size)
        ]
        for name, taken in cases.items()
    }


@pytest.fixture(scope="module")
def quick(tmp_path_factory: pytest.TempPathFactory, megatron_engine: Engine) -> Found:
    """The cases of every run of the tests."""
    return take(tmp_path_factory.mktemp("peaks"), QUICK, megatron_engine)


@pytest.fixture(scope="module")
def slow(tmp_path_factory: pytest.TempPathFactory, megatron_engine: Engine) -> Found:
    """The others."""
    return take(tmp_path_factory.mktemp("peaks-slow"), SLOW, megatron_engine)


@pytest.mark.parametrize("phase", ["score", "train"])
@pytest.mark.parametrize(
    "name", [*QUICK, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)]
)
def test_phase_takes_no_more_than_planned_and_not_much_less(
    request: pytest.FixtureRequest, name: str, phase: str
) -> None:
    seen: Found = request.getfixturevalue("quick" if name in QUICK else "slow")
    for rank in seen[name]:
        planned, measured = rank[phase]["planned"], rank[phase]["measured"]
        print(f"{name} {phase}: planned {planned}, measured {measured}: {planned / measured:.2f}")
        share = UNEVEN if CASES[name].case.parallel.get("ep", 1) > 1 else LATE
        assert measured <= share * planned
        assert planned <= MAX_RATIO[phase] * measured
