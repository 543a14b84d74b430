"""What the model allows: parallel sizes that divide it, lengths of samples, files in its folder.

Owns the arithmetic between settings and the model's shape. Imports no engine: which sizes the
engines split is written down in `reshard/`, whatever else they allow here, with its source.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from megarl.actor.families import FAMILIES
from megarl.actor.shape import MixtureOfExperts, ModelShape
from megarl.config.bounds import PROBE_CONTEXT
from megarl.config.schema import Config
from megarl.config.violation import Violation
from megarl.nodes import visible_gpus
from megarl.reshard.megatron import unsplit
from megarl.reshard.sglang_limits import cpu_padded

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
    parallel, moe = config.learner.parallel, shape.moe
    yield from _axis("tp", parallel.tp, shape, shape.num_heads)
    if moe is None:
        yield from _no_experts(config)
    else:
        yield from _axis("ep", parallel.ep, shape, moe.num_experts)
        yield from _axis("etp", parallel.etp, shape, moe.expert_intermediate_size)
        yield from _sequence_parallel(config)
    if shape.num_layers % parallel.pp and parallel.even:
        sizes = allowed_sizes(lambda size: shape.num_layers % size == 0, shape.num_layers)
        yield Violation(
            f"learner.parallel.pp = {parallel.pp}: {shape.num_layers} layers do not split into "
            f"{parallel.pp} equal stages; use {sizes}",
            ("learner.parallel.pp", "actor.model"),
        )


def _axis(axis: str, size: int, shape: ModelShape, highest: int) -> Iterator[Violation]:
    """What does not split over one axis of the learner; sizes up to `highest` may do."""

    def found(size: int) -> list[str]:
        return [each.what for each in unsplit(shape, **{axis: size})]

    if found(size):
        yield Violation(
            f"learner.parallel.{axis} = {size}: {_listed(found(size), 'and')} do not split over "
            f"{size} ranks; use {allowed_sizes(lambda n: not found(n), highest)}",
            (f"learner.parallel.{axis}", "actor.model"),
        )


def _no_experts(config: Config) -> Iterator[Violation]:
    for name in ("ep", "etp"):
        size = getattr(config.learner.parallel, name)
        if size > 1:
            yield Violation(
                f"learner.parallel.{name} = {size}: actor.model has no routed experts; use 1",
                (f"learner.parallel.{name}", "actor.model"),
            )


def _sequence_parallel(config: Config) -> Iterator[Violation]:
    """Megatron trains experts over several tensor ranks only with sequence parallelism."""
    parallel, name = config.learner.parallel, "learner.parallel.sequence_parallel"
    if parallel.tp > 1 and not parallel.sequence_parallel:
        yield Violation(
            f"{name} = false: with learner.parallel.tp = {parallel.tp} Megatron trains routed "
            "experts only with it; remove it",
            (name, "learner.parallel.tp"),
        )


def _rollout_layout(config: Config, shape: ModelShape) -> Iterator[Violation]:
    faults, tp = rollout_faults(config, shape), config.rollout.parallel.tp
    if faults:
        sizes = allowed_sizes(lambda size: not cpu_padded(shape, size), shape.num_heads)
        yield Violation(
            f"rollout.parallel.tp = {tp}: on a CPU SGLang pads {_listed(faults, 'and')}, to shapes "
            "that the checkpoint does not have; "
            + ("no tp works for this model" if sizes == "none" else f"use {sizes}"),
            ("rollout.parallel.tp", "actor.model"),
        )


def rollout_faults(config: Config, shape: ModelShape) -> list[str]:
    """What this run's servers would pad; what they cannot split the layout says itself."""
    return cpu_padded(shape, config.rollout.parallel.tp) if uses_cpu(config) else []


def allowed_sizes(works: Callable[[int], bool], highest: int) -> str:
    """The parallel sizes up to `highest` that `works` accepts, in words.

    >>> allowed_sizes(lambda tp: 12 % tp == 0, 6)
    '1, 2, 3, 4 or 6'
    """
    sizes = [str(tp) for tp in range(1, highest + 1) if works(tp)]
    return _listed(sizes, "or") if sizes else "none"


def _listed(words: Sequence[str], joint: str) -> str:
    return f" {joint} ".join([", ".join(words[:-1]), words[-1]]) if len(words) > 1 else words[0]


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
