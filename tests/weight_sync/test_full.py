"""The policy brought together from real processes equals its checkpoint, bit for bit."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import chain

import pytest
import torch

from megarl.actor.parameters import block_table
from megarl.actor.shape import ModelShape
from megarl.float8 import BlockScaling
from megarl.reshard.layout import num_elements
from megarl.reshard.mesh import LearnerMesh
from megarl.weight_sync.control import SourceSpec
from megarl.weight_sync.formats import WireFormat
from megarl.weight_sync.full import cut_buckets
from tests.reshard.models import tiny_shape
from tests.reshard.test_sglang_loaders import DEEPSEEK, LATENT, QWEN3, large
from tests.weight_sync import full_ranks
from tests.weight_sync.forked import Ranks
from tests.weight_sync.full_ranks import Policy, stored

FAMILIES = ("Qwen3ForCausalLM", "Qwen3MoeForCausalLM", "DeepseekV3ForCausalLM")
FLOAT8 = BlockScaling(128, 128)
FP32 = WireFormat(torch.float32, {})
MESHES = (LearnerMesh(tp=2, pp=2), LearnerMesh(tp=2, dp=2), LearnerMesh(pp=2, dp=2))


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    made = full_ranks.start(4)
    yield made
    made.kill()


def held_by_rank_0(policy: Policy) -> int:
    """Distinct elements of the policy on learner rank 0."""
    layout = SourceSpec(policy.shape, policy.mesh).layout()
    return sum(num_elements(box) for _, box in {(p.tensor, p.box) for p in layout.rank(0).pieces})


@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_buckets_equal_the_checkpoint_and_every_byte_is_sent_once(
    ranks: Ranks, family: str, mesh: LearnerMesh
) -> None:
    policy = Policy(tiny_shape(family), mesh, seed=3)
    answers = ranks.ask(("gather", policy, (2048,)))
    assert answers[0]["wrong"] == []
    wanted = stored(policy.shape, 3, "fp32")
    assert sorted(chain(*answers[0]["seen"])) == sorted(wanted)
    assert len(answers[0]["seen"]) > 2
    total = sum(tensor.numel() for tensor in wanted.values())
    sent = sum(answer["sent"] for answer in answers)
    assert sent == 4 * (total - held_by_rank_0(policy))
    assert answers[0]["sent"] == 0


def test_float32_tensors_of_a_bf16_policy_stay_so(ranks: Ranks) -> None:
    policy = Policy(tiny_shape("DeepseekV3ForCausalLM"), MESHES[0], seed=4, dtype="bf16")
    answer = ranks.ask(("gather", policy, (4096,)))[0]
    assert answer["wrong"] == []
    dtypes = {tensor.dtype for tensor in stored(policy.shape, 4, "bf16").values()}
    assert dtypes == {torch.bfloat16, torch.float32}


@pytest.mark.parametrize("family", [QWEN3, DEEPSEEK])
def test_float8_is_brought_together_with_its_scales_as_numpy_makes_it(
    ranks: Ranks, family: str
) -> None:
    shape = large(family, **({"num_heads": 4, "mla": LATENT} if family == DEEPSEEK else {}))
    policy = Policy(shape, LearnerMesh(dp=4, ep=2 if family == DEEPSEEK else 1), 3, "bf16", FLOAT8)
    answers = ranks.ask(("gather", policy, (16 << 10,)))
    assert answers[0]["wrong"] == []
    seen = answers[0]["seen"]
    assert sorted(chain(*seen)) == sorted(stored(shape, 3, "bf16", float8=True))
    for names in seen:  # scales go with their weights, and with what SGLang fuses them with
        weights = {name for name in names if f"{name}_scale_inv" in chain(*seen)}
        assert {f"{name}_scale_inv" for name in weights} <= set(names)


def test_layers_of_a_draft_are_not_sent(ranks: Ranks) -> None:
    shape = replace(tiny_shape("DeepseekV3ForCausalLM"), num_mtp_layers=1)
    answer = ranks.ask(("gather", Policy(shape, LearnerMesh(tp=2, dp=2), 5), (1 << 20,)))[0]
    served = replace(shape, num_mtp_layers=0)
    assert sorted(chain(*answer["seen"])) == sorted(stored(served, 5, "fp32"))


@pytest.mark.parametrize("broken", [0, 3])
def test_failure_on_one_rank_is_raised_on_all(ranks: Ranks, broken: int) -> None:
    policy = Policy(tiny_shape(), MESHES[0], seed=1)
    answers = ranks.ask(("gather", policy, (2048, broken)))
    assert all(
        f"WeightSyncError: the policy was not gathered: learner rank {broken}" in answer
        for answer in answers
    )
    assert ranks.ask(("gather", policy, (2048,)))[0]["wrong"] == []


def test_all_ranks_end_when_rank_0_wants_no_more(ranks: Ranks) -> None:
    policy = Policy(tiny_shape(), MESHES[0], seed=1)
    answers = ranks.ask(("gather", policy, (2048, -1, 2)))
    assert [len(answer["seen"]) for answer in answers] == [2] * 4


def names_by_bucket(shape: ModelShape, bucket_bytes: int) -> list[set[str]]:
    buckets = cut_buckets(shape, block_table(shape), FP32, bucket_bytes)
    return [{tensor.name for tensor in bucket.tensors} for bucket in buckets]


def test_what_sglang_fuses_stays_in_one_bucket_however_small() -> None:
    buckets = names_by_bucket(tiny_shape("DeepseekV3ForCausalLM"), 1)
    layer = "model.layers.1."
    attention = f"{layer}self_attn."
    expert = f"{layer}mlp.experts.2."
    for together in (
        {f"{attention}q_a_proj.weight", f"{attention}kv_a_proj_with_mqa.weight"},
        {f"{expert}gate_proj.weight", f"{expert}up_proj.weight"},
    ):
        assert together in buckets
    assert {f"{expert}down_proj.weight"} in buckets
    dense = names_by_bucket(tiny_shape("Qwen2ForCausalLM"), 1)
    qkv = {f"model.layers.0.self_attn.{x}_proj.weight" for x in "qkv"}
    assert qkv in dense
    assert {name.replace("weight", "bias") for name in qkv} in dense


def test_buckets_are_cut_between_layers_where_a_layer_fits() -> None:
    shape = tiny_shape(num_layers=6)
    layer = sum(parameter.num_elements * 4 for parameter in block_table(shape).kinds["dense"])
    buckets = names_by_bucket(shape, int(2.5 * layer))
    layers = [{name.split(".")[2] for name in names if ".layers." in name} for names in buckets]
    assert all(not first & second for i, first in enumerate(layers) for second in layers[:i])
    sizes = [
        bucket.num_bytes
        for bucket in cut_buckets(shape, block_table(shape), FP32, int(2.5 * layer))
    ]
    assert max(sizes) <= 2.5 * layer
