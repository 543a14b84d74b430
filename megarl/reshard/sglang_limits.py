"""What SGLang can hold of a policy: which sizes must split, what a server on a CPU pads.

Owns the refusals, each with the sizes that would do. Source: sglang 0.5.23, the constructors of its
models and of its parallel layers, configs/update_config.py.
"""

from __future__ import annotations

import math
from dataclasses import replace
from fractions import Fraction

from megarl.actor.families import FAMILIES
from megarl.actor.families.family import Axis
from megarl.actor.shape import ModelShape
from megarl.errors import LayoutError
from megarl.reshard.blocks import ScaleBlock
from megarl.reshard.mesh import MAX_RANKS, ServerMesh
from megarl.reshard.notation import elided

APART = "use rollout.engine_args.disable_shared_experts_fusion = true"

CPU_PADDING = 32  # DEFAULT_MOE_PADDING_SIZE, sglang configs/update_config.py


def cpu_stretch(
    shape: ModelShape, mesh: ServerMesh, axis: Axis, fp8_block: ScaleBlock | None = None
) -> Fraction:
    """Padded size / size of what is cut along `axis`; 1 on a GPU, and for what is in float8 blocks.

    KV heads are padded to a multiple of tp with query heads in proportion; intermediate sizes to
    a multiple of 32 x tp; with float8 `check_served` allows nothing that would be padded. Source:
    adjust_config_with_unaligned_cpu_tp.
    """
    if not mesh.cpu or fp8_block is not None:
        return Fraction(1)
    unit = CPU_PADDING * mesh.tp
    match axis:
        case "attention":
            kv = shape.num_heads if shape.mla is not None else shape.num_kv_heads
            if shape.num_heads % mesh.tp == 0 and kv % mesh.tp == 0:
                return Fraction(1)
            return _padded(kv, mesh.tp)
        case "mlp":
            return _padded(shape.intermediate_size, unit)
        case "experts" | "shared_experts" if shape.moe is not None:
            return _padded(shape.moe.expert_intermediate_size, unit)
        case _:
            return Fraction(1)


