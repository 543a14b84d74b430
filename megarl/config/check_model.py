"""What the model allows: parallel sizes that divide it, lengths of samples, files in its folder.

Owns the arithmetic between settings and the model's shape. Imports no engine: what the engines
allow is written down here, with its source.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path

from megarl.actor.families import FAMILIES
from megarl.actor.shape import MixtureOfExperts, ModelShape
from megarl.config.bounds import PROBE_CONTEXT
from megarl.config.schema import Config
from megarl.config.violation import Violation
from megarl.nodes import visible_gpus

# SGLang 0.5.23 on a CPU pads intermediate sizes to a multiple of 32 x tp, configs/update_config.py
CPU_INTERMEDIATE_MULTIPLE = 32

# A group of experts is chosen by the sum of so many of its scores, DeepSeek-V3 2024, 2.1.2.
GROUP_SCORES = 2

LENGTHS = ("prompts.max_prompt_tokens", "rollout.sampling.max_new_tokens")


def check_shape(config: Config, shape: ModelShape) -> list[Violation]:
    """Settings against the shape of the model: what divides, and how long a sample can be."""
    checks = (_positions, _learner_layout, _rollout_layout)
    return [violation for check in checks for violation in check(config, shape)]


def check_trained(model: Path, shape: ModelShape) -> Iterator[Violation]:
    """Whether the learner computes the model, in weights that it can update."""
    if not FAMILIES[shape.architecture].trained:
        trained = ", ".join(name for name, family in FAMILIES.items() if family.trained)
        yield Violation(
            f"{model} is a {shape.architecture}, which the learner does not compute yet (megarl "
            f"plans its layouts only); use one of {trained}",
            ("actor.model",),
        )
    elif shape.fp8_block is not None:
        yield Violation(
            f"{model} has float8 weights (quantization_config), which the learner does not train; "
            "use the checkpoint in bfloat16, with rollout.precision.weights = fp8 for servers that "
            "hold float8",
            ("actor.model",),
        )
    elif shape.moe is not None:
        for fault in router_faults(shape.moe):
            yield Violation(f"{model}: {fault}; megarl cannot train it", ("actor.model",))


def router_faults(moe: MixtureOfExperts) -> list[str]:
    """Where Megatron's router would choose otherwise than the model's; empty where it does not.

    Source: megatron-core 0.19.2, topk_routing_with_score_function and group_limited_topk.
    """
    faults = []
    chosen, groups = moe.experts_per_token, moe.groups_per_token
    if moe.scoring == "sigmoid" and not moe.normalize and chosen > 1:
        faults.append("norm_topk_prob is false, but Megatron normalizes chosen sigmoid scores")
    if moe.normalize and chosen == 1:
        faults.append("num_experts_per_tok is 1, but Megatron normalizes no single score")
    if moe.num_groups > 1 and chosen // groups != GROUP_SCORES:
        faults.append(
            f"a group is chosen by {GROUP_SCORES} scores, but Megatron takes num_experts_per_tok / "
            f"topk_group = {chosen} / {groups}"
        )
    return faults


def check_model_files(config: Config, model: Path) -> Iterator[Violation]:
    """The tokenizer, and the chat template where one is needed."""
    if not (model / "tokenizer.json").is_file():
        yield Violation(
            f"{model} has no tokenizer.json; set actor.model to a folder that has one (a recent "
            "transformers makes it: load the tokenizer, save_pretrained it)",
            ("actor.model",),
        )
    if config.prompts.template != "chat" or (model / "chat_template.jinja").is_file():
        return
    path = model / "tokenizer_config.json"
    template = None
    if path.is_file():
        try:
            template = json.loads(path.read_text(encoding="utf-8")).get("chat_template")
        except (OSError, ValueError, RecursionError, AttributeError) as error:
            yield Violation(f"{path} is no JSON object: {error}", ("actor.model",))
            return
    if not template:
        yield Violation(
            f"prompts.template = chat, but the model in {model} has no chat template (neither "
            "chat_template.jinja nor chat_template in tokenizer_config.json); "
            "use prompts.template = none, or a model that has one",
            ("prompts.template", "actor.model"),
        )


def _positions(config: Config, shape: ModelShape) -> Iterator[Violation]:
    longest, words = longest_sample(config)
    if longest > shape.max_positions:
        yield Violation(
            f"{words} exceed the model's max_position_embeddings = {shape.max_positions}; "
            "lower the lengths",
            (*LENGTHS, "actor.model"),
        )
    probed = config.weight_sync.probe_tokens
    if probed + PROBE_CONTEXT > shape.max_positions:
        yield Violation(
            f"weight_sync.probe_tokens = {probed} and the {PROBE_CONTEXT} tokens before them "
            f"exceed the model's max_position_embeddings = {shape.max_positions}; lower it",
            ("weight_sync.probe_tokens", "actor.model"),
        )


def _learner_layout(config: Config, shape: ModelShape) -> Iterator[Violation]:
    tp, pp = config.learner.parallel.tp, config.learner.parallel.pp
    faults = learner_tp_faults(shape, tp)
    if faults:
        sizes = allowed_sizes(lambda size: not learner_tp_faults(shape, size), shape.num_heads)
        yield Violation(
            f"learner.parallel.tp = {tp}: {'; '.join(faults)}; use {sizes}",
            ("learner.parallel.tp", "actor.model"),
        )
    if shape.num_layers % pp and config.learner.parallel.even:
        sizes = allowed_sizes(lambda size: shape.num_layers % size == 0, shape.num_layers)
        yield Violation(
            f"learner.parallel.pp = {pp}: {shape.num_layers} layers do not split into {pp} equal "
            f"stages; use {sizes}",
            ("learner.parallel.pp", "actor.model"),
        )
    if shape.moe is None:
        yield from _no_experts(config)
    else:
        yield from _learner_experts(config, shape.moe)


def _no_experts(config: Config) -> Iterator[Violation]:
    for name in ("ep", "etp"):
        size = getattr(config.learner.parallel, name)
        if size > 1:
            yield Violation(
                f"learner.parallel.{name} = {size}: actor.model has no routed experts; use 1",
                (f"learner.parallel.{name}", "actor.model"),
            )


def _learner_experts(config: Config, moe: MixtureOfExperts) -> Iterator[Violation]:
    """The experts' own axes, and sequence parallelism, which Megatron trains them with."""
    parallel = config.learner.parallel
    sizes = (
        ("ep", "experts", moe.num_experts),
        ("etp", "rows of an expert's gate (moe_intermediate_size)", moe.expert_intermediate_size),
    )
    for name, words, count in sizes:
        size = getattr(parallel, name)
        if count % size:
            divisors = [str(n) for n in range(1, count + 1) if count % n == 0]
            yield Violation(
                f"learner.parallel.{name} = {size}: {count} {words} do not split over {size} "
                f"ranks; use {', '.join(divisors[:-1])} or {divisors[-1]}",
                (f"learner.parallel.{name}", "actor.model"),
            )
    name = "learner.transformer_config.sequence_parallel"
    if parallel.tp > 1 and config.learner.transformer_config.get("sequence_parallel") is False:
        yield Violation(
            f"{name} = false: with learner.parallel.tp = {parallel.tp} Megatron trains routed "
            "experts only with it; remove it",
            ("learner.transformer_config", "learner.parallel.tp"),
        )


