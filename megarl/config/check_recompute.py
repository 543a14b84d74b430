"""What keeps `learner.recompute` from meaning what it says, told before Megatron is started.

Owns those combinations: what Megatron-Core 0.19.2 refuses late, and what it silently passes over.
"""

from __future__ import annotations

from collections.abc import Iterator

from megarl.actor.shape import ModelShape
from megarl.config.check_model import uses_cpu
from megarl.config.recompute import RecomputeConfig
from megarl.config.schema import Config
from megarl.config.violation import Violation

GROUP = "learner.recompute"
GRANULARITY = f"{GROUP}.granularity"
MODULES = f"{GROUP}.modules"
OFFLOADS = ("cpu_offloading", "fine_grained_activation_offloading")
USED_BY = {"method": "full", "num_layers": "full", "modules": "selective"}
ENGINE_ONLY = ("layernorm", "moe_act")
INSIDE_MOE = ("moe_act", "shared_experts")


def check_recompute(config: Config) -> Iterator[Violation]:
    """Settings against each other."""
    recompute = config.learner.recompute
    for name, needed in USED_BY.items():
        default = RecomputeConfig.model_fields[name].default
        if recompute.granularity != needed and getattr(recompute, name) != default:
            yield Violation(
                f"{GROUP}.{name} has no meaning with {GRANULARITY} = {recompute.granularity}; it "
                f"is for {needed}",
                (f"{GROUP}.{name}", GRANULARITY),
            )
    if recompute.granularity == "none":
        return
    for field in OFFLOADS:
        if config.learner.transformer_config.get(field):
            yield Violation(
                f"learner.transformer_config.{field} beside {GRANULARITY} = "
                f"{recompute.granularity}: activations are either sent to host memory or computed "
                "again; use one",
                ("learner.transformer_config", GRANULARITY),
            )
    if recompute.granularity == "selective":
        yield from _modules(config)


def _modules(config: Config) -> Iterator[Violation]:
    modules = config.learner.recompute.modules
    if not modules or len(set(modules)) != len(modules):
        yield Violation(
            f"{MODULES} = {modules}: name at least one, and each once; or use {GRANULARITY} = none",
            (MODULES, GRANULARITY),
        )
    if "moe" in modules:
        twice = [name for name in INSIDE_MOE if name in modules]
        if twice:
            yield Violation(
                f"{MODULES}: moe recomputes {' and '.join(twice)} too, inside it; leave one out",
                (MODULES,),
            )
    lacking = [name for name in ENGINE_ONLY if name in modules]
    if lacking and uses_cpu(config):
        yield Violation(
            f"{MODULES}: {' and '.join(lacking)} on a CPU: Megatron recomputes them with functions "
            "of Transformer Engine (CheckpointWithoutOutput), which needs CUDA; leave them out, or "
            f"use {GRANULARITY} = full",
            (MODULES, "launch.device"),
        )
    delayed = [name for name in ("layernorm", "moe_act") if name in modules]
    precision = config.learner.precision
    if delayed and precision.uses_fp8 and precision.fp8_recipe == "delayed":
        yield Violation(
            f"{MODULES}: {' and '.join(delayed)} with learner.precision.fp8_recipe = delayed: "
            "Megatron refuses it, as largest magnitudes would be counted twice; use another recipe "
            "or module",
            (MODULES, "learner.precision.fp8_recipe"),
        )


def check_recompute_shape(config: Config, shape: ModelShape) -> Iterator[Violation]:
    """Settings against the model: a module that it lacks would be passed over in silence."""
    recompute = config.learner.recompute
    if recompute.granularity != "selective":
        return
    has_moe, has_mla = shape.moe is not None, shape.mla is not None
    shares = shape.moe is not None and shape.moe.shared_intermediate_size > 0
    lacking = {
        "layernorm": (has_moe or has_mla, "norm that is not inside the linear after it"),
        "mla_up_proj": (has_mla, "latent attention"),
        "mlp": ("dense" in shape.layer_kinds, "dense MLP"),
        "moe": (has_moe, "routed experts"),
        "moe_act": (has_moe, "routed experts"),
        "shared_experts": (shares, "shared experts"),
    }
    for name in recompute.modules:
        found, words = lacking.get(name, (True, ""))
        if not found:
            yield Violation(
                f"{MODULES}: {name}: this model has no {words}, so that nothing would be "
                "recomputed; leave it out",
                (MODULES, "actor.model"),
            )
