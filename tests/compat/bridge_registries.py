"""Program: the mapping registries of an unpacked megatron-bridge, run with stand-ins.

    python -m tests.compat.bridge_registries FOLDER MODULE [MODULE ...]

FOLDER holds the unpacked wheel. Of its modules param_mapping, mapping_registry, quant_mapping,
deepseek.common and the named ones (such as "llama.llama_bridge") are the real ones; whatever they
import of megatron and rich is a stand-in, since Transformer Engine and Triton cannot be installed
here. Prints JSON: for each module a list of [class, megatron_param, hf_param, permute_dims].
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

MODELS = "megatron.bridge.models."
ALWAYS = (
    "conversion.param_mapping",
    "conversion.mapping_registry",
    "conversion.quant_mapping",
    "deepseek.common",
)
CONFIG = SimpleNamespace(num_hidden_layers=3, num_nextn_predict_layers=1, mlp_layer_types=None)


class AnyName(type):
    """A class that has every attribute asked for, each a class like it."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return AnyName(name, (StandIn,), {})


class StandIn(metaclass=AnyName):
    """In place of whatever a bridge imports."""

    def __class_getitem__(cls, _: object) -> type:
        return cls

    @staticmethod
    def register_bridge(**_: object) -> Any:
        return lambda bridge: bridge

    @staticmethod
    def is_initialized() -> bool:
        return False


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds the real modules in the folder, and a stand-in for every other of the packages."""

    def __init__(self, folder: Path, real: set[str]) -> None:
        self.folder, self.real = folder, real

    def find_spec(self, name: str, *_: object) -> importlib.machinery.ModuleSpec | None:
        if name.split(".")[0] not in ("megatron", "rich"):
            return None
        if name not in self.real:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        path = self.folder / (name.replace(".", "/") + ".py")
        loader = importlib.machinery.SourceFileLoader(name, str(path))
        return importlib.machinery.ModuleSpec(name, loader)

    def exec_module(self, module: ModuleType) -> None:
        module.__getattr__ = lambda name: getattr(StandIn, name)  # type: ignore[method-assign]


def registry(module: ModuleType) -> Any:
    """The registry of the one bridge that a module defines."""
    (bridge,) = (
        value
        for value in vars(module).values()
        if isinstance(value, type)
        and value.__module__ == module.__name__
        and "mapping_registry" in vars(value)
    )
    made = bridge()
    made.hf_config = CONFIG
    made.hf_pretrained = SimpleNamespace(config=CONFIG)
    return made.mapping_registry()


def main() -> None:
    folder, modules = Path(sys.argv[1]), sys.argv[2:]
    sys.meta_path.insert(0, Finder(folder, {MODELS + name for name in (*ALWAYS, *modules)}))
    found = {
        name: [
            [type(m).__name__, m.megatron_param, m.hf_param, getattr(m, "permute_dims", None)]
            for m in registry(importlib.import_module(MODELS + name))
        ]
        for name in modules
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
