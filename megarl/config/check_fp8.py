"""What keeps `learner.precision.fp8*` from meaning what it says, told before Megatron is started.

Owns those combinations, with the place in Megatron-Core 0.19.2 or Transformer Engine (TE) 2.20.2
that breaks, or that silently computes something else. What a process finds on its GPU is asked by
`learner/fp8.py`.
"""

from __future__ import annotations

from collections.abc import Iterator

from megarl.actor.shape import ModelShape
from megarl.config.fp8 import BLOCK, RECIPES
from megarl.config.schema import Config
from megarl.config.served import WEIGHTS
from megarl.config.violation import Violation

GROUP = "learner.precision"
FP8 = f"{GROUP}.fp8"
RECIPE = f"{GROUP}.fp8_recipe"
FIELDS = "learner.transformer_config"
ATTENTION_FIELDS = ("fp8_dot_product_attention", "fp8_multi_head_attention")
DELAYED_FIELDS = {"fp8_wgrad": True, "fp8_margin": 0}
DELAYED_SETTINGS = ("fp8_amax_history", "fp8_amax_algorithm", "fp8_amax_group")


def check_fp8(config: Config) -> Iterator[Violation]:
    """Settings against each other."""
    yield from _without_meaning(config)
    if not config.learner.precision.uses_fp8:
        return
    yield from _numbers(config)
    yield from _layers_in_bf16(config)
    yield from _weights_in_fp8(config)
    yield from _fields(config)
    yield from _servers(config)


def check_fp8_shape(config: Config, shape: ModelShape) -> Iterator[Violation]:
    """Settings against the model: layers, and the sizes of every linear on one rank."""
    precision = config.learner.precision
    if not precision.uses_fp8:
        return
    yield from _number_of_layers(config, shape)
    unit = RECIPES[precision.fp8_recipe].multiple
    for words, size, axis in _linear_sizes(shape):
        ranks = getattr(config.learner.parallel, axis) if axis else 1
        if size % (unit * ranks):
            setting = f"learner.parallel.{axis}"
            over = f" over {setting} = {ranks} leaves {size / ranks:g} for a rank, which"
            fewer = f"use a smaller {setting}, or " if ranks > 1 and size % unit == 0 else ""
            yield Violation(
                f"{RECIPE} = {precision.fp8_recipe}: {words} = {size}{over if axis else ''} is no "
                f"multiple of {unit}, as its products need; {fewer}use {FP8} = off",
                (RECIPE, *((setting,) if axis else ()), "actor.model"),
            )


def _linear_sizes(shape: ModelShape) -> Iterator[tuple[str, int, str]]:
    """Rows and columns of the linears of decoder layers, and the axis they are cut over, if any."""
    yield "hidden_size", shape.hidden_size, ""
    if shape.mla is None:
        rows = (shape.num_heads + 2 * shape.num_kv_heads) * shape.head_dim
        yield "rows of query, key and value", rows, "tp"
        yield "columns of the attention's output", shape.num_heads * shape.head_dim, "tp"
    else:
        mla, heads = shape.mla, shape.num_heads
        if mla.q_lora_rank is not None:
            yield "q_lora_rank", mla.q_lora_rank, ""
        yield "kv_lora_rank", mla.kv_lora_rank, ""
        rope = mla.qk_rope_head_dim
        yield "kv_lora_rank + qk_rope_head_dim", mla.kv_lora_rank + rope, ""
        yield "rows of queries", heads * (mla.qk_nope_head_dim + rope), "tp"
        yield "rows of keys and values", heads * (mla.qk_nope_head_dim + mla.v_head_dim), "tp"
        yield "columns of the attention's output", heads * mla.v_head_dim, "tp"
    if "dense" in shape.layer_kinds:
        yield "intermediate_size", shape.intermediate_size, "tp"
    if shape.moe is not None:
        yield "moe_intermediate_size", shape.moe.expert_intermediate_size, "etp"
        if shape.moe.shared_intermediate_size:
            yield "shared experts' size", shape.moe.shared_intermediate_size, "tp"


