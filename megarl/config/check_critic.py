"""What a critic needs, and settings of it that have no meaning in a run without one.

Owns the words for settings of `critic`, and those of `advantage` and `kl` that ask for it.
"""

from __future__ import annotations

from collections.abc import Iterator

from megarl.actor.shape import ModelShape
from megarl.config.advantage import AdvantageConfig
from megarl.config.check_model import longest_sample
from megarl.config.critic import CriticConfig
from megarl.config.group import Group
from megarl.config.layouts import critic_layout, critic_shape
from megarl.config.schema import Config
from megarl.config.violation import Violation
from megarl.errors import LayoutError, ModelError

TOKENS = ("gamma", "gae_lambda", "whiten", "cut_responses")
"""Settings of `advantage` that are of its estimator gae."""


def check_critic(config: Config) -> Iterator[Violation]:
    """Settings against each other."""
    if not config.has_critic:
        yield from _without(config)
        return
    for axis in ("tp", "pp"):
        own, ours = getattr(config.critic.parallel, axis), getattr(config.learner.parallel, axis)
        if own not in (0, ours):
            yield Violation(
                f"critic.parallel.{axis} = {own}, learner.parallel.{axis} = {ours}: the critic is "
                "on the learner's ranks, and Megatron-Core keeps one set of process groups in a "
                "process (parallel_state), which both models go through; use 0, the learner's",
                (f"critic.parallel.{axis}", f"learner.parallel.{axis}"),
            )
    if config.critic.warmup_versions >= config.loop.versions:
        yield Violation(
            f"critic.warmup_versions = {config.critic.warmup_versions} with loop.versions = "
            f"{config.loop.versions} leaves the policy no version to learn in; lower it",
            ("critic.warmup_versions", "loop.versions"),
        )
    if not config.advantage.normalize_std:
        yield _needs("advantage.normalize_std", False, "grpo")


def _without(config: Config) -> Iterator[Violation]:
    """What would be set in vain."""
    advantage, critic = config.advantage, config.critic
    for name in TOKENS:
        if getattr(advantage, name) != AdvantageConfig.model_fields[name].default:
            yield _needs(f"advantage.{name}", getattr(advantage, name), "gae")
    default = dict(_leaves(CriticConfig(), "critic"))
    for name, found in _leaves(critic, "critic"):
        if found != default[name]:
            yield _needs(name, found)
    if config.kl.where == "reward":
        yield _needs("kl.where", config.kl.where, "gae")


def _leaves(group: Group, prefix: str) -> Iterator[tuple[str, object]]:
    for name in type(group).model_fields:
        value = getattr(group, name)
        if isinstance(value, Group):
            yield from _leaves(value, f"{prefix}.{name}")
        else:
            yield f"{prefix}.{name}", value


def _needs(name: str, found: object, estimator: str = "gae") -> Violation:
    return Violation(
        f"{name} = {found} has a meaning with advantage.estimator = {estimator} only; change one",
        (name, "advantage.estimator"),
    )


def check_critic_model(config: Config, policy: ModelShape) -> Iterator[Violation]:
    """The critic's checkpoint against the policy and the learner's ranks."""
    if not config.has_critic or not config.critic.model:
        return  # the policy's own layers, which are looked at anyway
    name = "critic.model"
    try:
        shape = critic_shape(config)
        critic_layout(config, shape)
    except (ModelError, LayoutError) as error:
        yield Violation(f"{name}: {error}", (name,))
        return
    if shape.vocab_size != policy.vocab_size:
        yield Violation(
            f"{name} has {shape.vocab_size} tokens in its vocabulary, actor.model has "
            f"{policy.vocab_size}; it reads the policy's tokens, so name a model that shares them",
            (name, "actor.model"),
        )
    longest, words = longest_sample(config)
    if longest > shape.max_positions:
        yield Violation(
            f"{words} exceed the max_position_embeddings = {shape.max_positions} of {name}; "
            "name a model that takes them",
            (name,),
        )
