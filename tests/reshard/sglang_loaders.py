"""What SGLang's own loaders make of checkpoints on each rank, without a server.

Run as a program it is the one process that all of it happens in: to import SGLang and all its
models takes fifteen seconds of a core.
"""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

from megarl.compat import sglang_loader_map, sglang_ranks
from megarl.reshard.numbering import Numbering
from megarl.reshard.recorded import recorded_rank, to_json

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Case:
    """A checkpoint and a server: its flags, and what a GPU would choose that a CPU does not.

    `flags` are fields of SGLang's ServerArgs. `fused` turns on the fusion of shared experts,
    `up_first` the order of FlashInfer's CUTLASS. `cpu` applies what SGLang changes of the sizes on
    a CPU. `draft` loads the draft model. `record` writes the layout that the loader was seen to
    follow to OUT_DIR/<number>.json instead; with a `dtype`, the precision of the server, that file
    holds the names of each rank's float32 parameters. With `hf_config`, fields of a Hugging Face
    config, the checkpoint is made first, with random weights.
    """

    folder: str
    flags: dict[str, Any] = field(default_factory=dict)
    cpu: bool = False
    draft: bool = False
    fused: bool = False
    up_first: bool = False
    environment: dict[str, str] = field(default_factory=dict)
    record: bool = False
    dtype: str = ""
    hf_config: dict[str, Any] = field(default_factory=dict)

    @property
    def size(self) -> int:
        """Ranks of the server."""
        return self.flags.get("tp_size", 1) * self.flags.get("pp_size", 1)


class Loaders:
    """The process that has imported SGLang, from the side of the tests."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.reshard.sglang_loaders"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        )

    def load(self, cases: Sequence[Case], out: Path) -> None:
        """Load every case.

        The named_parameters() of all its ranks go, as float32, to <number>.safetensors in `out`
        under "<rank>/<name>"; where SGLang refuses a case, its words are in <number>.txt there.
        """
        assert self._process.stdin and self._process.stdout
        self._process.stdin.write(json.dumps([[asdict(case) for case in cases], str(out)]) + "\n")
        self._process.stdin.flush()
        assert self._process.stdout.readline() == "done\n", "the process of the loaders has ended"

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin
        self._process.stdin.close()
        self._process.wait(timeout=60)


def choices_of_a_gpu(case: Case, stack: ExitStack) -> None:
    """What SGLang decides by hardware that this machine lacks."""
    from sglang.srt.layers.quantization.unquant import UnquantizedFusedMoEMethod
    from sglang.srt.models.deepseek_v2 import DeepseekV2ForCausalLM
    from sglang.srt.models.glm4_moe import Glm4MoeForCausalLM

    if case.up_first:
        up_first = property(lambda _: True)
        method = UnquantizedFusedMoEMethod
        stack.enter_context(mock.patch.object(method, "load_up_proj_weight_first", up_first))
    if case.fused:
        for model in (DeepseekV2ForCausalLM, Glm4MoeForCausalLM):
            allowed = classmethod(lambda *_: None)
            name = "shared_experts_fusion_disable_reason"
            stack.enter_context(mock.patch.object(model, name, allowed))
    stack.enter_context(mock.patch.dict(os.environ, case.environment))


def model_on(case: Case, rank: int) -> Any:
    """SGLang's model of a case on one rank."""
    from sglang.srt.configs.update_config import adjust_config_with_unaligned_cpu_tp

    stored = json.loads((Path(case.folder) / "config.json").read_text())["torch_dtype"]
    dtype = case.dtype or stored
    with ExitStack() as stack:
        choices_of_a_gpu(case, stack)
        config = sglang_ranks.become(case.folder, rank, dtype, case.flags, case.draft)
        pad = functools.partial(
            adjust_config_with_unaligned_cpu_tp, tp_size=case.flags.get("tp_size", 1)
        )
        load_format = "dummy" if case.record else "auto"
        return sglang_ranks.load(config, load_format, pad if case.cpu else None)


def parameters(case: Case, rank: int) -> dict[str, Any]:
    """One rank's parameters."""
    import torch

    held = model_on(case, rank).named_parameters()
    return {f"{rank}/{name}": t.detach().to(torch.float32).clone() for name, t in held}


def float32_names(case: Case) -> str:
    """For each rank, the parameters that are float32 in a server of another precision."""
    import torch

    held = [model_on(case, rank).named_parameters() for rank in range(case.size)]
    return json.dumps([[n for n, t in named if t.dtype == torch.float32] for named in held])


def make_checkpoint(folder: str, fields: dict[str, Any]) -> None:
    """A random model of an architecture that megarl has no table for."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(**fields, architectures=None)
    AutoModelForCausalLM.from_config(config).float().save_pretrained(folder)
    path = Path(folder) / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"torch_dtype": "float32"}))


def recorded(case: Case) -> str:
    """The layout of a case as its loader was seen to follow it."""
    if case.hf_config:
        return sglang_loader_map.layout_text(case.folder, case.flags)
    numbering = Numbering(sglang_loader_map.checkpoint_shapes(Path(case.folder)))
    ranks = []
    for rank in range(case.size):
        held = sglang_loader_map.record(model_on(case, rank), numbering)
        ranks.append(recorded_rank(rank, held, numbering))
    return to_json("recorded", numbering, ranks)


def load(cases: list[dict[str, Any]], out: Path) -> None:
    """What `Loaders.load` says."""
    from safetensors.torch import save_file

    for number, fields in enumerate(cases):
        case = Case(**fields)
        held: dict[str, Any] = {}
        if case.hf_config:
            make_checkpoint(case.folder, case.hf_config)
        try:
            if case.record:
                (out / f"{number}.json").write_text(recorded(case))
                continue
            if case.dtype:
                (out / f"{number}.json").write_text(float32_names(case))
                continue
            for rank in range(case.size):
                held |= parameters(case, rank)
        except (AssertionError, ValueError) as refusal:
            (out / f"{number}.txt").write_text(repr(refusal))
        else:
            save_file(held, out / f"{number}.safetensors")


def main() -> None:
    """Load what is asked for, a line each, until the input ends."""
    answers = sys.stdout
    sys.stdout = sys.stderr
    sglang_ranks.prepare_process()
    for line in sys.stdin:
        cases, out = json.loads(line)
        load(cases, Path(out))
        print("done", file=answers, flush=True)


if __name__ == "__main__":
    main()