def block_differences(config: Config, shape: ModelShape) -> list[str]:
    """Where blocks of the learner's `blockwise` weights are not those of float8 servers.

    TE cuts blocks from the first row of a weight as Megatron has it: query, key and value of a
    group, gate and up, in one. Servers' blocks start anew in each tensor. Another cut is another
    rounding, not an error.
    """
    found = []
    tp = config.learner.parallel.tp
    if shape.mla is None and shape.head_dim % BLOCK:
        found.append(
            f"query, key and value: heads of {shape.head_dim} rows share blocks of {BLOCK} in the "
            "learner with heads of the others"
        )
    halves = [("intermediate size", shape.intermediate_size, tp, "dense" in shape.layer_kinds)]
    if shape.moe is not None:
        moe, etp = shape.moe, config.learner.parallel.etp
        halves.append(("moe_intermediate_size", moe.expert_intermediate_size, etp, True))
        halves.append(("shared experts' size", moe.shared_intermediate_size, tp, True))
    for words, size, ranks, there in halves:
        if there and size % (ranks * BLOCK):
            found.append(
                f"gate and up: {words} = {size} over {ranks} rank(s) is no multiple of {BLOCK}, so "
                "that a block has rows of both in the learner"
            )
    return found


def _without_meaning(config: Config) -> Iterator[Violation]:
    """Settings that would change nothing."""
    precision = config.learner.precision
    defaults = type(precision)()
    for name in type(precision).model_fields:
        setting, value = f"{GROUP}.{name}", getattr(precision, name)
        if value == getattr(defaults, name):
            continue
        if name.startswith("fp8_") and not precision.uses_fp8:
            yield Violation(
                f"{setting} = {value!r} has no meaning with {FP8} = off; remove one", (setting, FP8)
            )
        elif name in DELAYED_SETTINGS and precision.fp8_recipe != "delayed":
            yield Violation(
                f"{setting} = {value!r} is of delayed scales, and {RECIPE} = "
                f"{precision.fp8_recipe} takes each from the numbers themselves; remove one",
                (setting, RECIPE),
            )


def _numbers(config: Config) -> Iterator[Violation]:
    precision = config.learner.precision
    if precision.params != "bf16":
        yield Violation(
            f"{GROUP}.params = {precision.params} beside {FP8} = {precision.fp8}: Transformer "
            "Engine's layers quantize bf16 numbers; use bf16",
            (f"{GROUP}.params", FP8),
        )
    if config.launch.device == "cpu":
        yield Violation(
            f"{FP8} = {precision.fp8} with launch.device = cpu: there is no Transformer Engine on "
            "a CPU, and Megatron would silently compute without FP8; use off, or a GPU",
            (FP8, "launch.device"),
        )


def _layers_in_bf16(config: Config) -> Iterator[Violation]:
    """Source: TransformerConfig.__post_init__; fp8_utils.get_fp8_context says why."""
    precision = config.learner.precision
    names = tuple(
        f"{GROUP}.{name}"
        for name in ("fp8_first_layers_bf16", "fp8_last_layers_bf16")
        if getattr(precision, name)
    )
    if names and precision.fp8_recipe == "delayed":
        yield Violation(
            f"{' and '.join(names)} with {RECIPE} = delayed: entering and leaving FP8 layer by "
            "layer breaks its reduction of largest magnitudes, and Megatron refuses it; use "
            "tensorwise, blockwise or mxfp8, or 0 layers",
            (*names, RECIPE),
        )


