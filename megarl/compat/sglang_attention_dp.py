"""Data-parallel attention on SGLang's `torch_native` attention backend, which a CPU uses.

Owns what its groups are padded with: with data-parallel attention each group's batch grows to one
length, and SGLang asks the backend for the length of the sequences it adds. On a CPU it asks by a
name that only the AMX backend has ("'TorchNativeAttnBackend' object has no attribute
'get_cpu_graph_seq_len_fill_value'"). The answer here is that backend's own.

For: sglang 0.5.23 (https://github.com/sgl-project/sglang), model_executor/forward_batch_info.py.
Ends when the torch_native backend answers.
"""

from __future__ import annotations

from typing import Any

from megarl.compat.after_import import after_import

MODULE = "sglang.srt.layers.attention.torch_native_backend"
FILL = 1  # IntelAMXAttnBackend.get_cpu_graph_seq_len_fill_value


def install() -> None:
    """Give the backend its answer once it is imported. For CPU servers only."""
    after_import(MODULE, _answer)


def _answer(module: Any) -> None:
    backend = module.TorchNativeAttnBackend
    if not hasattr(backend, "get_cpu_graph_seq_len_fill_value"):
        backend.get_cpu_graph_seq_len_fill_value = lambda self: FILL
