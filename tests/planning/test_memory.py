"""The plan of memory against published counts and against plain arithmetic; ranks are elsewhere.

`tests/learner/test_memory.py` compares it with real ranks.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megarl.actor.model_shape import LatentAttention, MixtureOfExperts, ModelShape
from megarl.config.layouts import critic_settings, learner_layout
from megarl.config.recompute import RecomputeConfig
from megarl.config.schema import Config
from megarl.planning.activations import FP32, Cuts, Sizes, layer_kept
from megarl.planning.memory import RankMemory, predict, predict_critic
from megarl.planning.passes import chunk_kept, in_flight, policy_head

LLAMA_70B = ModelShape(
    architecture="LlamaForCausalLM",
    num_layers=80,
    hidden_size=8192,
    num_heads=64,
    num_kv_heads=8,
    head_dim=128,
    intermediate_size=28672,
    vocab_size=128256,
    tie_embeddings=False,
    qkv_bias=False,
    qk_norm=False,
    rms_norm_eps=1e-5,
    rope_theta=5e5,
    rope_scaling=None,
    max_positions=131072,
)
NUM_PARAMETERS = 70_553_706_496
LATENT = replace(
    LLAMA_70B,
    architecture="DeepseekV3ForCausalLM",
    num_layers=4,
    hidden_size=7168,
    num_heads=128,
    num_kv_heads=128,
    head_dim=192,
    mla=LatentAttention(1536, 512, 128, 64, 128),
    moe=MixtureOfExperts(256, 8, 2048, 2048, True, "sigmoid", True, 2.5, 8, 4, (0,)),
)


def config(**more: Any) -> Config:
    learner = {"parallel": {"tp": 8, "pp": 2}, "max_tokens_per_microbatch": 8192}
    learner |= more.pop("learner", {})
    return Config.model_validate(
        {
            "actor": {"model": "m"},
            "learner": learner,
            "placement": {"learner_gpus": 32, **more.pop("placement", {})},
            **more,
        }
    )


def planned(rank: int = 0, **more: Any) -> RankMemory:
    found = config(**more)
    return predict(found, LLAMA_70B, learner_layout(found, LLAMA_70B), rank, on_cpu=False)


def test_state_of_llama_70b_is_18_bytes_a_parameter_less_what_is_sharded() -> None:
    """bf16 weights, fp32 gradients, and masters and two moments over two data-parallel ranks."""
    ranks = [planned(rank).policy for rank in (*range(8), *range(16, 24))]  # one replica
    for found, each in (("weights", 2), ("gradients", 4), ("optimizer", 12 / 2)):
        total = sum(getattr(rank, found) for rank in ranks)
        assert total == pytest.approx(NUM_PARAMETERS * each, rel=0.01)
        assert total >= NUM_PARAMETERS * each  # norms are on every tensor rank


def test_layer_keeps_what_korthikanti_counts_and_queries_and_keys_before_rope() -> None:
    """34 sbh bytes of a layer of theirs, of which 2 are of dropout, where attention keeps no
    scores; in bf16, with as many elements in a gated MLP as in theirs."""
    hidden, tokens = 768, 10
    shape = replace(
        LLAMA_70B,
        hidden_size=hidden,
        num_heads=12,
        num_kv_heads=12,
        head_dim=64,
        intermediate_size=8 * hidden // 3,
    )
    kept = layer_kept(Sizes(shape, Cuts(fused=True), tokens, 2), "dense")
    statistics = tokens * FP32 * (2 + 12)  # of two norms, and of each head's attention
    assert kept.total - statistics == (34 - 2 + 2 * 2) * tokens * hidden


def test_tensor_and_sequence_parallelism_cut_all_that_a_layer_keeps() -> None:
    whole = layer_kept(Sizes(LLAMA_70B, Cuts(), 8192, 2), "dense").total
    cut = layer_kept(Sizes(LLAMA_70B, Cuts(tp=8, sequence=8), 8192, 2), "dense").total
    assert cut * 8 == whole
    between = layer_kept(Sizes(LLAMA_70B, Cuts(tp=8), 8192, 2), "dense").total
    assert cut < between < whole


@pytest.mark.parametrize("shape", [LLAMA_70B, LATENT], ids=["dense", "latent with experts"])
def test_more_recomputation_keeps_less(shape: ModelShape) -> None:
    sizes = Sizes(shape, Cuts(tp=8, sequence=8, ep=8), 8192, 2)
    modules = ["core_attn", "mlp"] + (["mla_up_proj", "moe"] if shape.mla else [])
    ways = [
        RecomputeConfig(),
        RecomputeConfig(granularity="selective"),
        RecomputeConfig(granularity="selective", modules=modules),
        RecomputeConfig(granularity="full"),
        RecomputeConfig(granularity="full", num_layers=2),
    ]
    kinds = shape.layer_kinds[:4]
    kept = [chunk_kept(sizes, kinds, way).kept for way in ways]
    assert kept == sorted(set(kept), reverse=True)
    angles = 0 if shape.mla else 8192 * 128 * FP32
    assert kept[-2] == 4 * sizes.scattered(shape.hidden_size) + angles
    block = chunk_kept(sizes, kinds, RecomputeConfig(granularity="full", method="block"))
    assert kept[-2] < block.kept < kept[0]


def test_stages_of_a_pipeline_keep_as_much_as_their_microbatches_in_flight() -> None:
    first, last = planned(0).works[0], planned(16).works[0]
    assert first.kept > 1.9 * (last.kept - 8192 * 8192 * 2)
    assert in_flight(8, 1, 0) == [8]
    # Narayanan et al. 2021, 2.2: interleaving needs 1 + (p - 1) / (p v) of the memory
    assert sum(in_flight(8, 4, 0)) / 4 == pytest.approx(8 * (1 + 7 / (8 * 4)), abs=0.3)


def test_logits_take_no_more_than_so_many_at_one_time() -> None:
    sizes = Sizes(LLAMA_70B, Cuts(tp=8, sequence=8), 65536, 2)
    once, twice = policy_head(sizes, 32768), policy_head(sizes, 65536)
    rows = 32768 * (8192 * 2 + 2 * 8 + 1 + 3 * 4)
    assert twice.kept - once.kept == rows
    assert twice.backward - once.backward <= rows


def test_offloaded_optimizer_is_in_host_memory() -> None:
    before = planned().policy
    half, all_of_it = (
        planned(learner={"parallel": {"tp": 8, "pp": 2}, "optimizer": {"offload_fraction": f}})
        for f in (0.5, 1.0)
    )
    assert half.policy.optimizer + half.host.optimizer == before.optimizer
    assert abs(half.host.optimizer - before.optimizer / 2) <= 1
    assert all_of_it.policy.optimizer == 0
    assert all_of_it.host.optimizer == before.optimizer
    assert all_of_it.peaks["train"] == planned().peaks["train"] - before.optimizer


def test_colocated_learner_leaves_all_but_what_servers_take() -> None:
    apart, beside = planned(), planned(placement={"mode": "colocated"})
    kept = planned(placement={"mode": "colocated", "offload_learner_weights": False})
    weights = apart.policy.weights
    assert beside.peaks["offloaded"] == 0 and kept.peaks["offloaded"] == weights
    assert apart.peaks["sync"] - beside.peaks["sync"] == apart.policy.total - weights
    assert beside.host.parked == weights + apart.policy.optimizer and apart.host.parked == 0


def test_reference_waits_in_host_memory() -> None:
    """As the policy, or in float8 with a scale for each block of 128 x 128."""
    plain = planned(kl={"coef": 0.1}).host.frozen
    small = planned(kl={"coef": 0.1}, reference={"storage": "fp8"}).host.frozen
    embedding = 129024 // 8 * 8192 * 2
    assert planned().host.frozen == 0
    assert plain == pytest.approx(planned().policy.weights, rel=1e-4)
    matrices = (plain - embedding) / 2
    assert small == pytest.approx(embedding + matrices * (1 + 4 / 128**2), rel=1e-3)


def test_padding_of_context_parallelism_is_counted() -> None:
    short, long = (
        planned(
            placement={"learner_gpus": 64},
            learner={"parallel": {"tp": 8, "pp": 2, "cp": 2}, "max_tokens_per_microbatch": most},
        )
        for most in (8185, 8192)
    )
    assert short.works[0] == long.works[0]


def test_critic_with_ranks_of_its_own_takes_nothing_of_the_learner_s(tmp_path: Path) -> None:
    shape = {
        "architectures": ["LlamaForCausalLM"],
        "num_hidden_layers": 4,
        "hidden_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 128,
        "vocab_size": 512,
        "tie_word_embeddings": False,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e4,
        "hidden_act": "silu",
        "torch_dtype": "bfloat16",
    }
    (tmp_path / "config.json").write_text(json.dumps(shape))
    settings = {
        "advantage": {"estimator": "gae"},
        "critic": {"model": str(tmp_path), "ranks": "own", "gpus": 2, "parallel": {"tp": 2}},
    }
    assert planned(**settings).peaks == planned().peaks
    theirs = critic_settings(config(**settings))
    one, two = (predict_critic(theirs, rank, on_cpu=False) for rank in (0, 1))
    assert one.peaks == two.peaks and set(one.peaks) == {"score", "train"}
    assert one.state.total > 0 and one.policy.total == 0
    assert one.peaks["train"] > one.peaks["score"] > one.state.total
