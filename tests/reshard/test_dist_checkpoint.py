"""Megatron distributed checkpoints as layouts, by Megatron's rules; tests/convert has real ones."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from megarl.actor.shape import ModelShape
from megarl.errors import LayoutError
from megarl.reshard.dist_checkpoint import (
    Chunk,
    chunk_files,
    dist_checkpoint_layout,
    place,
    policy_chunks,
    saved_chunks,
)
from megarl.reshard.explicit import full_layout
from megarl.reshard.mesh import LearnerMesh
from megarl.reshard.plan import make_plan
from megarl.reshard.proof import prove_layout
from tests.reshard.learner_slices import megatron_slices
from tests.reshard.models import Arrays, execute, numbered, tiny_shape


def stored_keys(name: str, homogeneous: bool) -> tuple[str, tuple[int, ...]]:
    """Megatron's key for a tensor of its model, and the index along the leading dim of layers."""
    if not homogeneous or not name.startswith("decoder.layers."):
        return name, ()
    layer, rest = name.removeprefix("decoder.layers.").split(".", 1)
    return f"decoder.layers.{rest}", (int(layer),)


def cut_by_megatron(
    shape: ModelShape, tensors: Arrays, homogeneous: bool, tp: int, singleton: bool
) -> Iterator[tuple[Chunk, np.ndarray]]:
    """Chunks as its sharded_state_dict cuts them, with numbers; experts one by one."""
    rows = 104  # a multiple of 4 from 100 up
    forms = ("te", "grouped")
    model = megatron_slices(shape, LearnerMesh(), 0, tensors, rows, forms=forms)
    for number, (name, array) in enumerate(model.items()):
        key, lead = stored_keys(name, homogeneous)
        key = key.replace("mtp_model_layer", "transformer_layer")
        experts = ".experts.linear" in key
        key = key.replace(".experts.linear", ".experts.experts.linear")
        by_columns = key.endswith(("linear_fc2.weight", "linear_proj.weight"))
        whole = array.ndim == 1 or "router" in key or "_down_proj" in key
        leads = [(e,) for e in range(len(array))] if experts else [()]
        for expert in leads:
            own = array[expert] if experts else array
            parts = [own]
            if "linear_fc1.weight" in key:
                parts = list(np.split(own, 2))
            for half, part in enumerate(parts):
                shards = [part] if whole else np.split(part, tp, 1 if by_columns else 0)
                for index, shard in enumerate(shards):
                    first = index * shard.shape[by_columns if shard.ndim > 1 else 0]
                    offset = (0, first) if by_columns else (first, 0)
                    offset = offset if shard.ndim > 1 else (0,)
                    stored, full, prefix = key, own.shape, (*lead, *expert)
                    full_lead = ((shape.num_layers,) if lead else ()) + (
                        (len(array),) if experts else ()
                    )
                    if singleton and experts:
                        stored = key.replace("experts.experts", f"experts.experts.{expert[0]}")
                        prefix, full_lead = lead, full_lead[:-1]
                    if len(parts) == 2 and singleton:
                        stored, full = f"{stored}_{'wv'[half]}", part.shape
                    elif len(parts) == 2:
                        offset = (offset[0] + half * len(part), 0)
                    sizes = (*(1 for _ in prefix), *shard.shape)
                    file = f"__{(number + index) % 3}_0.distcp"
                    chunk = Chunk(stored, (*full_lead, *full), (*prefix, *offset), sizes, file)
                    yield chunk, shard


SHAPES = {
    "alike": tiny_shape("Qwen3MoeForCausalLM"),
    "mixed": tiny_shape("DeepseekV3ForCausalLM", num_layers=3, num_mtp_layers=1),
    "shared": tiny_shape("Glm4MoeForCausalLM", num_kv_heads=4),
}


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("model", SHAPES)
@pytest.mark.parametrize("singleton", [False, True])
def test_chunks_of_experts_by_megatrons_rules_are_the_policys_tensors(
    model: str, tp: int, singleton: bool
) -> None:
    shape = SHAPES[model]
    homogeneous = model == "alike" and not singleton
    chunks = dict(cut_by_megatron(shape, numbered(shape), homogeneous, tp, singleton))
    optimizer = Chunk("optimizer.state.exp_avg.embedding", (4,), (0,), (4,), "__9_0.distcp")
    layout = dist_checkpoint_layout(shape, [*chunks, optimizer])
    prove_layout(layout)
    files: list[Arrays] = [{} for _ in layout.ranks]
    for chunk, array in chunks.items():
        where = place(chunk)
        files[chunk_files(policy_chunks(chunks)).index(chunk.file)][where.local] = array.reshape(
            where.shape
        )
    whole = full_layout(layout.table)
    (found,) = execute(make_plan(layout, whole), files, whole)
    for name, array in numbered(shape).items():
        np.testing.assert_array_equal(found[name], array, err_msg=name)


def test_chunk_of_two_layers_a_hole_and_an_overlap_are_refused() -> None:
    shape = SHAPES["alike"]
    chunks = list(dict(cut_by_megatron(shape, numbered(shape), True, 2, False)))
    chosen = next(c for c in chunks if c.key.endswith("linear_fc2.weight"))
    others = [c for c in chunks if c != chosen]
    with pytest.raises(LayoutError, match="holds 2 layers from 0 on"):
        two = replace(chosen, sizes=(2, *chosen.sizes[1:]))
        dist_checkpoint_layout(shape, [*others, two])
    with pytest.raises(LayoutError, match=r"experts.linear_fc2.weight: 224 of its 256 elements"):
        dist_checkpoint_layout(shape, others)
    with pytest.raises(LayoutError, match="stored in two chunks"):
        dist_checkpoint_layout(shape, [*chunks, replace(chosen, file="__7_0.distcp")])


@pytest.mark.parametrize("model", SHAPES)
def test_saved_chunks_are_those_of_megatrons_rules_on_one_rank(model: str) -> None:
    shape = SHAPES[model]
    ours = {replace(chunk, file="") for chunk in saved_chunks(shape, vocab_divisor=104)}
    theirs = {
        replace(chunk, file="")
        for chunk in dict(cut_by_megatron(shape, numbered(shape), False, 1, False))
        if not chunk.key.endswith("linear_fc1.weight")  # whose halves the rules there keep apart
    }
    assert theirs <= ours
    assert {chunk.key.rpartition("fc1")[1] for chunk in ours - theirs} == {"fc1"}
    prove_layout(dist_checkpoint_layout(shape, [replace(c, file="f") for c in ours]))