def _number_of_layers(config: Config, shape: ModelShape) -> Iterator[Violation]:
    """Source: TransformerConfig.__post_init__, max_bf16_layers_per_pipeline_stage."""
    precision, pp = config.learner.precision, config.learner.parallel.pp
    counts = {
        f"{GROUP}.fp8_first_layers_bf16": precision.fp8_first_layers_bf16,
        f"{GROUP}.fp8_last_layers_bf16": precision.fp8_last_layers_bf16,
    }
    most = shape.num_layers // pp
    for name, count in counts.items():
        if count > most:
            yield Violation(
                f"{name} = {count} is more than the {most} layers of a pipeline stage "
                f"({shape.num_layers} over learner.parallel.pp = {pp}), which is what Megatron "
                "takes; use fewer",
                (name, "learner.parallel.pp", "actor.model"),
            )
    if sum(counts.values()) >= shape.num_layers:
        yield Violation(
            f"{' + '.join(counts)} = {' + '.join(map(str, counts.values()))} leave none of "
            f"{shape.num_layers} layers in FP8; use fewer, or {FP8} = off",
            (*counts, FP8, "actor.model"),
        )


def _weights_in_fp8(config: Config) -> Iterator[Violation]:
    """Source: distrib_optimizer.py, _copy_main_params_to_model_params; arguments.py."""
    precision = config.learner.precision
    param, gather = f"{GROUP}.fp8_param", f"{GROUP}.fp8_param_gather"
    if precision.fp8_param_gather and not precision.fp8_param:
        yield Violation(
            f"{gather} without {param}: there are no weights in FP8 to gather; set both, or none",
            (gather, param),
        )
    if precision.fp8_param and not precision.fp8_param_gather:
        yield Violation(
            f"{param} without {gather}: Megatron's distributed optimizer, which the learner always "
            "has, writes FP8 weights only as it gathers them, so no step would change them, "
            "without an error; set both, or none",
            (param, gather),
        )
    if precision.fp8_param:
        aliased = (
            ", and with mxfp8 the buffer of weights, which a sync reads in place, is that of "
            "gradients"
            if precision.fp8_recipe == "mxfp8"
            else ""
        )
        yield Violation(
            f"{param} = true: a checkpoint is read into, the reference is swapped into and every "
            f"weight sync is read from the learner's live weights, which would be Transformer "
            f"Engine's quantized tensors and no plain numbers{aliased}; a run takes false as yet",
            (param,),
        )


def _fields(config: Config) -> Iterator[Violation]:
    """Fields of `learner.transformer_config` that the recipe ignores without a word.

    Source: fp8_utils.get_fp8_recipe, which passes each recipe only some of them.
    """
    fields, recipe = config.learner.transformer_config, config.learner.precision.fp8_recipe
    for name in ATTENTION_FIELDS:
        mha = name == "fp8_multi_head_attention" and recipe != "delayed"
        if fields.get(name) and (recipe == "blockwise" or mha):
            yield _ignored(name, fields[name], recipe)
    for name, default in DELAYED_FIELDS.items():
        if recipe != "delayed" and fields.get(name, default) != default:
            yield _ignored(name, fields[name], recipe)


def _ignored(name: str, value: object, recipe: str) -> Violation:
    return Violation(
        f"{FIELDS}.{name} = {str(value).lower()}: Megatron ignores it with {RECIPE} = {recipe}; "
        "remove it",
        (FIELDS, RECIPE),
    )


def _servers(config: Config) -> Iterator[Violation]:
    """Float8 servers have one rule of scales, and so must what the learner computes with."""
    served, recipe = config.rollout.precision, config.learner.precision.fp8_recipe
    if served.weights != "fp8":
        return
    if recipe != "blockwise":
        yield Violation(
            f"{RECIPE} = {recipe} beside {WEIGHTS} = fp8: servers have float8 in square blocks, "
            "the learner would compute with weights that are rounded by another rule; use "
            f"blockwise, or {WEIGHTS} = policy",
            (RECIPE, WEIGHTS),
        )
    elif served.fp8_block != BLOCK:
        yield Violation(
            f"rollout.precision.fp8_block = {served.fp8_block} beside {RECIPE} = blockwise: "
            f"Transformer Engine's blocks are {BLOCK} x {BLOCK}; use {BLOCK}",
            ("rollout.precision.fp8_block", RECIPE),
        )
