"""Names, shapes and marks of a learner rank's parameters, of GPU classes and of ours for CPUs.

    python -m tests.golden.gpu_parameters ENGINE    writes gpu_parameters.json anew, on any machine

ENGINE is a folder with the Python files of Transformer Engine, as they are released (`pip download
--no-deps transformer-engine==2.20.2`, unzipped; nothing is installed). Megarl's own learner builds
each model with Megatron-Core's classes for Transformer Engine, over those files: what the classes
do in Python is theirs, only the compiled extension, which constructors do not compute with, is a
stand-in. Without ENGINE the same is built of the CPU's classes, and printed.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import json
import os
import subprocess
import sys
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import torch
import torch.distributed as dist

from megarl.actor.shape import ModelShape
from megarl.config.schema import LearnerConfig
from megarl.reshard.megatron import megatron_layout
from megarl.reshard.mesh import LearnerMesh
from tests.reshard.models import MOE_FLAGS, TINY_LATENT, tiny_shape

GOLDEN = Path(__file__).with_name("gpu_parameters.json")
ENGINE_VERSION = "2.20.2"
HOPPER = (9, 0)
DTYPE = "bfloat16"

SIZES = {"num_layers": 2, "hidden_size": 32, "head_dim": 16, "num_heads": 4, "num_kv_heads": 2}


def _shape(architecture: str, **more: Any) -> ModelShape:
    return tiny_shape(architecture, **{**SIZES, "intermediate_size": 64, **more})


def _latent(**more: Any) -> ModelShape:
    experts = MOE_FLAGS["DeepseekV3ForCausalLM"]["moe"]
    sizes = {"num_kv_heads": 4, "moe": experts}
    return _shape("DeepseekV3ForCausalLM", **sizes, **more)


def cases() -> dict[str, tuple[ModelShape, LearnerMesh, int]]:
    """Shape, mesh and rank by name: each family, and cuts over each axis that a weight has."""
    dense, latent = _shape("Qwen3ForCausalLM"), _latent()
    whole_queries = _latent(mla=replace(TINY_LATENT, q_lora_rank=None))
    moe = _shape("Qwen3MoeForCausalLM")
    return {
        "qwen3": (dense, LearnerMesh(), 0),
        "qwen3 tp2": (dense, LearnerMesh(tp=2), 1),
        "qwen3 pp2": (dense, LearnerMesh(pp=2), 1),
        "llama": (_shape("LlamaForCausalLM"), LearnerMesh(), 0),
        "qwen2 tp2": (_shape("Qwen2ForCausalLM"), LearnerMesh(tp=2), 1),
        "qwen3-moe ep2": (moe, LearnerMesh(dp=2, ep=2), 1),
        "qwen3-moe tp2 ep2": (moe, LearnerMesh(tp=2, ep=2), 1),
        "qwen3-moe tp2 etp2": (moe, LearnerMesh(tp=2, etp=2), 1),
        "deepseek-v3": (latent, LearnerMesh(), 0),
        "deepseek-v3 tp2 ep2": (latent, LearnerMesh(tp=2, ep=2), 1),
        "moonlight tp2": (whole_queries, LearnerMesh(tp=2), 1),
        "glm-4.5 tp2": (_shape("Glm4MoeForCausalLM"), LearnerMesh(tp=2), 1),
    }


def manifests() -> dict[str, Any]:
    """By case, each parameter of its rank, and the classes of the modules that have them."""
    found = {name: _of(*case) for name, case in cases().items()}
    return {
        "parameters": {name: parameters for name, (parameters, _) in found.items()},
        "classes": {name: classes for name, (_, classes) in found.items()},
    }


def _of(shape: ModelShape, mesh: LearnerMesh, rank: int) -> tuple[dict[str, list[Any]], list[str]]:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from megarl.learner import distributed

    dist.init_process_group("fake", rank=rank, world_size=mesh.size, store=FakeStore())
    try:
        ranks = distributed.start(mesh, device="cpu")
        from megarl.learner.model import build_model

        learner = LearnerConfig.model_validate(
            {"parallel": {axis: getattr(mesh, axis) for axis in ("tp", "pp", "ep", "etp")}}
        )
        with _built_as_on_a_gpu():
            model = build_model(shape, learner, ranks, megatron_layout(shape, mesh))
        owners = {
            type(module).__name__
            for module in model.modules()
            if next(module.parameters(recurse=False), None) is not None
        }
        named = sorted(model.named_parameters())
        return {name: _described(parameter) for name, parameter in named}, sorted(owners)
    finally:
        distributed.stop()


def _described(parameter: Any) -> list[Any]:
    """[shape], and in words what Megatron reduces its gradient and sums its norm by."""
    assert str(parameter.dtype) == f"torch.{DTYPE}", parameter.dtype
    marks = []
    if getattr(parameter, "tensor_model_parallel", False):
        marks.append(f"cut along dim {parameter.partition_dim}")
    if getattr(parameter, "sequence_parallel", False):
        marks.append("gradient summed over tensor ranks")
    if not getattr(parameter, "allreduce", True):
        marks.append("gradient summed over ranks of experts")
    return [list(parameter.shape), *marks]


@contextlib.contextmanager
def _built_as_on_a_gpu() -> Iterator[None]:
    """With Transformer Engine's files here, have the learner and them believe in a GPU."""
    if "transformer_engine" not in sys.modules:
        yield
        return
    before, torch.cuda.is_available = torch.cuda.is_available, lambda: True
    try:
        yield
    finally:
        torch.cuda.is_available = before


