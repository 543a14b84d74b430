"""What a critic needs, and settings of it that have no meaning in a run without one.

Owns the words for settings of `critic`, and those of `advantage` and `kl` that ask for it.
"""

from __future__ import annotations

from collections.abc import Iterator

from megarl.actor.shape import ModelShape
from megarl.config.advantage import AdvantageConfig
from megarl.config.check_fp8 import check_fp8_shape
from megarl.config.check_model import check_shape, longest_sample
from megarl.config.check_parallel import check_ranks
from megarl.config.critic import CriticConfig
from megarl.config.group import Group
from megarl.config.layouts import critic_layout, critic_settings, critic_shape
from megarl.config.schema import Config
from megarl.config.violation import Violation
from megarl.errors import LayoutError, ModelError

IN_PLACE = {
    "learner.parallel": "critic.parallel",
    "placement.learner_gpus": "critic.gpus",
}
"""What ranks of a critic's own have in the place of the learner's settings."""

TOKENS = ("gamma", "gae_lambda", "whiten", "cut_responses")
"""Settings of `advantage` that are of its estimator gae."""


def check_critic(config: Config) -> Iterator[Violation]:
    """Settings against each other."""
    if not config.has_critic:
        yield from _without(config)
        return
    yield from _apart(config) if config.critic_is_apart else _together(config)
    if config.critic.warmup_versions >= config.loop.versions:
        yield Violation(
            f"critic.warmup_versions = {config.critic.warmup_versions} with loop.versions = "
            f"{config.loop.versions} leaves the policy no version to learn in; lower it",
            ("critic.warmup_versions", "loop.versions"),
        )
    if not config.advantage.normalize_std:
        yield _needs("advantage.normalize_std", False, "grpo")


def _together(config: Config) -> Iterator[Violation]:
    """Settings of ranks that the critic has not."""
    default = dict(_leaves(CriticConfig(), "critic"))
    for name, found in _leaves(config.critic, "critic"):
        is_layout = name.startswith("critic.parallel.") or name == "critic.gpus"
        if is_layout and found != default[name]:
            yield Violation(
                f"{name} = {found} with critic.ranks = learner: the critic is on the learner's "
                "ranks, and Megatron-Core keeps one set of process groups in a process "
                "(parallel_state), which both models go through; set critic.ranks = own, or remove "
                "it",
                (name, "critic.ranks"),
            )


def _apart(config: Config) -> Iterator[Violation]:
    """The arithmetic of the critic's own ranks, which is that of the learner's."""
    if config.placement.mode == "colocated":
        yield Violation(
            "critic.ranks = own with placement.mode = colocated: what of a critic leaves a device "
            "while servers generate is not told to ranks of its own; use critic.ranks = learner",
            ("critic.ranks", "placement.mode"),
        )
    theirs, ours = critic_settings(config), set(check_ranks(config))
    for violation in check_ranks(theirs):
        if violation not in ours:
            yield _of_critic(config, violation)


def _of_critic(config: Config, violation: Violation) -> Violation:
    """What was said of the learner's settings, of the critic's in their place."""
    text, names = violation.text, violation.settings
    in_place = {**IN_PLACE, "actor.model": "critic.model"} if config.critic.model else IN_PLACE
    for ours, theirs in in_place.items():
        text = text.replace(ours, theirs)
        names = tuple(name.replace(ours, theirs) for name in names)
    return Violation(text, names)


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
    if not config.has_critic or not (config.critic.model or config.critic_is_apart):
        return  # the policy's own layers in its layout, which are looked at anyway
    name = "critic.model" if config.critic.model else "critic.parallel"
    try:
        shape = critic_shape(config)
        found = list(_unfit(config, shape)) if config.critic_is_apart else []
        yield from found
        if not found:
            critic_layout(critic_settings(config) if config.critic_is_apart else config, shape)
    except (ModelError, LayoutError) as error:
        yield _of_critic(config, Violation(f"{name}: {error}", (name,)))
        return
    if shape.vocab_size != policy.vocab_size:
        yield Violation(
            f"{name} has {shape.vocab_size} tokens in its vocabulary, actor.model has "
            f"{policy.vocab_size}; it reads the policy's tokens, so name a model that shares them",
            (name, "actor.model"),
        )
    longest, words = longest_sample(config)
    if config.critic.model and longest > shape.max_positions:
        yield Violation(
            f"{words} exceed the max_position_embeddings = {shape.max_positions} of {name}; "
            "name a model that takes them",
            (name,),
        )


def _unfit(config: Config, shape: ModelShape) -> Iterator[Violation]:
    """What of the critic does not divide over ranks of its own."""
    theirs = critic_settings(config)
    for each in (*check_shape(theirs, shape), *check_fp8_shape(theirs, shape)):
        if any(name.startswith("learner.") for name in each.settings):
            yield _of_critic(config, each)
