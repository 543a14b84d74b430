"""Recomputed activations change no gradient, and are not kept; a plan of memory is what ranks have.

What a rank holds is compared byte for byte, what autograd keeps within KEPT_BOUND.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import pytest

from megarl.actor.shape import read_shape
from megarl.config.fp8 import token_multiple
from megarl.config.layouts import learner_layout, learner_mesh, trained_shape
from megarl.config.schema import Config
from megarl.learner.packing import Multiples, pack_minibatch
from megarl.planning.memory import RankMemory, predict, rank_work
from megarl.planning.passes import Microbatch
from megarl.planning.state import made_when
from tests.learner import recorded
from tests.learner.parity import WEIGHTS, Case, Oracle
from tests.megatron_engine import Engine

KEPT_BOUND = 0.01  # relative, of what autograd keeps, in fp32 on CPUs
MIXED_BOUND = 0.05  # with modules of both parts of a layer, of which the plan takes the larger

FULL = {"granularity": "full"}
NONE: dict[str, dict[str, Any]] = {"none": {}}
DENSE = {
    **NONE,
    "full": FULL,
    "full, 3 layers": {**FULL, "num_layers": 3},
    "full, 1 layer of a chunk": {**FULL, "method": "block"},
    "core_attn": {"granularity": "selective"},
    "mlp": {"granularity": "selective", "modules": ["mlp"]},
}
MIXED = {"granularity": "selective", "modules": ["core_attn", "mla_up_proj", "mlp", "moe"]}
LATENT = {
    **NONE,
    "full": FULL,
    "core_attn, mla_up_proj, mlp, moe": MIXED,
    "shared_experts": {"granularity": "selective", "modules": ["shared_experts"]},
}
EXPERTS = {
    **NONE,
    "full": FULL,
    "moe": {"granularity": "selective", "modules": ["moe"]},
}


@dataclass(frozen=True)
class Kept:
    """A learner whose memory is looked at, with each of the `variants` of its recomputation.

    `tied`: head and embedding are one; `params` is `learner.precision.params`.
    """

    case: Case
    variants: Mapping[str, dict[str, Any]] = field(default_factory=lambda: NONE)
    tied: bool = False
    params: str = "fp32"

    @property
    def model(self) -> str:
        """Which checkpoint it reads."""
        return f"{self.case.model}{'-tied' if self.tied else ''}"

    def config(self, folder: Path, recompute: dict[str, Any]) -> dict[str, Any]:
        """Its settings."""
        config = self.case.config(folder / self.model).model_dump()
        config["learner"]["recompute"] = recompute
        config["learner"]["precision"]["params"] = self.params
        config["weight_sync"]["shared_weights"] = False  # it would take whole pages
        return config


FROZEN = {"kl": {"coef": 0.1}, "reference": {"storage": "fp8"}}
CRITIC = {**FROZEN, "advantage": {"estimator": "gae"}}

QUICK = {
    "qwen3": Kept(Case("qwen3"), DENSE),
    "deepseek-v3": Kept(Case("deepseek-v3"), LATENT),
    "qwen3-moe-ep2-dp2": Kept(Case("qwen3-moe", 2, {"ep": 2}), EXPERTS),
    "qwen3-tp2": Kept(Case("qwen3", 1, {"tp": 2})),
    "llama-tied-pp2": Kept(Case("llama", 1, {"pp": 2}), tied=True),
    "qwen3-dp2-bf16": Kept(Case("qwen3", 2), params="bf16"),
    "qwen2-critic-bf16": Kept(Case("qwen2", more=CRITIC), params="bf16"),
}
SLOW = {
    "qwen2-dp2-critic": Kept(Case("qwen2", 2, more=CRITIC), params="bf16"),
    "qwen3-moe-tp2-ep2": Kept(Case("qwen3-moe", 1, {"tp": 2, "ep": 2}), EXPERTS),
    "deepseek-v3-tp2-ep2": Kept(Case("deepseek-v3", 1, {"tp": 2, "ep": 2}, FROZEN)),
    "qwen3-tp2-pp2": Kept(Case("qwen3", 1, {"tp": 2, "pp": 2}), DENSE),
    "qwen3-pp2-vpp2-dp2": Kept(Case("qwen3", 2, {"pp": 2, "vpp": 2}), {**NONE, "full": FULL}),
    "qwen2-cp2-dp2": Kept(Case("qwen2", 2, {"cp": 2})),
    "deepseek-v3-tp2-pp2-ep2": Kept(Case("deepseek-v3", 1, {"tp": 2, "pp": 2, "ep": 2}), LATENT),
    "qwen3-moe-tp2-ep2-etp2-dp2": Kept(Case("qwen3-moe", 2, {"tp": 2, "ep": 2, "etp": 2}), EXPERTS),
}
CASES = {**QUICK, **SLOW}


class Seen:
    """What the ranks of all cases found."""

    def __init__(self, folder: Path, cases: Mapping[str, Kept], engine: Engine) -> None:
        self.folder = folder
        samples = {}
        for kept in cases.values():
            if kept.model not in samples:
                oracle = Oracle(kept.case.model, folder / kept.model, kept.tied)
                samples[kept.model] = [ref for _, ref in oracle.samples]
        self.plans = {
            name: recorded.plan(samples[kept.model], kept.case.dp) for name, kept in cases.items()
        }
        written = [
            {
                "name": name,
                "world_size": kept.case.world_size,
                "variants": {v: kept.config(folder, r) for v, r in kept.variants.items()},
                "plan": asdict(self.plans[name]),
                "weights": WEIGHTS,
            }
            for name, kept in cases.items()
        ]
        (folder / "cases.json").write_text(json.dumps(written))
        ranks = max(kept.case.world_size for kept in cases.values())
        engine.run("tests.learner.memory_ranks", folder, ranks=ranks)

    def of(self, name: str, variant: str) -> list[dict[str, Any]]:
        """By rank."""
        ranks = range(CASES[name].case.world_size)
        read = [json.loads((self.folder / f"{name}.{rank}.json").read_text()) for rank in ranks]
        return [found[variant] for found in read]

    def config(self, name: str, variant: str) -> Config:
        """The settings of a case."""
        kept = CASES[name]
        return Config.model_validate(kept.config(self.folder, kept.variants[variant]))

    def predicted(self, name: str) -> list[RankMemory]:
        """What each rank takes, as it is planned."""
        config = self.config(name, "none")
        shape = trained_shape(read_shape(config.actor.model))
        layout = learner_layout(config, shape)
        ranks = range(CASES[name].case.world_size)
        return [predict(config, shape, layout, rank, on_cpu=True) for rank in ranks]

    def kept(self, name: str, variant: str) -> list[int]:
        """What each rank's autograd keeps of the minibatch, as it is planned."""
        config, plan = self.config(name, variant), self.plans[name]
        shape, mesh = trained_shape(read_shape(config.actor.model)), learner_mesh(config)
        multiples = Multiples.of(mesh, token_multiple(config.learner.precision, mesh.tp, mesh.cp))
        found = []
        for rank in range(mesh.size):
            replica = mesh.coordinates(rank)[2]
            packed, _ = pack_minibatch(plan, replica // mesh.cp, multiples)
            parts = [each.part(mesh.cp, replica % mesh.cp) for each in packed]
            sizes = [(len(part.tokens_T), int(part.loss_mask_T.sum())) for part in parts]
            works = [
                rank_work(config, shape, rank, Microbatch(*size, len(packed)), on_cpu=True).kept
                for size in sizes
            ]
            found.append(max(works))
        return found


@pytest.fixture(scope="module")
def quick(tmp_path_factory: pytest.TempPathFactory, megatron_engine: Engine) -> Seen:
    """The learners of the cases that take seconds."""
    return Seen(tmp_path_factory.mktemp("memory"), QUICK, megatron_engine)


@pytest.fixture(scope="module")
def slow(tmp_path_factory: pytest.TempPathFactory, megatron_engine: Engine) -> Seen:
    """Those of the others."""
    return Seen(tmp_path_factory.mktemp("memory-slow"), SLOW, megatron_engine)


@pytest.fixture
def seen(request: pytest.FixtureRequest, name: str) -> Seen:
    """The learners that `name` is among."""
    found: Seen = request.getfixturevalue("quick" if name in QUICK else "slow")
    return found


def marked(names: Any) -> list[Any]:
    """Parameters, of which those with a slow case are slow."""
    rows = [row if isinstance(row, tuple) else (row,) for row in names]
    marks = [() if row[0] in QUICK else (pytest.mark.slow,) for row in rows]
    return [pytest.param(*row, marks=mark) for row, mark in zip(rows, marks, strict=True)]


VARIANTS = [(name, variant) for name, kept in CASES.items() for variant in kept.variants]
RECOMPUTED = marked([row for row in VARIANTS if row[1] != "none"])


def is_planned(kept: Kept) -> bool:
    """Whether a rank's tokens follow from its schedule: experts over several ranks take uneven
    parts of all."""
    return kept.params == "fp32" and kept.case.parallel.get("ep", 1) == 1


KEPT = marked([row for row in VARIANTS if is_planned(CASES[row[0]])])


@pytest.mark.parametrize(("name", "variant"), RECOMPUTED)
def test_gradients_with_recomputed_activations_are_those_without(
    seen: Seen, name: str, variant: str
) -> None:
    for rank in seen.of(name, variant):
        print(f"{name}, {variant}: {rank['off']:.1e}")
        assert rank["off"] < 1e-6


@pytest.mark.parametrize(("name", "variant"), RECOMPUTED)
def test_recomputed_activations_are_not_kept(seen: Seen, name: str, variant: str) -> None:
    pairs = zip(seen.of(name, variant), seen.of(name, "none"), strict=True)
    for found, everything in pairs:
        print(f"{name}, {variant}: {found['saved']} of {everything['saved']} bytes")
        assert found["saved"] < everything["saved"]


@pytest.mark.parametrize("name", marked(CASES))
def test_weights_gradients_and_optimizer_state_take_the_bytes_that_are_planned(
    seen: Seen, name: str
) -> None:
    for found, planned in zip(seen.of(name, "none"), seen.predicted(name), strict=True):
        assert found["state"] == {
            "weights": planned.state.weights,
            "gradients": planned.state.gradients,
            "optimizer": planned.state.optimizer,
        }
        assert sum(found["state by parts"].values()) == planned.state.total
        assert found["frozen"] == planned.host.frozen


@pytest.mark.parametrize("name", marked(CASES))
def test_order_of_parameters_is_megatrons(seen: Seen, name: str) -> None:
    for found in seen.of(name, "none"):
        assert sorted(found["names"], key=made_when) == found["names"]


@pytest.mark.parametrize(("name", "variant"), KEPT)
def test_autograd_keeps_what_is_planned(seen: Seen, name: str, variant: str) -> None:
    found = [rank["saved"] for rank in seen.of(name, variant)]
    planned = seen.kept(name, variant)
    for one, other in zip(found, planned, strict=True):
        print(f"{name}, {variant}: {one} bytes, planned {other}: {other / one - 1:+.4f}")
    bound = MIXED_BOUND if "mla_up_proj" in variant else KEPT_BOUND
    assert all(abs(p / f - 1) < bound for f, p in zip(found, planned, strict=True))


@pytest.mark.parametrize("name", marked(CASES))
def test_measured_bytes_are_beside_those_that_are_planned(seen: Seen, name: str) -> None:
    for rank in seen.of(name, "none"):
        metrics = rank["metrics"]
        assert metrics["memory/state_bytes"] == metrics["memory/state_predicted_bytes"]
        # A process has more than the learner: the interpreter and its libraries.
        for phase in ("score", "train"):
            measured = metrics[f"memory/{phase}_rss_bytes"]
            assert measured > metrics[f"memory/{phase}_predicted_bytes"] > 0
        assert not any("sync" in metric or "offloaded" in metric for metric in metrics)
