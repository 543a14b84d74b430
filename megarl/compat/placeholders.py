"""Import placeholders for GPU packages that an engine imports but does not run on a CPU.

Owns the finder that satisfies `import triton` and the like where the package is absent. Inert where
the package is installed, or for names that were not asked for. Knows nothing of what the engines
do.

For: megatron-core 0.19 (imports triton) and sglang 0.5.23 (imports triton, torchvision,
sgl_kernel). Ends when both import on a CPU without them.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import sys
import types
from collections.abc import Iterable, Sequence
from typing import Any

KNOWN = ("triton", "torchvision", "sgl_kernel")


class _Anything:
    """Base of every placeholder class: takes any arguments and does nothing."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        pass


class _Constexpr:
    """`triton.language.constexpr`: kernels keep constants in it when their modules are imported."""

    def __init__(self, value: object = None) -> None:
        self.value = value


class _Placeholder(types.ModuleType):
    """A module whose unknown attributes are classes (CamelCase) or placeholder modules.

    Called, it is a decorator (`@triton.jit`, `@triton.jit(...)`) that returns the function itself;
    the placeholders of other packages refuse to be called.
    """

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        full_name = f"{self.__name__}.{name}"
        if name[:1].isupper():
            value: Any = type(name, (_Anything,), {"__module__": self.__name__})
        else:
            value = _placeholder(full_name)
        setattr(self, name, value)
        return value

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.__name__.partition(".")[0] != "triton":
            raise NotImplementedError(
                f"{self.__name__}: the package is not installed, only a placeholder of it; "
                "run this on a machine that has it"
            )
        if len(args) == 1 and callable(args[0]) and not kwargs:
            return args[0]
        return lambda function: function


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds a placeholder for every module under the packages in `roots`."""

    def __init__(self) -> None:
        self.roots: set[str] = set()

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None = None,
        target: types.ModuleType | None = None,
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname.partition(".")[0] not in self.roots:
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _placeholder(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass


_FINDER = _Finder()


def _placeholder(full_name: str) -> types.ModuleType:
    """The one placeholder module of that name, made at its first use."""
    if full_name not in sys.modules:
        module = _Placeholder(full_name)
        module.__path__ = []
        module.__spec__ = importlib.machinery.ModuleSpec(full_name, _FINDER, is_package=True)
        sys.modules[full_name] = module
    return sys.modules[full_name]


def _tell_who_would_believe_it() -> None:
    """Let torch and transformers find out, and cache, that the packages are absent."""
    import torch.utils._triton

    torch.utils._triton.has_triton_package()
    if importlib.util.find_spec("transformers") is not None:
        from transformers.utils import import_utils

        import_utils.is_torchvision_available()
        import_utils.is_triton_available()


def install(names: Iterable[str]) -> tuple[str, ...]:
    """Supply placeholders for those of `names` (out of KNOWN) that are not installed.

    Returns the names that now have one. Call it in every process before the engine is imported; a
    second call adds to the first.
    """
    wanted = set(names)
    assert wanted <= set(KNOWN), f"no placeholder is known for {sorted(wanted - set(KNOWN))}"
    new = wanted - _FINDER.roots
    if not new:
        return tuple(sorted(wanted & _FINDER.roots))
    absent = {name for name in new if importlib.util.find_spec(name) is None}
    if absent:
        _tell_who_would_believe_it()
    _FINDER.roots |= absent
    if _FINDER.roots and _FINDER not in sys.meta_path:
        sys.meta_path.append(_FINDER)
    if "triton" in absent:
        triton: Any = importlib.import_module("triton")
        triton.__version__ = "3.0.0"
        triton.cdiv = lambda a, b: -(a // -b)
        triton.next_power_of_2 = lambda n: 1 << (n - 1).bit_length() if n > 0 else 1
        language: Any = importlib.import_module("triton.language")
        language.constexpr = _Constexpr
    return tuple(sorted(wanted & _FINDER.roots))
