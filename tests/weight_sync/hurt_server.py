"""`python -m tests.weight_sync.hurt_server FLAGS`: a real SGLang server whose ranks can be hurt.

The file named by MEGARL_FAULTS holds the fault of each rank for its next update. SGLang runs this
module again in its schedulers, which is how they get the loader around megarl's own.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from megarl.compat import sglang_server
from megarl.weight_sync import receiver
from tests.weight_sync.faults import Fault, in_server_rank

VARIABLE = "MEGARL_FAULTS"
_load = receiver.load


def load(model: torch.nn.Module, named: Sequence[tuple[str, object]]) -> None:
    """megarl's receiver, with this rank's fault."""
    faults = json.loads(Path(os.environ[VARIABLE]).read_text())
    told = faults.get(str(receiver.engine_rank()))
    with in_server_rank(Fault(**told) if told else None):
        _load(model, named)


if __name__ == "__main__":
    sglang_server.die_with_parent()
if __name__ in ("__main__", "__mp_main__"):  # not where a test imports this module
    receiver.load = load
    sglang_server.prepare_process(sys.argv)
if __name__ == "__main__":
    sglang_server.main()