def learner_tp_faults(shape: ModelShape, tp: int) -> list[str]:
    """Why Megatron-Core cannot split the model over `tp` ranks; empty where it can.

    Source: megatron-core 0.19.2, TransformerConfig.__post_init__ and SelfAttention.__init__, which
    cuts the fused QKV rows evenly, a head in the middle where tp exceeds the kv heads.
    """
    faults = []
    if shape.num_heads % tp:
        faults.append(f"{shape.num_heads} attention heads do not split over {tp} ranks")
    if shape.num_kv_heads % tp and tp % shape.num_kv_heads:
        faults.append(f"{shape.num_kv_heads} kv heads are neither a multiple nor a divisor of {tp}")
    qkv_rows = (shape.num_heads + 2 * shape.num_kv_heads) * shape.head_dim
    if qkv_rows % tp and shape.mla is None:
        faults.append(f"{qkv_rows} rows of q, k and v do not split over {tp} ranks")
    if shape.intermediate_size % tp and "dense" in shape.layer_kinds:
        faults.append(f"intermediate size {shape.intermediate_size} does not split over {tp} ranks")
    if shape.moe is not None and shape.moe.shared_intermediate_size % tp:
        shared = shape.moe.shared_intermediate_size
        faults.append(f"{shared} rows of the shared experts' gate do not split over {tp} ranks")
    return faults


