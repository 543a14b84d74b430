"""The models that are synced, the meshes of both sides, and every learner rank's tensors."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file

from megarl.actor.parameters import parameter_table
from megarl.actor.shape import ModelShape, read_shape
from megarl.reshard import execute
from megarl.reshard.explicit import full_layout
from megarl.reshard.mesh import LearnerMesh
from megarl.reshard.plan import make_plan
from megarl.weight_sync.control import SourceSpec

Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Case:
    """One model in fp32, a learner's mesh, and the TP of one server.

    `model` is its folder; where that holds no weights they are drawn at random, on both sides.
    """

    name: str
    model: Path
    mesh: LearnerMesh
    tp: int = 1

    @property
    def shape(self) -> ModelShape:
        """Of the policy."""
        return read_shape(self.model)

    @property
    def source(self) -> SourceSpec:
        """The learner's layout, as a learner on CPUs has it."""
        return SourceSpec(self.shape, self.mesh, forms=("te", "per_expert"))

    @property
    def is_random(self) -> bool:
        """Whether there is no checkpoint."""
        return not list(self.model.glob("*.safetensors"))


def smollm2(cache: Path) -> Case:
    """SmolLM2-135M-Instruct; its 9 heads split over no two ranks, so the learner is a pipeline.

    Raises SystemExit where it has not been fetched.
    """
    folder = cache / "smollm2"
    if not (folder / "model.safetensors").is_file():
        raise SystemExit(f"{folder} is not there; python tools/fetch_smollm2.py makes it")
    return Case("smollm2", folder, LearnerMesh(pp=2))


MOE_CONFIG = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "num_hidden_layers": 8,
    "hidden_size": 512,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "intermediate_size": 1024,
    "moe_intermediate_size": 256,
    "num_experts": 32,
    "num_experts_per_tok": 4,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "vocab_size": 32000,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
    "attention_bias": False,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "max_position_embeddings": 2048,
    "eos_token_id": 0,
    "torch_dtype": "float32",
}


def moe(cache: Path) -> Case:
    """A mixture of 32 experts, 144 million parameters, drawn at random."""
    folder = cache / "bench_moe"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(MOE_CONFIG, indent=1))
    return Case("moe", folder, LearnerMesh(tp=2, ep=2))


def num_bytes(case: Case) -> int:
    """Of all parameters, in fp32."""
    return 4 * sum(math.prod(parameter.shape) for parameter in parameter_table(case.shape))


def whole_tensors(case: Case) -> Tensors:
    """Every parameter by its name in the model's table, from the checkpoint or at random."""
    shape = case.shape
    if not case.is_random:
        stored: Tensors = {}
        for path in sorted(case.model.glob("*.safetensors")):
            stored.update(load_file(path))
        return {p.name: stored[p.name] for p in parameter_table(shape)}
    generator = torch.Generator().manual_seed(0)
    return {
        p.name: torch.randn(p.shape, generator=generator) * 0.02 for p in parameter_table(shape)
    }


def stored_tensors(case: Case) -> Tensors:
    """The same as a checkpoint stores them: one tensor for each expert."""
    stored: Tensors = {}
    whole = whole_tensors(case)
    for parameter in parameter_table(case.shape):
        names, tensor = parameter.stored_names(), whole[parameter.name]
        parts = tensor.unbind(0) if parameter.stacked else (tensor,)
        # Memory of its own for each: pickled, a view of a stack takes the whole stack along.
        stored.update({name: part.clone() for name, part in zip(names, parts, strict=True)})
    return stored


def on_rank(case: Case, rank: int, tensors: Mapping[str, torch.Tensor]) -> Tensors:
    """What learner rank `rank` holds, by the local names of Megatron's layout."""
    layout = case.source.layout()
    plan = make_plan(full_layout(layout.table), layout.only(rank))
    mine = {t.name: torch.zeros(t.shape) for t in layout.ranks[rank].tensors}
    execute.run(plan.between(0, rank), tensors, mine)
    return mine


CASES = {"smollm2": smollm2, "moe": moe}
