"""What keeps an optimizer from having its state in host memory (`offload_fraction`).

Owns the words for what Megatron-Core 0.19.2 does not do, or gets wrong.
"""

from __future__ import annotations

from collections.abc import Iterator

from megarl.config.check_model import uses_cpu
from megarl.config.schema import Config
from megarl.config.violation import Violation

FIELD = "offload_fraction"


def check_offload(config: Config) -> Iterator[Violation]:
    """The policy's optimizer, and a critic's."""
    optimizers = {"learner.optimizer": config.learner.optimizer}
    if config.has_critic:
        optimizers["critic.optimizer"] = config.critic.optimizer
    for group, settings in optimizers.items():
        if settings.offload_fraction == 0:
            continue
        name = f"{group}.{FIELD}"
        if uses_cpu(config):
            why, more = "all of the state is in host memory on a CPU", "launch.device"
        else:
            # HybridDeviceOptimizer.dummy_step, which DistributedOptimizer.load_state_dict calls
            why, more = (
                "a run cannot do it yet: Megatron-Core loads a checkpoint into a new hybrid "
                "optimizer only after a step with random gradients, which changes the weights that "
                "were loaded, so that a run that is continued would not sample from its policy",
                "learner.optimizer",
            )
        yield Violation(
            f"{name} = {settings.offload_fraction}: {why}; remove it, and see docs/memory.md for "
            "what else takes less memory",
            (name, more),
        )
