"""Tiny policies, their numbered tensors, and plans carried out between numpy arrays."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from megarl.actor.parameters import parameter_table
from megarl.actor.shape import LatentAttention, MixtureOfExperts, ModelShape
from megarl.reshard.execute import clear_paddings, run
from megarl.reshard.layout import Layout
from megarl.reshard.plan import Plan
from tests.actor import shapes
from tests.reshard.learner_slices import Arrays, megatron_slices, padded
from tests.reshard.server_slices import sglang_slices

__all__ = [
    "FAMILY_FLAGS",
    "MOE_FLAGS",
    "Arrays",
    "assert_equal",
    "execute",
    "held",
    "megatron_slices",
    "numbered",
    "padded",
    "random_weights",
    "sglang_slices",
    "tiny_shape",
]

FAMILY_FLAGS = {
    "LlamaForCausalLM": {"qkv_bias": False, "qk_norm": False},
    "Qwen2ForCausalLM": {"qkv_bias": True, "qk_norm": False},
    "Qwen3ForCausalLM": {"qkv_bias": False, "qk_norm": True},
}

TINY_EXPERTS = MixtureOfExperts(
    num_experts=4,
    experts_per_token=2,
    expert_intermediate_size=8,
    shared_intermediate_size=16,
    router_bias=True,
    scoring="sigmoid",
    normalize=True,
    scaling=1.0,
    num_groups=1,
    groups_per_token=1,
    dense_layers=(0,),
)
QWEN3_EXPERTS = replace(
    TINY_EXPERTS, shared_intermediate_size=0, router_bias=False, scoring="softmax", dense_layers=()
)
TINY_LATENT = LatentAttention(
    q_lora_rank=6, kv_lora_rank=4, qk_nope_head_dim=4, qk_rope_head_dim=2, v_head_dim=4
)

MOE_FLAGS = {
    "Qwen3MoeForCausalLM": {"qkv_bias": False, "qk_norm": True, "moe": QWEN3_EXPERTS},
    "DeepseekV3ForCausalLM": {
        "qkv_bias": False,
        "qk_norm": False,
        "num_kv_heads": 4,
        "moe": TINY_EXPERTS,
        "mla": TINY_LATENT,
    },
    "Glm4MoeForCausalLM": {"qkv_bias": True, "qk_norm": True, "moe": TINY_EXPERTS},
}


def tiny_shape(architecture: str = "Qwen3ForCausalLM", **changes: object) -> ModelShape:
    """A shape of two layers and smaller sizes: a model that is moved element by element."""
    smaller: dict[str, object] = {
        "num_layers": 2,
        "hidden_size": 8,
        "head_dim": 4,
        "intermediate_size": 16,
        "rotary_fraction": 1.0,
        **{**FAMILY_FLAGS, **MOE_FLAGS}[architecture],
    }
    return shapes.tiny_shape(architecture, **{**smaller, **changes})


def numbered(shape: ModelShape) -> Arrays:
    """Every parameter under its Hugging Face name; every element has a number of its own."""
    arrays, first = {}, 1
    for parameter in parameter_table(shape):
        last = first + parameter.num_elements
        arrays[parameter.name] = np.arange(first, last, dtype=np.int64).reshape(parameter.shape)
        first = last
    return arrays


def random_weights(shape: ModelShape) -> Arrays:
    """Seeded float32 weights under Hugging Face names, large enough for every part to show."""
    random = np.random.default_rng(7)
    return {
        parameter.name: random.normal(
            1.0 if "norm" in parameter.kind else 0.0, 0.3, parameter.shape
        ).astype(np.float32)
        for parameter in parameter_table(shape)
    }


def held(layout: Layout, fill: int = -1) -> list[Arrays]:
    """Arrays for every rank of a layout, full of a number that no element has."""
    return [
        {tensor.name: np.full(tensor.shape, fill, np.int64) for tensor in rank.tensors}
        for rank in layout.ranks
    ]


def execute(plan: Plan, sources: list[Arrays], destination: Layout) -> list[Arrays]:
    """The destination's arrays after all moves, paddings cleared. The ranks are 0, 1, 2, ..."""
    arrays = held(destination)
    for late in (False, True):  # what is fanned out has come to the node before
        for move in plan.moves:
            if (move.link == "fanout") == late:
                run([move], (arrays if late else sources)[move.src], arrays[move.dst])
    for rank, mine in zip(destination.ranks, arrays, strict=True):
        clear_paddings(rank, mine)
    return arrays


def assert_equal(found: list[Arrays], wanted: list[Arrays]) -> None:
    """Same names, shapes and numbers on every rank."""
    for rank, (mine, theirs) in enumerate(zip(found, wanted, strict=True)):
        assert sorted(mine) == sorted(theirs), rank
        for name, array in theirs.items():
            assert mine[name].shape == array.shape, (rank, name)
            np.testing.assert_array_equal(mine[name], array, err_msg=f"rank {rank} {name}")
