"""What keeps an optimizer from having its state in host memory (`offload_fraction`).

Owns those combinations: what Megatron-Core 0.19.2 does not do, or gets wrong.
"""

from __future__ import annotations

from collections.abc import Iterator

from megarl.config.check_model import uses_cpu
from megarl.config.schema import Config
from megarl.config.violation import Violation

FIELD = "offload_fraction"


def check_offload(config: Config) -> Iterator[Violation]:
    """Settings against each other, of the policy's optimizer and of a critic's."""
    optimizers = {"learner.optimizer": config.learner.optimizer}
    if config.has_critic:
        optimizers["critic.optimizer"] = config.critic.optimizer
    for group, settings in optimizers.items():
        if settings.offload_fraction == 0:
            continue
        name = f"{group}.{FIELD}"
        if uses_cpu(config):
            yield Violation(
                f"{name} = {settings.offload_fraction} on a CPU: all of the state is in host "
                "memory there, and Megatron's hybrid optimizer moves what is on a GPU only; "
                "remove it",
                (name, "launch.device"),
            )
        if config.learner.precision.fp8_param:
            yield Violation(
                f"{name} = {settings.offload_fraction} with learner.precision.fp8_param: weights "
                "in FP8 have no shard that could be updated elsewhere "
                "(megatron/training/arguments.py); use one",
                (name, "learner.precision.fp8_param"),
            )
