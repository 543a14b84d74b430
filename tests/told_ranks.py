"""One of some ranks: prints what it is, or, with an argument, waits for rank 1, which fails."""

from __future__ import annotations

import json
import os
import sys
import time


def main() -> None:
    """Tell, or fail."""
    if len(sys.argv) > 1:
        if os.environ["RANK"] == "1":
            raise ValueError("as it was meant to")
        time.sleep(600)
    has_megatron = "megatron.core.models.gpt" in sys.modules
    sys.modules.pop("megatron.core.models.gpt", None)  # of this fork alone
    names = ("RANK", "WORLD_SIZE", "MASTER_ADDR")
    print(json.dumps([os.getpid(), has_megatron, *(os.environ[name] for name in names)]))