def _padded(size: int, unit: int) -> Fraction:
    return Fraction(-(-size // unit) * unit, size)


def check_served(shape: ModelShape, mesh: ServerMesh, fp8_block: ScaleBlock | None = None) -> None:
    """Raise LayoutError naming what keeps this server from holding the policy.

    With `fp8_block` its linear weights are float8 in blocks of so many rows and columns.
    """
    _check_settings(shape, mesh)
    if fp8_block is not None and mesh.up_first:
        raise LayoutError(
            "up_first: SGLang's float8 experts in blocks always load [gate, up]; leave it out "
            "(rollout.engine_args.moe_runner_backend = flashinfer_cutlass means it)"
        )
    if fp8_block is not None and mesh.cpu:
        _check_unpadded(shape, mesh, fp8_block)
    fault = _fault(shape, mesh)
    if fault is None:
        return
    raise LayoutError(f"{fault}; {_remedy(shape, mesh)}")


def cpu_padded(shape: ModelShape, tp: int) -> list[str]:
    """What a server of `tp` ranks on a CPU pads, in words; nothing where `cpu_stretch` is 1.

    It goes by tp also where attention is data parallel. Experts' sizes are not among it.
    """
    unit = CPU_PADDING * tp
    return _padded_sizes(shape, tp, unit, f"{CPU_PADDING} x {tp} = {unit}")


def _padded_sizes(shape: ModelShape, tp: int, unit: int, words: str) -> list[str]:
    """Heads that are no multiple of `tp`, and an MLP that is none of `unit`, which is `words`."""
    kv = shape.num_heads if shape.mla is not None else shape.num_kv_heads
    heads = [(shape.num_heads, "attention heads"), (kv, "kv heads")]
    found = [f"{size} {name} to a multiple of {tp}" for size, name in heads if size % tp]
    if "dense" in shape.layer_kinds and shape.intermediate_size % unit:
        found.append(f"{shape.intermediate_size} columns of down_proj to a multiple of {words}")
    return found


def _check_unpadded(shape: ModelShape, mesh: ServerMesh, block: ScaleBlock) -> None:
    """Refuse float8 that SGLang pads on a CPU: its units there are whole blocks for each rank.

    Source: get_moe_padding_size and get_num_heads_padding_size, configs/update_config.py.
    """
    unit = block[0] * mesh.tp
    found = _padded_sizes(shape, mesh.tp, unit, str(unit))
    if shape.moe is not None and shape.moe.expert_intermediate_size % unit:
        size = shape.moe.expert_intermediate_size
        found.append(f"{size} columns of an expert's down_proj to a multiple of {unit}")
    if found:
        raise LayoutError(
            f"rollout.parallel.tp={mesh.tp}: SGLang pads {' and '.join(found)} with float8 in "
            f"blocks of {block[0]} on a CPU, which no layout says; use a smaller tp, a smaller "
            "rollout.precision.fp8_block, or a GPU"
        )


def _remedy(shape: ModelShape, mesh: ServerMesh) -> str:
    """The tp that do, or where none does the ep and attention_dp with which one does."""
    sizes = (mesh.ep, mesh.attention_dp)
    for ep, attention_dp in (sizes, (1, sizes[1]), (sizes[0], 1), (1, 1)):
        head = mesh.dp_head and attention_dp > 1
        step, most = math.lcm(ep, attention_dp), MAX_RANKS // (mesh.servers * mesh.pp)
        good = [
            str(tp)
            for tp in range(step, min(attention_dp * shape.num_heads, most) + 1, step)
            if _fault(shape, replace(mesh, tp=tp, ep=ep, attention_dp=attention_dp, dp_head=head))
            is None
        ]
        if not good:
            continue
        use = f"use rollout.parallel.tp from {', '.join(elided(good, 24))}"
        if (ep, attention_dp) == sizes:
            return use
        return (
            f"no tp does with ep={sizes[0]}, attention_dp={sizes[1]}; with ep={ep}, "
            f"attention_dp={attention_dp} {use}"
        )
    return "no tp does, not even 1; check the model's config.json"


def _check_settings(shape: ModelShape, mesh: ServerMesh) -> None:
    """Refuse settings that this model's implementation lacks."""
    name, moe = shape.architecture, shape.moe
    served = FAMILIES[name].served
    if mesh.attention_dp > 1 and not served.attention_dp:
        raise LayoutError(
            f"attention_dp={mesh.attention_dp}: SGLang's {name} has no data parallel attention; "
            "use attention_dp=1 with more servers"
        )
    if mesh.pp > 1 and not served.pipeline:
        raise LayoutError(
            f"pp={mesh.pp}: SGLang's {name} is not known to have pipeline stages; use pp=1 with a "
            "larger tp"
        )
    if mesh.dense_whole and not served.dense_whole:
        raise LayoutError(
            f"dense_whole: the dense layers of SGLang's {name} do not follow moe_dense_tp_size; "
            "leave it out"
        )
    if shape.tie_embeddings and served.tied == "never":
        raise LayoutError(
            f"SGLang's {name} never ties its head to the embedding and would leave it empty; "
            "save the policy with a head of its own"
        )
    if shape.tie_embeddings and mesh.pp > 1 and served.tied == "one_stage":
        raise LayoutError(
            f"SGLang's {name} has no copy of a tied embedding on its last stage; use pp=1"
        )
    if moe is not None and "dense" in shape.layer_kinds and not served.dense_layers:
        raise LayoutError(
            f"layers {_dense(shape)} have no experts, but SGLang's {name} builds experts in every "
            "layer and would serve them empty; such a policy cannot be served"
        )
    if mesh.ep > 1 and moe is None:
        raise LayoutError(f"ep={mesh.ep}, but {name} has no experts here; use ep=1")
    if not mesh.fused_shared_experts:
        return
    if moe is None or moe.shared_intermediate_size != moe.expert_intermediate_size:
        size = 0 if moe is None else moe.shared_intermediate_size
        raise LayoutError(
            f"fused_shared_experts: a layout has one fused shared expert of the routed ones' size; "
            f"the shared experts here have an intermediate size of {size}; {APART}"
        )
    if mesh.cpu:
        raise LayoutError(f"fused_shared_experts: there is no layout of them on a CPU; {APART}")


def _dense(shape: ModelShape) -> str:
    return ", ".join(str(i) for i, kind in enumerate(shape.layer_kinds) if kind == "dense")


def _fault(shape: ModelShape, mesh: ServerMesh) -> str | None:
    """The first size that does not split, in words."""
    where = f"rollout.parallel.tp={mesh.tp}"
    tp = mesh.attention_tp
    attention = where if mesh.attention_dp == 1 else f"{where} / attention_dp={mesh.attention_dp}"
    heads, kv, moe = shape.num_heads, shape.num_kv_heads, shape.moe
    if not mesh.cpu:
        if heads % tp:
            return f"{heads} attention heads do not split over {attention}"
        if shape.mla is None and kv % tp and tp % kv:
            return f"{kv} kv heads neither split over nor divide {attention}"
        inner = shape.intermediate_size
        if "dense" in shape.layer_kinds and not mesh.dense_whole and inner % mesh.tp:
            return f"{inner} columns of down_proj do not split over {where}"
    if moe is None:
        return None
    if moe.num_experts % mesh.ep:
        return f"{moe.num_experts} experts do not split over ep={mesh.ep}"
    if mesh.tp > moe.num_experts:
        return f"{where} exceeds the {moe.num_experts} experts, which SGLang refuses"
    if mesh.cpu:
        return None
    if moe.expert_intermediate_size % mesh.expert_tp:
        return (
            f"{moe.expert_intermediate_size} columns of an expert's down_proj do not split over "
            f"{where} / ep={mesh.ep}"
        )
    if not mesh.shared_whole and moe.shared_intermediate_size % mesh.tp:
        return (
            f"{moe.shared_intermediate_size} columns of the shared experts' down_proj do not split "
            f"over {where}"
        )
    return None
