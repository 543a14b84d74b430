"""Program, under torchrun: real GPTModels, saved and loaded by Megatron's own save and load.

    torchrun --nproc-per-node 2 -m tests.convert.megatron_ranks FOLDER

For every case of CASES[ranks] there is a Hugging Face checkpoint FOLDER/hf-<case> and what megarl
made of it, FOLDER/made-<case>: Megatron must load that to what plain slices are, which know nothing
of layouts, and to what the learner loads from Hugging Face's. Then it saves, FOLDER/saved-<case>.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from megarl.actor.shape import ModelShape
from megarl.reshard.megatron import megatron_layout
from megarl.reshard.mesh import LearnerMesh
from tests.reshard.learner_slices import megatron_slices
from tests.reshard.megatron_cases import FULL_RANK_LATENT, deepseek, glm, qwen
from tests.reshard.models import random_weights, tiny_shape

if TYPE_CHECKING:
    from megarl.learner.distributed import Ranks

VOCAB_DIVISOR = 128  # what the learner builds its models with


@dataclass(frozen=True)
class Case:
    """One save, optimizer and all, but for those with `metadata`.

    Those with even numbers are saved by Megatron's own save, the others by the learner's.
    `metadata` is what Megatron's `sharded_state_dict` is told besides what megarl's saves tell it.
    """

    shape: ModelShape
    mesh: LearnerMesh
    metadata: dict[str, bool] = field(default_factory=dict)


TWO = (
    Case(tiny_shape("Qwen2ForCausalLM", num_kv_heads=1), LearnerMesh(tp=2)),
    Case(tiny_shape("Qwen3ForCausalLM", tie_embeddings=True), LearnerMesh(pp=2)),
    Case(tiny_shape("Qwen3ForCausalLM"), LearnerMesh(pp=2), {"non_homogeneous_layers": True}),
    Case(tiny_shape("Qwen3ForCausalLM"), LearnerMesh(tp=2), {"singleton_local_shards": True}),
    Case(qwen(), LearnerMesh(tp=2, ep=2)),
    Case(glm(), LearnerMesh(tp=2, etp=2)),
    Case(deepseek(), LearnerMesh(dp=2, ep=2)),
)
FOUR = (
    Case(tiny_shape("LlamaForCausalLM"), LearnerMesh(tp=2, pp=2)),
    Case(tiny_shape("Qwen3ForCausalLM", num_layers=4), LearnerMesh(tp=2, pp=2, vpp=2)),
    Case(tiny_shape("Qwen2ForCausalLM", tie_embeddings=True), LearnerMesh(tp=4)),
    Case(qwen(), LearnerMesh(pp=2, dp=2, ep=2)),
    Case(glm(num_layers=4), LearnerMesh(tp=2, pp=2, ep=2)),
    Case(deepseek(num_layers=4, mla=FULL_RANK_LATENT), LearnerMesh(tp=2, pp=2, etp=2)),
    Case(deepseek(num_layers=4), LearnerMesh(tp=2, dp=2, ep=2, etp=2)),
    Case(qwen(num_layers=4), LearnerMesh(pp=2, vpp=2, dp=2, ep=2)),
    Case(glm(num_layers=4), LearnerMesh(tp=2, pp=2, vpp=2, ep=2)),
    Case(tiny_shape("LlamaForCausalLM", num_layers=4, tie_embeddings=True), LearnerMesh(pp=4)),
)
CASES = {2: TWO, 4: FOUR}


def main() -> None:
    """Build, fill, load and save every case."""
    from megarl.compat import megatron_cpu

    megatron_cpu.install()
    from megarl.compat.megatron_checkpoint import write_in_process
    from megarl.learner import distributed

    write_in_process()
    for number, case in enumerate(CASES[int(os.environ["WORLD_SIZE"])]):
        run(case, distributed.start(case.mesh, "cpu"), Path(sys.argv[1]), str(number))
    torch.distributed.destroy_process_group()


def run(case: Case, ranks: Ranks, folder: Path, name: str) -> None:
    """A model as the learner builds it: loaded from what megarl made, and saved."""
    from megatron.core import dist_checkpointing

    from megarl.compat.megatron_checkpoint import content
    from megarl.config.schema import LearnerConfig, LearnerParallelConfig
    from megarl.learner import model
    from megarl.learner.checkpoint import Training
    from megarl.learner.optimizer import Optimizer
    from megarl.learner.saving import Saving

    sizes = {axis: getattr(case.mesh, axis) for axis in ("tp", "pp", "vpp", "ep", "etp")}
    learner = LearnerConfig(parallel=LearnerParallelConfig(**sizes))
    layout = megatron_layout(case.shape, case.mesh)
    built = model.build_model(case.shape, learner, ranks, layout)
    named = model.named_weights(built, case.shape, layout, ranks.rank)
    weights = random_weights(case.shape)
    arrays = megatron_slices(case.shape, case.mesh, ranks.rank, weights, VOCAB_DIVISOR)
    assert named.keys() == arrays.keys()
    wanted = {key: torch.from_numpy(arrays[key]).to(named[key].dtype) for key in named}
    for key, tensor in named.items():
        tensor.copy_(wanted[key])
    described, out = content() | case.metadata, folder / f"saved-{name}"
    if case.metadata:
        if ranks.rank == 0:
            out.mkdir()
        torch.distributed.barrier()
        state = {"model": built.sharded_state_dict(described)}
        dist_checkpointing.save(state, str(out), content_metadata=described)
        return  # Megatron looks for other names than those that it has by default
    optimizer = Optimizer(built, learner.optimizer, torch.bfloat16, decay_steps=1)
    if int(name) % 2:
        saving = Saving(Training(built, optimizer, ranks, case.shape))
        saving.begin(str(out), 7)
        saving.end(wait=True)
    else:
        save_by_megatron(built, optimizer, out)
    for load in (
        lambda: built.load_state_dict(
            dist_checkpointing.load(
                {"model": built.sharded_state_dict(content())}, str(folder / f"made-{name}")
            )["model"]
        ),
        lambda: model.load_checkpoint(folder / f"hf-{name}", layout, ranks.rank, named),
    ):
        for tensor in named.values():
            tensor.fill_(-1)
        load()
        differing = [key for key, tensor in named.items() if not torch.equal(tensor, wanted[key])]
        assert not differing, (case, differing)


def save_by_megatron(built: Any, optimizer: Any, out: Path) -> None:
    """By Megatron's own save, with its distributed optimizer, as Megatron-LM has it."""
    from megatron.core import dist_checkpointing

    from megarl.compat.megatron_checkpoint import content
    from megarl.compat.megatron_cpu import init_optimizer_state

    init_optimizer_state(optimizer.megatron)
    if torch.distributed.get_rank() == 0:
        out.mkdir()
    torch.distributed.barrier()
    model = built.sharded_state_dict(content())
    state = optimizer.megatron.sharded_state_dict(model, metadata=content())
    everything = {"model": model, "optimizer": state, "iteration": 7, "checkpoint_version": 3.0}
    dist_checkpointing.save(everything, str(out), content_metadata=content())


if __name__ == "__main__":
    main()
