"""FP8 training: which recipes this GPU has, Transformer Engine's numbers, the learner's protocol.

Blocks that Transformer Engine quantizes are compared with `megarl.float8`'s, products of each
recipe with those in bf16, and a learner of a small random model goes through `megarl check fp8`.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from megarl.config.fp8 import RECIPES, environment, gpu_faults, token_multiple
from megarl.config.precision import PrecisionConfig
from megarl.float8 import BlockScaling, quantize
from tests.gpu.machine import Machine, Outcome, Peer
from tests.learner import random_model

TOKENS, COLUMNS, ROWS = 256, 512, 768
LEARNER_S = 150
MODEL: dict[str, Any] = {
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "head_dim": 128,
}
# 1.5 x what normal numbers give that are e4m3 on both sides of a product: 2.6 % x sqrt 2.
PRODUCT_ERROR = 0.056


def run(machine: Machine) -> Outcome:
    outcome = Outcome()
    able = _able_recipes(machine)
    outcome.figures["recipes"] = {name: words or "able" for name, words in able.items()}
    outcome.figures["tokens"] = {name: token_multiple(_e4m3(name)) for name in RECIPES}
    if machine.dry:
        outcome.figures["transformer_engine"] = "dry: nothing of it was shown"
        return outcome
    if importlib.util.find_spec("transformer_engine") is None:
        outcome.figures["transformer_engine"] = "not installed: nothing of FP8 was shown"
        return outcome
    os.environ.update(environment(_e4m3("blockwise")))  # read as the other process imports it
    engine = Peer(machine, _Engine)
    outcome.figures["transformer_engine"] = engine.ask("version")
    if not able["blockwise"]:
        for name, value in engine.ask("blocks").items():
            outcome.want(name, value, low=0.999)
    for name in (name for name, words in able.items() if not words):
        for product, error in engine.ask("products", name).items():
            outcome.want(f"{name}_{product}", error, low=1e-4, high=PRODUCT_ERROR)
    engine.close()
    if importlib.util.find_spec("megatron") is None:
        outcome.figures["learner"] = "megatron.core is not installed: nothing was shown"
    else:
        outcome.figures["learner"] = _learner(next(n for n, words in able.items() if not words))
    return outcome


def _e4m3(recipe: str) -> PrecisionConfig:
    return PrecisionConfig.model_validate({"fp8": "e4m3", "fp8_recipe": recipe})


def _able_recipes(machine: Machine) -> dict[str, str]:
    """Why this GPU cannot, by recipe, those of blocks first; "" where it can."""
    capability, gpu = ((9, 0), "a pretended GPU") if machine.dry else _gpu()
    cuda = tuple(int(part) for part in (torch.version.cuda or "12.9").split(".")[:2])
    order = ("blockwise", "mxfp8", "tensorwise", "delayed")
    return {
        name: "; ".join(gpu_faults(_e4m3(name), gpu, capability, (cuda[0], cuda[1])))
        for name in order
    }


def _gpu() -> tuple[tuple[int, int], str]:
    major, minor = torch.cuda.get_device_capability()
    return (major, minor), torch.cuda.get_device_name()


class _Engine:
    """Transformer Engine in a process that has imported it with our environment."""

    def __init__(self, machine: Machine) -> None:
        self._te = importlib.import_module("transformer_engine.pytorch")
        self._recipes = importlib.import_module("transformer_engine.common.recipe")
        self._device = machine.device

    def version(self) -> str:
        found: str = importlib.import_module("transformer_engine").__version__
        return found

    def blocks(self) -> dict[str, float]:
        """Shares of codes and of scales that are ours: its scale is 1 / (448 / amax), which may be
        a last bit from amax / 448, and then a tie rounds otherwise."""
        torch.manual_seed(7)
        weight = torch.randn(ROWS, COLUMNS, device=self._device, dtype=torch.bfloat16)
        quantizer = self._te.Float8BlockQuantizer(
            self._te.DType.kFloat8E4M3,
            rowwise=True,
            columnwise=False,
            force_pow_2_scales=False,
            block_scaling_dim=2,
        )
        theirs = quantizer(weight)
        codes, scales = quantize(weight, BlockScaling())
        found = theirs._rowwise_scale_inv[: scales.shape[0], : scales.shape[1]]
        apart = ((found - scales).abs() / scales).le(2.0**-22)
        equal = theirs._rowwise_data.view(torch.uint8).eq(codes.view(torch.uint8))
        return {
            "equal_codes": float(equal.float().mean()),
            "equal_scales": float(apart.float().mean()),
        }

    def products(self, recipe: str) -> dict[str, float]:
        """Relative errors (L2) of a linear's output and of both its gradients, to those in bf16."""
        kind = getattr(self._recipes, RECIPES[recipe].te_class)  # type: ignore[index]
        made = kind(fp8_format=self._recipes.Format.E4M3)
        torch.manual_seed(3)
        linear = self._te.Linear(
            COLUMNS, ROWS, bias=False, params_dtype=torch.bfloat16, device=self._device
        )
        torch.nn.init.normal_(linear.weight, std=0.02)
        x = torch.randn(TOKENS, COLUMNS, device=self._device, dtype=torch.bfloat16)
        gradient = torch.randn(TOKENS, ROWS, device=self._device, dtype=torch.bfloat16)
        wanted = self._pass(linear, x, gradient, None)
        for _ in range(2 if recipe == "delayed" else 1):  # its first scales are of no pass before
            found = self._pass(linear, x, gradient, made)
        return {
            name: float((found[name] - whole).norm() / whole.norm())
            for name, whole in wanted.items()
        }

    def _pass(
        self, linear: Any, x: torch.Tensor, gradient: torch.Tensor, recipe: Any
    ) -> dict[str, torch.Tensor]:
        given = x.clone().requires_grad_()
        linear.zero_grad()
        with self._te.autocast(enabled=recipe is not None, recipe=recipe):
            output = linear(given)
        output.backward(gradient)
        assert given.grad is not None
        named = {"output": output, "input_grad": given.grad, "weight_grad": linear.weight.grad}
        return {name: each.detach().float().clone() for name, each in named.items()}


def _learner(recipe: str) -> str:
    """What `megarl check fp8` says of a small random model with the best recipe of this GPU."""
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        random_model.write(place / "model", deviation=0.02, **MODEL)
        (place / "run.toml").write_text(
            f'[run]\ndir = "{place}/runs"\n[actor]\nmodel = "{place}/model"\n'
            f'[learner.precision]\nfp8 = "e4m3"\nfp8_recipe = "{recipe}"\n'
        )
        done = subprocess.run(
            [sys.executable, "-m", "megarl", "check", "fp8", str(place / "run.toml")],
            capture_output=True,
            text=True,
            timeout=LEARNER_S,
            check=False,
        )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout
