"""What the reference needs, and settings of it that have no meaning without a KL term."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict

from megarl.actor.shape import ModelShape, read_shape
from megarl.config.layouts import trained_shape
from megarl.config.reference import ReferenceConfig
from megarl.config.schema import Config
from megarl.config.violation import Violation
from megarl.errors import ModelError

MODEL = "reference.model"
FREE = ("max_positions", "fp8_block")  # in which its shape may differ from the policy's


def check_reference(config: Config) -> Iterator[Violation]:
    """Settings against each other."""
    for name, field in ReferenceConfig.model_fields.items():
        if config.kl.coef == 0 and getattr(config.reference, name) != field.default:
            yield Violation(
                f"reference.{name} with kl.coef = 0: there is no reference then; raise kl.coef, or "
                f"remove it",
                (f"reference.{name}", "kl.coef"),
            )


def check_reference_shape(config: Config, policy: ModelShape) -> Iterator[Violation]:
    """Its checkpoint against the policy, in whose place it is computed with."""
    if not config.reference.model or config.kl.coef == 0:
        return
    try:
        shape = trained_shape(read_shape(config.reference.model))
    except ModelError as error:
        yield Violation(f"{MODEL}: {error}", (MODEL,))
        return
    ours, theirs = asdict(trained_shape(policy)), asdict(shape)
    differing = [name for name in ours if name not in FREE and ours[name] != theirs[name]]
    if differing:
        name = differing[0]
        yield Violation(
            f"{MODEL} has {name} = {theirs[name]}, actor.model has {ours[name]}; the reference "
            "takes the policy's place in memory, so name a checkpoint of its shape",
            (MODEL, "actor.model"),
        )
