"""One process for what FP8 shows only in a running Megatron, on a CPU. Prints one JSON object.

Argument: a folder to write in.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megarl.actor.shape import read_shape
from megarl.buffer.groupfile import write_group
from megarl.config.fp8 import buffer_fields, optimizer_fields, transformer_fields
from megarl.config.fp8_protocol import Comparison, faults
from megarl.config.precision import PrecisionConfig
from megarl.config.schema import Config
from megarl.errors import MegarlError
from megarl.learner import distributed
from megarl.learner.fp8_check import Request, check
from megarl.learner.learner import Learner
from megarl.reshard.mesh import LearnerMesh
from megarl.types import Group, Prompt, Sample
from tests.golden.gpu_parameters import fake_groups
from tests.learner import random_model

FOLDER = Path(sys.argv[1])
SIZES: dict[str, Any] = {
    "hidden_size": 160,  # one whole block and a part
    "intermediate_size": 192,
    "num_attention_heads": 4,
    "head_dim": 32,
    "num_hidden_layers": 3,
}
OBJECTS: dict[str, dict[str, Any]] = {
    "off": {},
    "blockwise": {"fp8": "e4m3", "fp8_first_layers_bf16": 1},
    "delayed": {
        "fp8": "hybrid",
        "fp8_recipe": "delayed",
        "fp8_amax_history": 16,
        "fp8_amax_algorithm": "most_recent",
        "fp8_amax_group": "tensor",
    },
    "mxfp8 weights": {
        "fp8": "e4m3",
        "fp8_recipe": "mxfp8",
        "fp8_param": True,
        "fp8_param_gather": True,
    },
    "tensorwise weights": {
        "fp8": "hybrid",
        "fp8_recipe": "tensorwise",
        "fp8_param": True,
        "fp8_param_gather": True,
    },
    "refused by Megatron": {"fp8": "e4m3", "fp8_recipe": "delayed", "fp8_last_layers_bf16": 1},
}


def config(**precision: Any) -> Config:
    """The run of the small model in this precision."""
    groups = {
        "actor": {"model": str(FOLDER / "model")},
        "learner": {"precision": precision},
        "weight_sync": {"shared_weights": False},
    }
    return Config.model_validate(groups)


def differing(made: Any, plain: Any) -> dict[str, Any]:
    """Fields of two dataclasses that are not the same."""
    return {
        field.name: getattr(made, field.name)
        for field in dataclasses.fields(made)
        if getattr(made, field.name) != getattr(plain, field.name)
        and not callable(getattr(made, field.name))
    }


def objects(precision: dict[str, Any]) -> dict[str, Any]:
    """What Megatron's own objects say, where they are not as without FP8."""
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.fp8_utils import get_fp8_context
    from megatron.core.optimizer import OptimizerConfig

    from megarl.learner.transformer import transformer_config

    shape = read_shape(FOLDER / "model")
    learner = config(**precision).learner
    try:
        made = transformer_config(shape, learner, on_cpu=True)
    except MegarlError as error:
        return {"refused": str(error)}
    buffers = DistributedDataParallelConfig(**buffer_fields(learner.precision))
    optimizer = OptimizerConfig(**optimizer_fields(learner.precision))
    return {
        "transformer": differing(made, transformer_config(shape, config().learner, on_cpu=True)),
        "buffers": differing(buffers, DistributedDataParallelConfig()),
        "optimizer": differing(optimizer, OptimizerConfig()),
        "silently off": isinstance(get_fp8_context(made, 1), nullcontext),
    }


def learner_on_a_cpu() -> str:
    """What the learner says to FP8 without a GPU."""
    try:
        Learner(config(fp8="e4m3"), FOLDER)
    except MegarlError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was refused"