class _Extension(ModuleType):
    """A compiled module that only has to be named."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        made = MagicMock(name=name)
        setattr(self, name, made)
        return made


def _import_engine(folder: Path) -> None:
    """Transformer Engine's own Python files, over a stand-in for what is compiled."""
    from megarl.compat import megatron_cpu, placeholders

    assert not __debug__, "start it with -O: Transformer Engine asserts what its extension holds"
    os.environ |= {"NVTE_PROJECT_BUILDING": "1", "NVTE_FRAMEWORK": "none"}
    sys.path.insert(0, str(folder))
    warnings.simplefilter("ignore")
    placeholders.install(["triton"])
    common = importlib.import_module("transformer_engine.common")
    common.load_framework_extension = lambda framework: None
    for name in ("transformer_engine_torch", "transformer_engine.pytorch.onnx_extensions"):
        sys.modules[name] = _Extension(name)
    torch.cuda.get_device_properties = lambda *_: SimpleNamespace(major=HOPPER[0], minor=HOPPER[1])
    importlib.import_module("transformer_engine.pytorch")
    found = importlib.metadata.version("transformer_engine")
    if found != ENGINE_VERSION:
        sys.exit(f"{folder} has Transformer Engine {found}; give {ENGINE_VERSION}")
    megatron_cpu.install()
    latent = importlib.import_module("megatron.core.transformer.multi_latent_attention")
    extension = importlib.import_module("megatron.core.extensions.transformer_engine")
    latent.TELinear = extension.TELinear  # as it is where no substitution is installed


def fake_groups() -> None:
    """Every process group is one that says nothing: this is one process of many ranks."""
    new_group = dist.new_group
    dist.new_group = lambda *a, **k: new_group(*a, **{**k, "backend": "fake"})


def main() -> None:
    """Print the CPU's manifests, or write those of GPUs."""
    if len(sys.argv) > 1 and __debug__:
        again = [sys.executable, "-O", "-m", "tests.golden.gpu_parameters", *sys.argv[1:]]
        sys.exit(subprocess.run(again, check=False).returncode)
    if len(sys.argv) > 1:
        _import_engine(Path(sys.argv[1]))
    fake_groups()
    found = manifests()
    if len(sys.argv) == 1:
        print(json.dumps(found))
        return
    found["versions"] = {
        "megatron-core": importlib.metadata.version("megatron-core"),
        "transformer-engine": ENGINE_VERSION,
    }
    GOLDEN.write_text(_one_a_line(found), encoding="utf-8")


def _one_a_line(found: dict[str, Any]) -> str:
    """JSON with a line for each parameter."""
    lines = ["{"]
    for key in ("versions", "classes"):
        lines.append(f' "{key}": {json.dumps(found[key], sort_keys=True)},')
    blocks = []
    for case, parameters in found["parameters"].items():
        each = [f'   "{name}": {json.dumps(value)}' for name, value in parameters.items()]
        blocks.append(f'  "{case}": {{\n' + ",\n".join(each) + "\n  }")
    return "\n".join([*lines, ' "parameters": {', ",\n".join(blocks), " }", "}"]) + "\n"


if __name__ == "__main__":
    main()
