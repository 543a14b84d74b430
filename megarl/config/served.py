"""What a run's servers hold: number format, float8 in blocks, and how SGLang is told of it.

Owns the meaning of `rollout.precision` for a server, and what keeps a policy from being served so.
SGLang 0.5.23 quantizes what its model classes give a quantization config: the linear layers of
attention, MLPs and experts. Embedding, head, norms, biases and routers are none of them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Literal

from megarl.actor.families import FAMILIES
from megarl.actor.parameters import block_table
from megarl.actor.shape import ModelShape
from megarl.config.schema import Config
from megarl.config.violation import Violation
from megarl.errors import LayoutError
from megarl.reshard.blocks import ScaleBlock
from megarl.reshard.layout import Layout
from megarl.reshard.precision import quantized_whole

WEIGHTS = "rollout.precision.weights"


def served_dtype(config: Config) -> Literal["fp32", "bf16"]:
    """The number format of what is not quantized in servers, and of their activations.

    Beside float8 it is bf16 whatever the learner's is: SGLang takes no fp32 there (Fp8Config).
    """
    return "bf16" if served_block(config) else config.learner.precision.params


def served_block(config: Config) -> ScaleBlock | None:
    """Rows and columns of the blocks of float8 weights; None where servers hold none."""
    precision = config.rollout.precision
    return (precision.fp8_block,) * 2 if precision.weights == "fp8" else None


def quantization_config(block: ScaleBlock) -> dict[str, object]:
    """`quantization_config` of a config.json, as DeepSeek's checkpoints have it.

    >>> quantization_config((128, 128))["weight_block_size"]
    [128, 128]
    """
    return {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": list(block),
    }


def model_overrides(block: ScaleBlock) -> str:
    """SGLang's --json-model-override-args: what the config.json of actor.model lacks."""
    return json.dumps({"quantization_config": quantization_config(block)})


def overridden_block(overrides: object) -> ScaleBlock | None:
    """The blocks that such overrides name; None where they are others, or name none.

    >>> overridden_block(model_overrides((128, 128)))
    (128, 128)
    >>> overridden_block('{"num_hidden_layers": 2}') is None
    True
    """
    try:
        fields = json.loads(str(overrides))
    except ValueError:
        return None
    if not isinstance(fields, Mapping) or set(fields) != {"quantization_config"}:
        return None
    return block_of(fields["quantization_config"])


def block_of(quantization: object) -> ScaleBlock | None:
    """The blocks of a `quantization_config`; None where it is of another kind."""
    size = quantization.get("weight_block_size") if isinstance(quantization, Mapping) else None
    if not (isinstance(size, list) and len(size) == 2 and all(isinstance(n, int) for n in size)):
        return None
    return (size[0], size[1]) if quantization == quantization_config((size[0], size[1])) else None


def check_family(shape: ModelShape) -> None:
    """Raise LayoutError where SGLang's model is not known to take float8 with its scales."""
    if FAMILIES[shape.architecture].served.fp8:
        return
    others = ", ".join(name for name, family in FAMILIES.items() if family.served.fp8)
    raise LayoutError(
        f"{WEIGHTS}=fp8: SGLang's {shape.architecture} is not known to load the scales of "
        f"block-quantized weights (its llama drops them); use policy, or one of {others}"
    )


def check_float8(config: Config, shape: ModelShape, learner: Layout) -> Iterator[Violation]:
    """What keeps the learner from sending, and SGLang from taking, this policy in float8."""
    block = served_block(config)
    if block is None:
        return
    if "load_format" in config.rollout.engine_args:
        yield Violation(
            f"rollout.engine_args.load_format beside {WEIGHTS} = fp8: servers start without "
            "weights, and get them by the first sync; remove it",
            ("rollout.engine_args", WEIGHTS),
        )
    try:
        check_family(shape)
        quantized_whole(learner, block_table(shape, block), block)
    except LayoutError as error:
        names = ("rollout.precision.fp8_block", "learner.parallel.tp", "learner.parallel.etp")
        yield Violation(str(error), (WEIGHTS, *names))
