"""Tiny policies, their numbered tensors, and the plain slices that engines are known to hold.

The slices are written head by head with numpy, on purpose unlike the intervals under test.
"""

from __future__ import annotations

import numpy as np

from megarl.actor.parameters import parameter_table
from megarl.actor.shape import ModelShape
from megarl.reshard.execute import clear_paddings, run
from megarl.reshard.layout import Layout
from megarl.reshard.mesh import LearnerMesh
from megarl.reshard.plan import Plan

Arrays = dict[str, np.ndarray]

FAMILY_FLAGS = {
    "LlamaForCausalLM": {"qkv_bias": False, "qk_norm": False},
    "Qwen2ForCausalLM": {"qkv_bias": True, "qk_norm": False},
    "Qwen3ForCausalLM": {"qkv_bias": False, "qk_norm": True},
}


def tiny_shape(architecture: str = "Qwen3ForCausalLM", **changes: object) -> ModelShape:
    """A shape of a few thousand parameters."""
    values: dict[str, object] = {
        "architecture": architecture,
        "num_layers": 2,
        "hidden_size": 8,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 4,
        "intermediate_size": 16,
        "vocab_size": 100,
        "tie_embeddings": False,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "rope_scaling": None,
        "max_positions": 128,
        **FAMILY_FLAGS[architecture],
    }
    return ModelShape(**{**values, **changes})  # type: ignore[arg-type]


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
    """The destination's arrays after all moves, paddings cleared."""
    arrays = held(destination)
    for rank, mine in zip(destination.ranks, arrays, strict=True):
        for src, theirs in enumerate(sources):
            run(plan.between(src, rank.rank), theirs, mine)
        clear_paddings(rank, mine)
    return arrays


def assert_equal(found: list[Arrays], wanted: list[Arrays]) -> None:
    """Same names, shapes and numbers on every rank."""
    for rank, (mine, theirs) in enumerate(zip(found, wanted, strict=True)):
        assert sorted(mine) == sorted(theirs), rank
        for name, array in theirs.items():
            assert mine[name].shape == array.shape, (rank, name)
            np.testing.assert_array_equal(mine[name], array, err_msg=f"rank {rank} {name}")


def padded(rows: np.ndarray, num_rows: int) -> np.ndarray:
    """`rows` with zero rows below."""
    return np.concatenate([rows, np.zeros((num_rows - len(rows), *rows.shape[1:]), rows.dtype)])


def megatron_slices(
    shape: ModelShape, mesh: LearnerMesh, rank: int, tensors: Arrays, divisor: int
) -> Arrays:
    """What Megatron's rank holds: group-interleaved qkv, [gate; up], padded vocabulary."""
    t, stage, _ = mesh.coordinates(rank)
    tp, groups, dim = mesh.tp, shape.num_kv_heads, shape.head_dim
    unit = divisor * tp
    vocab_rows = -(-shape.vocab_size // unit) * unit

    def part(array: np.ndarray, axis: int = 0) -> np.ndarray:
        return np.split(array, tp, axis)[t]

    def fused(layer: str, suffix: str) -> np.ndarray:
        q, k, v = (tensors[f"{layer}self_attn.{p}_proj.{suffix}"] for p in "qkv")
        rows = []
        for group in range(groups):
            rows += [np.split(q, groups)[group], k[group * dim : (group + 1) * dim]]
            rows += [v[group * dim : (group + 1) * dim]]
        return part(np.concatenate(rows))

    out: Arrays = {}
    embedding = part(padded(tensors["model.embed_tokens.weight"], vocab_rows))
    if stage == 0:
        out["embedding.word_embeddings.weight"] = embedding
    per_stage = shape.num_layers // mesh.pp
    for local in range(per_stage):
        hf, here = f"model.layers.{stage * per_stage + local}.", f"decoder.layers.{local}."
        attention, mlp = here + "self_attention.", here + "mlp."
        out[attention + "linear_qkv.layer_norm_weight"] = tensors[hf + "input_layernorm.weight"]
        out[attention + "linear_qkv.weight"] = fused(hf, "weight")
        if shape.qkv_bias:
            out[attention + "linear_qkv.bias"] = fused(hf, "bias")
        if shape.qk_norm:
            out[attention + "q_layernorm.weight"] = tensors[hf + "self_attn.q_norm.weight"]
            out[attention + "k_layernorm.weight"] = tensors[hf + "self_attn.k_norm.weight"]
        out[attention + "linear_proj.weight"] = part(tensors[hf + "self_attn.o_proj.weight"], 1)
        out[mlp + "linear_fc1.layer_norm_weight"] = tensors[hf + "post_attention_layernorm.weight"]
        gate, up = (part(tensors[f"{hf}mlp.{p}_proj.weight"]) for p in ("gate", "up"))
        out[mlp + "linear_fc1.weight"] = np.concatenate([gate, up])
        out[mlp + "linear_fc2.weight"] = part(tensors[hf + "mlp.down_proj.weight"], 1)
    if stage == mesh.pp - 1:
        out["decoder.final_layernorm.weight"] = tensors["model.norm.weight"]
        if not shape.tie_embeddings:
            out["output_layer.weight"] = part(padded(tensors["lm_head.weight"], vocab_rows))
        elif mesh.pp > 1:
            out["output_layer.weight"] = embedding
    return out


def sglang_slices(shape: ModelShape, tp: int, rank: int, tensors: Arrays) -> Arrays:
    """What SGLang's rank holds: its heads with copied kv heads, [gate; up], padded vocabulary."""
    heads, kv_heads, dim = shape.num_heads, shape.num_kv_heads, shape.head_dim
    my_heads = range(rank * heads // tp, (rank + 1) * heads // tp)
    my_kv_heads = sorted({head * kv_heads // heads for head in my_heads})
    unit = 64 if -(-shape.vocab_size // 64) * 64 % tp == 0 else 64 * tp
    vocab_rows = -(-shape.vocab_size // unit) * unit

    def part(array: np.ndarray, axis: int = 0) -> np.ndarray:
        return np.split(array, tp, axis)[rank]

    def rows(array: np.ndarray, chosen: object) -> list[np.ndarray]:
        return [array[head * dim : (head + 1) * dim] for head in chosen]  # type: ignore[attr-defined]

    out: Arrays = {}
    for name, array in tensors.items():
        prefix, _, last = name.rpartition("_proj.")
        if prefix.endswith(".q"):
            k, v = (tensors[f"{prefix[:-1]}{p}_proj.{last}"] for p in "kv")
            parts = rows(array, my_heads) + rows(k, my_kv_heads) + rows(v, my_kv_heads)
            out[f"{prefix[:-1]}qkv_proj.{last}"] = np.concatenate(parts)
        elif prefix.endswith("gate"):
            up = tensors[name.replace("gate_proj", "up_proj")]
            fused = name.replace("gate_proj", "gate_up_proj")
            out[fused] = np.concatenate([part(array), part(up)])
        elif prefix.endswith((".o", ".down")):
            out[name] = part(array, 1)
        elif name in ("model.embed_tokens.weight", "lm_head.weight"):
            out[name] = part(padded(array, vocab_rows))
        elif not prefix:
            out[name] = array
    return out
