"""Program: weights to SGLang's own float8 models, in one process and without a server.

    python -m tests.weight_sync.float8_servers FOLDER < cases.json

A case is {shape, learner, server, forms}. The models of all ranks are loaded by SGLang from a
checkpoint that was quantized whole; then new bfloat16 weights come by a sync, twice, and every
parameter must be what SGLang loads from a checkpoint of those. Answers one JSON object a case.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from megarl.compat import sglang_ranks

BLOCK = (128, 128)


def float8_checkpoint(folder: Path, shape: Any, tensors: Any) -> Path:
    """A checkpoint as DeepSeek ships it: linear weights in float8, beside their scales."""
    import torch
    from safetensors.torch import save_file

    from megarl.actor.parameters import SCALE_SUFFIX, block_table
    from megarl.float8 import BlockScaling, quantize
    from tests.reshard.sglang_checkpoints import hf_config

    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(hf_config(shape, BLOCK)))
    whole = {name: tensor.to(torch.bfloat16) for name, tensor in tensors.items()}
    for parameter in block_table(shape, BLOCK).parameters:
        if parameter.precision == "float8":
            float8, scales = quantize(tensors[parameter.name], BlockScaling(*BLOCK))
            whole[parameter.name], whole[parameter.name + SCALE_SUFFIX] = float8, scales
        elif parameter.precision == "float32" and not parameter.name.endswith(SCALE_SUFFIX):
            whole[parameter.name] = tensors[parameter.name]
    stored = {}
    for parameter in block_table(shape, BLOCK).parameters:
        parts = whole[parameter.name] if parameter.stacked else (whole[parameter.name],)
        names = parameter.stored_names()
        stored |= {name: part.clone() for name, part in zip(names, parts, strict=True)}
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def models(folder: Path, server: Any) -> list[Any]:
    """SGLang's model on every rank."""
    flags = {"tp_size": server.tp, "ep_size": server.ep}
    return [
        sglang_ranks.load(sglang_ranks.become(str(folder), rank, "bfloat16", flags))
        for rank in range(server.tp)
    ]


def differing(found: Any, wanted: Any) -> list[str]:
    """Names of parameters that differ in a byte."""
    import torch

    def raw(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.detach().reshape(-1).view(torch.uint8)

    theirs = dict(wanted.named_parameters())
    return [
        name
        for name, mine in found.named_parameters()
        if not torch.equal(raw(mine), raw(theirs[name]))
    ]


def run(folder: Path, case: dict[str, Any]) -> dict[str, Any]:
    """Two syncs of one case."""
    import torch

    from megarl.actor.shape import ModelShape
    from megarl.float8 import BlockScaling
    from megarl.reshard.mesh import LearnerMesh, ServerMesh
    from megarl.weight_sync.control import SourceSpec
    from tests.weight_sync import tiny
    from tests.weight_sync.rig import Rig

    shape = ModelShape.from_dict(case["shape"])
    server = ServerMesh(**case["server"])
    source = SourceSpec(
        shape, LearnerMesh(**case["learner"]), 8, tuple(case["forms"]), None, BlockScaling(*BLOCK)
    )

    def weights(seed: int) -> Any:
        return {
            name: tensor.to(torch.bfloat16).to(torch.float32)
            for name, tensor in tiny.weights(shape, seed).items()
        }

    rig = Rig(source, server, "bf16", models=models(
        float8_checkpoint(folder / "0", shape, weights(0)), server
    ), weights=weights)  # fmt: skip
    answer: dict[str, Any] = {"verdicts": [], "differing": [], "float8": 0}
    for version, seed in enumerate((1, 2)):
        rig.learn(seed)
        answer["verdicts"].append(rig.sync(version))
        wanted = models(float8_checkpoint(folder / str(seed), shape, weights(seed)), server)
        for mine, theirs in zip(rig.models, wanted, strict=True):
            answer["differing"].append(differing(mine, theirs))
    answer["float8"] = sum(
        p.dtype == torch.float8_e4m3fn for _, p in rig.models[0].named_parameters()
    )
    rig.close()
    return answer


def main() -> None:
    """All cases of the input."""
    folder = Path(sys.argv[1])
    for number, case in enumerate(json.load(sys.stdin)):
        print(json.dumps(run(folder / str(number), case)), flush=True)


if __name__ == "__main__":
    sglang_ranks.prepare_process()
    main()
