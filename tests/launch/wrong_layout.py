"""Program in the place of megarl.learner.layout_check, with one parallelism broken on purpose.

Its first argument names what: `cp` (keys and values get no gradient from other context ranks), or
`vpp` (messages of two chunks to one neighbour are batched, which Megatron mixes up silently).
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from megarl.config.schema import Config
from megarl.learner import layout_check
from megarl.learner.learner import Learner


def build(config: Config, folder: Path) -> Learner:
    """The learner, broken once Megatron can be imported."""
    from megarl.compat import megatron_cpu

    megatron_cpu.install()
    from megarl.compat import megatron_parts
    from megarl.learner import transformer

    if BROKEN == "cp":
        from megatron.core.tensor_parallel import gather_from_sequence_parallel_region as gather

        megatron_parts.gather_from_sequence_parallel_region = lambda part, group: gather(
            part, tensor_parallel_output_grad=False, group=group
        )
    if BROKEN == "vpp":
        settings = transformer._settings

        def batched(*arguments: Any) -> dict[str, Any]:
            return {**settings(*arguments), "overlap_p2p_comm": False, "batch_p2p_comm": True}

        transformer._settings = batched
    return Learner(config, folder)


if __name__ == "__main__":
    BROKEN = sys.argv.pop(1)
    layout_check.main(build)
