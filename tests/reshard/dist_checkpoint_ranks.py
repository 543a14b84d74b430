"""Program, under torchrun with two ranks: real GPTModels, saved by Megatron's own save.

    torchrun --nproc-per-node 2 -m tests.reshard.dist_checkpoint_ranks OUT_DIR

For every case in CASES the checkpoint is OUT_DIR/<case>. The learner's parameters are filled by
plain slices that know nothing of layouts.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from pathlib import Path

import torch

from megarl.actor.shape import ModelShape
from megarl.reshard.megatron import megatron_layout
from megarl.reshard.mesh import LearnerMesh
from tests.reshard.learner_slices import megatron_slices
from tests.reshard.megatron_cases import deepseek, glm, qwen
from tests.reshard.models import random_weights, tiny_shape

VOCAB_DIVISOR = 128  # what the learner builds its models with


@dataclass(frozen=True)
class Case:
    """One save: a learner's, optimizer and all, but for those with `metadata`.

    That is what Megatron's `sharded_state_dict` is told besides what megarl's own saves tell it.
    """

    shape: ModelShape
    mesh: LearnerMesh
    metadata: dict[str, bool] = field(default_factory=dict)


CASES = (
    Case(tiny_shape("Qwen2ForCausalLM", num_kv_heads=1), LearnerMesh(tp=2)),
    Case(tiny_shape("Qwen3ForCausalLM", tie_embeddings=True), LearnerMesh(pp=2)),
    Case(tiny_shape("Qwen3ForCausalLM"), LearnerMesh(pp=2), {"non_homogeneous_layers": True}),
    Case(tiny_shape("Qwen3ForCausalLM"), LearnerMesh(tp=2), {"singleton_local_shards": True}),
    Case(qwen(), LearnerMesh(tp=2, ep=2)),
    Case(glm(), LearnerMesh(tp=2, etp=2)),
    Case(deepseek(), LearnerMesh(dp=2, ep=2)),
)


def main() -> None:
    """Build, fill and save every case."""
    save_all(Path(sys.argv[1]))
    torch.distributed.destroy_process_group()


def save_all(folder: Path) -> None:
    """Models as the learner builds them."""
    from megarl.compat import megatron_cpu

    megatron_cpu.install()
    from megatron.core import dist_checkpointing

    from megarl.compat.megatron_checkpoint import content, write_in_process
    from megarl.config.schema import LearnerConfig, LearnerParallelConfig
    from megarl.learner import checkpoint, distributed, model
    from megarl.learner.optimizer import Optimizer

    write_in_process()
    for number, case in enumerate(CASES):
        ranks = distributed.start(case.mesh, "cpu")
        sizes = {axis: getattr(case.mesh, axis) for axis in ("tp", "pp", "ep", "etp")}
        learner = LearnerConfig(parallel=LearnerParallelConfig(**sizes))
        layout = megatron_layout(case.shape, case.mesh)
        built = model.build_model(case.shape, learner, ranks, layout)
        weights = random_weights(case.shape)
        arrays = megatron_slices(case.shape, case.mesh, ranks.rank, weights, VOCAB_DIVISOR)
        named = model.named_weights(built, case.shape, layout, ranks.rank)
        assert named.keys() == arrays.keys()
        for name, array in arrays.items():
            named[name].copy_(torch.from_numpy(array))
        out = folder / str(number)
        if not case.metadata:
            optimizer = Optimizer(built, learner.optimizer, torch.bfloat16, decay_steps=1)
            saved = checkpoint.Training(built, optimizer, ranks, case.shape)
            checkpoint.save(saved, out, version=1)
            continue
        if ranks.rank == 0:
            out.mkdir()
        torch.distributed.barrier()
        state = built.sharded_state_dict(content() | case.metadata)
        dist_checkpointing.save({"model": state}, str(out), content_metadata=content())


if __name__ == "__main__":
    main()
