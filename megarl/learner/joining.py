"""How a process becomes a rank of the learner, once it is known that it can compute as it is asked.

Owns the order of these checks. What each looks at is its own module's.
"""

from __future__ import annotations

from collections.abc import Callable

from megarl.config.layouts import learner_mesh
from megarl.config.schema import Config
from megarl.learner import accelerators, distributed, fp8


def join(config: Config, mark: Callable[[str], None]) -> distributed.Ranks:
    """This rank among the others. Collective over all ranks.

    Raises LearnerError where a package that Megatron imports is broken, LaunchError where the
    processes do not fit the layout, ConfigError where FP8 cannot be run.
    """
    found = accelerators.find_accelerators()  # Megatron would end where one is broken
    mark("joining")
    ranks = distributed.start(
        learner_mesh(config),
        device=config.launch.device,
        seed=config.run.seed,
        timeout_s=max(config.deadline.learner_verb_s, config.deadline.learner_start_s),
    )
    fp8.check_process(config.learner.precision, found)
    if ranks.rank == 0:
        accelerators.tell(found, ranks.device.type == "cuda")
    return ranks
