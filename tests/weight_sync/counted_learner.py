"""The learner, ranks and launcher, as megarl starts it, but that `info` also says what its stores
hold, and that its ranks may pretend to be on several nodes.

`python -m tests.weight_sync.counted_learner --config CONFIG --run-dir FOLDER`, with MEGARL_NODE
as one name, or one for each rank, as in `a,a,b,b`.
"""

from __future__ import annotations

import os

from megarl.learner import agent, service
from megarl.learner.parent import leave
from megarl.nodes import NODE_VARIABLE


def build(config, run_dir, mark):  # type: ignore[no-untyped-def]
    """The real learner with its stores counted."""
    import torch.distributed as dist

    from megarl.learner.learner import Learner

    class Counted(Learner):
        def info(self) -> dict[str, int]:
            board = self._weight_sync._exact._board if self._weight_sync is not None else None
            return super().info() | {
                "board_keys": board.num_keys if board is not None else 0,
                "group_keys": dist.distributed_c10d._get_default_store().num_keys(),
            }

    nodes = os.environ[NODE_VARIABLE].split(",")
    os.environ[NODE_VARIABLE] = nodes[int(os.environ["RANK"]) % len(nodes)]
    return Counted(config, run_dir, mark)


if __name__ == "__main__":
    if "RANK" in os.environ:
        service.main(build=build)
    else:
        leave(agent.main(module="tests.weight_sync.counted_learner"))
