"""Megatron distributed checkpoints as layouts: real ones, and Megatron's rules for experts."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from megarl.actor.shape import ModelShape
from megarl.errors import CheckpointError, LayoutError
from megarl.learner.dist_metadata import DistCheckpoint
from megarl.reshard.dist_checkpoint import Chunk, chunk_files, dist_checkpoint_layout, place
from megarl.reshard.execute import run
from megarl.reshard.explicit import full_layout
from megarl.reshard.mesh import LearnerMesh
from megarl.reshard.plan import make_plan
from megarl.reshard.proof import prove_layout
from tests.reshard.dist_checkpoint_ranks import CASES
from tests.reshard.learner_slices import megatron_slices
from tests.reshard.models import Arrays, execute, numbered, random_weights, tiny_shape

WITH_OPTIMIZER = [number for number, case in enumerate(CASES) if not case.metadata]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("torch_dist")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    subprocess.run(
        [*torchrun, "--nproc-per-node", "2", "-m", "tests.reshard.dist_checkpoint_ranks", str(out)],
        check=True,
        timeout=600,
        env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
    )
    return out


@pytest.mark.parametrize("case", range(len(CASES)))
def test_real_checkpoint_gives_back_the_original_weights(saved: Path, case: int) -> None:
    shape = CASES[case].shape
    checkpoint = DistCheckpoint(saved / str(case))
    has_optimizer = any(chunk.key.startswith("optimizer.") for chunk in checkpoint.chunks)
    assert has_optimizer is (case in WITH_OPTIMIZER)
    layout = dist_checkpoint_layout(shape, checkpoint.chunks)
    prove_layout(layout)
    whole = full_layout(layout.table)
    plan = make_plan(layout, whole)
    dtypes = {
        p.name: torch.float32 if p.precision == "float32" else torch.bfloat16
        for p in layout.parameters
    }
    found = {p.name: torch.zeros(p.shape, dtype=dtypes[p.name]) for p in layout.parameters}
    for rank, file in enumerate(chunk_files(checkpoint.chunks)):
        mine = [(place(chunk), chunk) for chunk in checkpoint.chunks if chunk.file == file]
        stored = {p.local: checkpoint.read(chunk).reshape(p.shape) for p, chunk in mine}
        run(plan.between(rank, 0), stored, found)
    for name, array in random_weights(shape).items():
        assert torch.equal(found[name], torch.from_numpy(array).to(dtypes[name])), name


def test_real_checkpoint_of_another_model_is_refused(saved: Path) -> None:
    chunks = DistCheckpoint(saved / "0").chunks
    for change, words in (
        (
            {"intermediate_size": 24},
            r"linear_fc1.weight at .* of shape \[32, 8\], .* has \[48, 8\]",
        ),
        ({"num_layers": 3}, r"decoder.layers.2.*: 0 of its .* elements"),
        ({"vocab_size": 300}, "256 rows for a vocabulary of 300"),
        ({"qkv_bias": False}, "linear_qkv.bias is no tensor of the model"),
    ):
        with pytest.raises(LayoutError, match=words):
            dist_checkpoint_layout(replace(CASES[0].shape, **change), chunks)  # type: ignore[arg-type]


def test_truncated_file_of_a_real_checkpoint_is_named(saved: Path, tmp_path: Path) -> None:
    checkpoint = DistCheckpoint(saved / "0")
    for path in (saved / "0").iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes()[: None if path.name[0] == "." else 99])
    with pytest.raises(CheckpointError, match=r"distcp: .* cannot be read"):
        DistCheckpoint(tmp_path).read(checkpoint.chunks[0])
    with pytest.raises(CheckpointError, match="metadata"):
        DistCheckpoint(tmp_path / "nothing")


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
        files[chunk_files(chunks).index(chunk.file)][where.local] = array.reshape(where.shape)
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
