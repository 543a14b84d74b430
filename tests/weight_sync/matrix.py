"""Megatron-Core learners of four ranks in many layouts, SGLang servers of many, and where they run.

Owns the cases and what of them is started. Everything runs on this machine; nodes are names.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megarl.config.layouts import learner_layout
from megarl.config.render import render_config
from megarl.config.schema import Config
from megarl.reshard.mesh import ServerMesh
from megarl.reshard.minimum import minimum_network_bytes
from megarl.reshard.sglang import sglang_layout
from megarl.types import MinibatchPlan, ServerEndpoint
from megarl.weight_sync.places import Place, learner_devices, placement, server_devices
from tests.learner import parity, recorded
from tests.learner.running import RunningLearner
from tests.weight_sync.family_models import SHAPES

LEARNERS = {"tp2-pp2": (1, {"tp": 2, "pp": 2}), "tp4": (1, {"tp": 4}), "dp2-tp2": (2, {"tp": 2})}
EXPERTS = {  # besides, where there are routed experts
    ("qwen3_moe", "tp2-pp2"): {"ep": 2},
    ("qwen3_moe", "tp4"): {"ep": 2, "etp": 2},
    ("qwen3_moe", "dp2-tp2"): {"ep": 2},
    ("deepseek", "tp2-pp2"): {"ep": 2, "pipeline_layout": "Et|ttL"},
    ("deepseek", "tp4"): {"ep": 4},
    ("deepseek", "dp2-tp2"): {"ep": 4},
}
CHANGED_BIAS = {"transformer_config": {"moe_router_bias_update_rate": 0.01}}


@dataclass(frozen=True)
class ServerKind:
    """A server's sizes, and its name among those of its family."""

    name: str
    tp: int = 1
    ep: int = 1


@dataclass(frozen=True)
class Case:
    """One learner and its servers, with the node of each rank: a letter."""

    family: str
    layout: str
    link: str
    servers: tuple[ServerKind, ...]
    server_nodes: tuple[str, ...]
    learner_nodes: str = "aaaa"

    def __str__(self) -> str:
        sizes = [f"tp{each.tp}" + (f"-ep{each.ep}" * (each.ep > 1)) for each in self.servers]
        return f"{self.family}-{self.layout}-to-{'+'.join(sizes)}-{self.link}"

    @property
    def parallel(self) -> dict[str, Any]:
        """`learner.parallel`."""
        return LEARNERS[self.layout][1] | EXPERTS.get((self.family, self.layout), {})

    def config(self, model: Path) -> Config:
        """The settings of the learner."""
        changes = CHANGED_BIAS if self.family == "deepseek" else {}
        case = parity.Case(
            self.family,
            LEARNERS[self.layout][0],
            self.parallel,
            more={"correction": {"old_logprobs": "recomputed"}},
            learner={"optimizer": {"lr": 3e-3}, **changes},
        )
        return case.config(model)

    def minibatch(self, folder: Path) -> MinibatchPlan:
        """Samples of made-up tokens and advantages, for an optimizer step with real gradients."""
        vocab_size = SHAPES[self.family].vocab_size
        samples = recorded.record(folder, vocab_size, lambda s: [-5.0] * len(s.response_ids))
        return recorded.plan([ref for _, ref in samples], LEARNERS[self.layout][0])

    def endpoints(self, running: Sequence[ServerEndpoint]) -> list[ServerEndpoint]:
        """The servers, on the nodes where they are said to be."""
        return [
            dataclasses.replace(endpoint, nodes=tuple(nodes))
            for endpoint, nodes in zip(running, self.server_nodes, strict=True)
        ]

    def network_bytes(self, model: Path, endpoints: Sequence[ServerEndpoint]) -> int:
        """The least bytes of one sync that must cross between nodes."""
        shape = SHAPES[self.family]
        source = learner_layout(self.config(model), shape)
        places = [Place(node, rank) for rank, node in enumerate(self.learner_nodes)]
        total = 0
        for endpoint in endpoints:
            layout = sglang_layout(shape, ServerMesh(endpoint.tp, ep=endpoint.ep, cpu=True))
            where = placement(learner_devices(places), server_devices(endpoint, places))
            assert where is not None
            least = minimum_network_bytes(source, layout, where, torch.float32.itemsize)
            total += sum(least.values())
        return total

    def start(self, folder: Path, model: Path) -> RunningLearner:
        """The learner, starting. MEGARL_NODE must be `learner_nodes`, separated by commas."""
        text = render_config(self.config(model))
        return RunningLearner(folder, text, "tests.weight_sync.counted_learner")


ONE, TWO = (ServerKind("one"),), (ServerKind("one"), ServerKind("other"))
WIDE, WIDE_EXPERTS = (ServerKind("wide", 2),), (ServerKind("wide", 2, 2),)

# Nine cases in which every two values of layout, servers, link and family meet.
CASES = (
    Case("dense", "tp2-pp2", "shared", ONE, ("a",)),
    Case("dense", "tp4", "mixed", WIDE, ("ab",)),
    Case("dense", "dp2-tp2", "p2p", TWO, ("b", "b")),
    Case("qwen3_moe", "tp2-pp2", "p2p", WIDE_EXPERTS, ("bb",)),
    Case("qwen3_moe", "tp4", "shared", TWO, ("a", "a")),
    Case("qwen3_moe", "dp2-tp2", "mixed", ONE, ("b",), "aaab"),
    Case("deepseek", "tp2-pp2", "mixed", TWO, ("a", "b")),
    Case("deepseek", "tp4", "p2p", ONE, ("b",)),
    Case("deepseek", "dp2-tp2", "shared", WIDE, ("aa",)),
)
