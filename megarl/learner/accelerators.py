"""Optional packages that make Megatron faster: which are here, what their absence costs, which are
broken.

Owns how they are found, before Megatron-Core is imported. Megatron takes a package that cannot be
found for absent; one that fails in another way ends the import of Megatron itself. Knows nothing of
models.

For Megatron-Core 0.19.2, by its imports.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from megarl.errors import LearnerError

log = logging.getLogger(__name__)

ENGINE = "transformer_engine"


@dataclass(frozen=True, slots=True)
class Accelerator:
    """A package: the modules that Megatron imports of it, and what is slower without it."""

    name: str
    modules: tuple[str, ...]
    cost: str
    repair: str


KNOWN = (
    Accelerator(
        ENGINE,
        (ENGINE, f"{ENGINE}.pytorch"),
        "the learner cannot run on CUDA: fused layers, packed attention, grouped GEMM and FP8 are "
        "its own",
        "on a machine without a GPU uninstall transformer-engine; with one, install all of it: "
        "pip install --no-build-isolation transformer-engine[pytorch,core_cu13]",
    ),
    Accelerator(
        "apex",
        ("apex",),
        "nothing where Transformer Engine is, whose optimizer and norms are used; else torch's "
        "AdamW, a norm of gradients tensor by tensor, and no fused weight gradients",
        "build it from source with its extensions, as docs/decisions/0005-apex-from-source.md says",
    ),
    Accelerator(
        "fused_weight_gradient_mlp_cuda",
        ("fused_weight_gradient_mlp_cuda",),
        "only the output layer's weight gradient is added up apart from its product; it is apex's",
        "it is an extension of apex: build that from source",
    ),
    Accelerator(
        "flash_attn",
        ("flash_attn",),
        "Transformer Engine takes cuDNN's fused attention for packed sequences",
        "install a flash-attn that is built for this torch and CUDA, or none",
    ),
    Accelerator(
        "deep_ep",
        ("deep_ep",),
        "experts' tokens travel by all-to-all of NCCL; only moe_token_dispatcher_type = flex "
        "needs it",
        "install a deep_ep that is built for this torch and CUDA, or none",
    ),
)


def find_accelerators() -> Mapping[str, str]:
    """Versions of the packages that are here, by name; "" for one that has none.

    Raises LearnerError, naming the package and what it said, where one is installed but cannot be
    imported: Megatron-Core would end with its traceback, or pass it over without a word.
    """
    found = {}
    for each in KNOWN:
        if importlib.util.find_spec(each.modules[0]) is None:
            continue
        for module in each.modules:
            _import(each, module)
        found[each.name] = _version(each.name)
    return MappingProxyType(found)


def tell(found: Mapping[str, str], on_cuda: bool) -> None:
    """One line of the log for what is used, and on CUDA one for each package whose absence costs.

    On a CPU none can be used, and what is installed was only found to be whole.
    """
    versions = " ".join(f"{each.name}={found.get(each.name, 'absent') or '?'}" for each in KNOWN)
    has_engine = on_cuda and ENGINE in found
    adam = ENGINE if has_engine else "apex" if on_cuda and "apex" in found else "torch"
    log.info(
        "accelerators layers=%s grouped_gemm=%s adam=%s %s",
        ENGINE if has_engine else "megarl.compat",
        ENGINE if has_engine else "none",
        adam,
        versions,
    )
    for each in KNOWN:
        if on_cuda and each.name not in found:
            log.info("accelerator absent name=%s cost=%r", each.name, each.cost)


def _import(each: Accelerator, module: str) -> None:
    try:
        importlib.import_module(module)
    except Exception as error:
        raise _broken(each, error) from error


def _broken(each: Accelerator, error: Exception) -> LearnerError:
    spec = importlib.util.find_spec(each.modules[0])
    where = f" in {spec.origin}" if spec is not None and spec.origin else ""
    return LearnerError(
        f"{each.name} is installed{where} but cannot be imported, and Megatron-Core imports it: "
        f"{type(error).__name__}: {_one_line(error)}; {each.repair}"
    )


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split()) or "no message"


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""
