"""Multi-head latent attention on SGLang's `torch_native` attention backend, which a CPU uses.

Owns the choice of the attention's forward method there. SGLang chooses it by the backend's name and
has none for `torch_native`, so that it takes the one of the triton backend, whose prefill reads a
cache of whole heads where `torch_native` keeps latent ones ("Expected size for first two dimensions
of batch2 tensor to be: [4, 48] but got: [4, 80]"). The method registered here is SGLang's own, used
with every latent cache. SGLang's registry is a public class; nothing of it is replaced.

For: sglang 0.5.23 (https://github.com/sgl-project/sglang), models/deepseek_common/
attention_backend_handler.py. Ends when SGLang registers a handler for torch_native.
"""

from __future__ import annotations

from typing import Any

from megarl.compat.after_import import after_import

MODULE = "sglang.srt.models.deepseek_common.attention_backend_handler"


def install() -> None:
    """Register the method once SGLang's models are imported. For CPU servers only."""
    after_import(MODULE, _register)


def _register(module: Any) -> None:
    if "torch_native" not in module.AttentionBackendRegistry._handlers:
        module.AttentionBackendRegistry.register("torch_native", module._dispatch_mla_subtype)
