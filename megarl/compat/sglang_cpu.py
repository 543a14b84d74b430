"""What the released sglang wheel needs to be imported, and to run, on a CPU.

Owns the choice of placeholders and the CPU engine's switch. Patches nothing inside sglang: without
AMX it routes every operator to its native torch form by itself. Inert where the packages are
installed. Knows nothing of servers, weights or megarl's settings.

For: sglang 0.5.23 (https://github.com/sgl-project/sglang), whose wheel imports `triton`,
`torchvision` and `sgl_kernel` at module level. Ends when it imports on a CPU without them.
"""

from __future__ import annotations

import os

from megarl.compat import placeholders

IMPORTED_BUT_NOT_RUN = ("triton", "torchvision", "sgl_kernel")


def install() -> tuple[str, ...]:
    """Make `import sglang` work on a CPU; call it in every process before that import.

    Returns the packages that got a placeholder: none on a machine that has them all. Sets
    SGLANG_USE_CPU_ENGINE=1 unless the variable is set, so it must not be called for a GPU server.
    """
    os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")
    return placeholders.install(IMPORTED_BUT_NOT_RUN)