def _rollout_layout(config: Config, shape: ModelShape) -> Iterator[Violation]:
    faults = rollout_faults(config, shape)
    if faults:
        parallel, cpu = config.rollout.parallel, uses_cpu(config)
        tp, dp = parallel.tp, parallel.attention_dp
        most = shape.num_heads * (1 if cpu else dp)
        sizes = allowed_sizes(lambda size: not rollout_tp_faults(shape, size, cpu, dp), most)
        yield Violation(
            f"rollout.parallel.tp = {tp}: {'; '.join(faults)}; "
            + ("no tp works for this model" if sizes == "none" else f"use {sizes}"),
            ("rollout.parallel.tp", "actor.model"),
        )


def rollout_faults(config: Config, shape: ModelShape) -> list[str]:
    """Why this run's servers cannot split the model without padding; empty where they can."""
    parallel = config.rollout.parallel
    return rollout_tp_faults(shape, parallel.tp, uses_cpu(config), parallel.attention_dp)


def rollout_tp_faults(shape: ModelShape, tp: int, cpu: bool, attention_dp: int = 1) -> list[str]:
    """Why SGLang cannot split the model over `tp` ranks without padding; empty where it can.

    Source: SGLang 0.5.23. On a GPU kv heads are copied where tp is a multiple of them. On a CPU
    configs/update_config.py pads kv heads to a multiple of tp and intermediate sizes to a multiple
    of 32 x tp, with shapes that the checkpoint does not have; it goes by tp there, also where
    attention is data parallel.
    """
    faults = []
    over = tp if cpu else max(1, tp // attention_dp)  # ranks of one copy of the attention
    if shape.num_heads % over:
        faults.append(f"{shape.num_heads} attention heads do not split over {over} ranks")
    if shape.num_kv_heads % over and (cpu or over % shape.num_kv_heads):
        rule = "SGLang pads kv heads on a CPU" if cpu else "nor are they copied whole"
        faults.append(f"{shape.num_kv_heads} kv heads do not split over {over} ranks ({rule})")
    unit = CPU_INTERMEDIATE_MULTIPLE * tp if cpu else tp
    if shape.intermediate_size % unit:
        rule = f"{CPU_INTERMEDIATE_MULTIPLE} x {tp} = {unit} on a CPU" if cpu else str(unit)
        faults.append(f"intermediate size {shape.intermediate_size} is no multiple of {rule}")
    return faults


def allowed_sizes(works: Callable[[int], bool], highest: int) -> str:
    """The parallel sizes up to `highest` that `works` accepts, in words.

    >>> allowed_sizes(lambda tp: 12 % tp == 0, 6)
    '1, 2, 3, 4 or 6'
    """
    sizes = [str(tp) for tp in range(1, highest + 1) if works(tp)]
    if not sizes:
        return "none"
    return " or ".join([", ".join(sizes[:-1]), sizes[-1]]) if len(sizes) > 1 else sizes[0]


def uses_cpu(config: Config) -> bool:
    """Whether the run is on CPUs; for `auto`, as far as this machine can tell by its GPUs."""
    if config.launch.device == "auto":
        return visible_gpus(os.environ) == 0
    return config.launch.device == "cpu"


def longest_sample(config: Config) -> tuple[int, str]:
    """Tokens of the longest prompt with the longest response, and how they come about."""
    prompt, new = config.prompts.max_prompt_tokens, config.rollout.sampling.max_new_tokens
    words = f"{LENGTHS[0]} + {LENGTHS[1]} = {prompt} + {new} = {prompt + new} tokens"
    return prompt + new, words