def in_blocks(values: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """Rounded block by block, written out: scale = largest magnitude / 448."""
    found = torch.empty_like(values)
    for top in range(0, values.shape[0], rows):
        for left in range(0, values.shape[1], columns):
            block = values[top : top + rows, left : left + columns]
            scale = block.abs().max() / 448.0
            codes = (block / scale).to(torch.float8_e4m3fn)
            found[top : top + rows, left : left + columns] = codes.float() * scale
    return found


def emulated_product() -> dict[str, float]:
    """Largest differences of one linear's three products to the rule written out."""
    from megarl.compat.megatron_fp8_emulation import Rounding, _multiply

    torch.manual_seed(2)
    x = torch.randn(5, 200, requires_grad=True)
    weight = torch.randn(140, 200, requires_grad=True)
    gradient = torch.randn(5, 140)
    output = _multiply(Rounding("blockwise", hybrid=False), x, weight)
    output.backward(gradient)
    assert x.grad is not None and weight.grad is not None
    with torch.no_grad():
        blocks = in_blocks(weight, 128, 128)
        wanted = {
            "output": (output, in_blocks(x, 1, 128) @ blocks.T),
            "input": (x.grad, in_blocks(gradient, 1, 128) @ blocks),
            "weight": (
                weight.grad,
                in_blocks(gradient.T, 1, 128) @ in_blocks(x.T, 1, 128).T,
            ),
        }
        return {name: float((found - right).abs().max()) for name, (found, right) in wanted.items()}


def recorded() -> str:
    """A group file with log-probs of a rollout engine that is always off by 0.25 nats or more."""
    generator = torch.Generator().manual_seed(4)
    samples = []
    for index, (num_prompt, num_response) in enumerate([(5, 20), (9, 31), (3, 12)]):
        drawn = torch.randint(300, (num_prompt + num_response,), generator=generator).tolist()
        sample = Sample(f"g.{index}", "g", "p", tuple(drawn[:num_prompt]))
        for at, token in enumerate(drawn[num_prompt:]):
            sample = sample.extended([token], [-9.0], version=0, trainable=at % 4 != 2)
        samples.append(sample)
    return write_group(FOLDER / "groups", Group("g", Prompt("p", (), "", ""), tuple(samples)))


def compared(groups: tuple[str, ...], **precision: Any) -> Comparison:
    """One run of the protocol, emulated."""
    return check(config(**precision), Request(groups, emulate=True), FOLDER)


def sabotaged(name: str, method: Any, groups: tuple[str, ...]) -> list[str]:
    """What the verdict is with one of the emulation's roundings wrong."""
    from megarl.compat import megatron_fp8_emulation as emulation

    true = getattr(emulation.Rounding, name)
    setattr(emulation.Rounding, name, lambda rounding, values: method(true(rounding, values)))
    try:
        return faults(compared(groups, fp8="e4m3"))
    finally:
        setattr(emulation.Rounding, name, true)


def amax_groups() -> dict[str, list[int]]:
    """Ranks that agree with rank 0 on a tensor's largest magnitude, of TP2 x DP2 x PP2."""
    from megatron.core import parallel_state
    from torch.testing._internal.distributed.fake_pg import FakeStore

    distributed.stop()
    fake_groups()
    mesh = LearnerMesh(tp=2, dp=2, pp=2)
    dist.init_process_group("fake", rank=0, world_size=mesh.size, store=FakeStore())
    distributed.start(mesh, device="cpu")
    found = {}
    for name in ("replicas", "tensor"):
        fields = transformer_fields(PrecisionConfig(fp8="e4m3", fp8_amax_group=name))
        group = parallel_state.get_amax_reduction_group(  # as fp8_utils.get_fp8_context asks
            with_context_parallel=True, tp_only_amax_red=fields["tp_only_amax_red"]
        )
        found[name] = dist.get_process_group_ranks(group)
    return found


def main() -> None:
    """Everything, in one process."""
    torch.set_num_threads(1)
    random_model.write(FOLDER / "model", deviation=0.05, **SIZES)
    dist.init_process_group("gloo", init_method=f"file://{FOLDER}/store", rank=0, world_size=1)
    on_cpu = learner_on_a_cpu()
    groups = (recorded(),)
    runs = {
        "blockwise": compared(groups, fp8="e4m3"),
        "hybrid": compared(groups, fp8="hybrid"),
        "tensorwise": compared(groups, fp8="e4m3", fp8_recipe="tensorwise"),
        "mxfp8": compared(groups, fp8="e4m3", fp8_recipe="mxfp8"),
        "two layers in bf16": compared(
            groups, fp8="e4m3", fp8_first_layers_bf16=1, fp8_last_layers_bf16=1
        ),
    }
    answers = {
        "objects": {name: objects(precision) for name, precision in OBJECTS.items()},
        "on a cpu": on_cpu,
        "product": emulated_product(),
        "runs": {name: dataclasses.asdict(found) for name, found in runs.items()},
        "unscaled gradients": sabotaged(
            "gradient", lambda values: values.to(torch.float8_e4m3fn).float(), groups
        ),
        "doubled weights": sabotaged("weight", lambda values: 2 * values, groups),
        "amax groups": amax_groups(),
    }
    print(json.dumps(answers, default=str))


if __name__ == "__main__":
    main()
