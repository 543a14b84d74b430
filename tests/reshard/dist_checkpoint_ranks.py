"""Program, under torchrun with two ranks: real GPTModels, saved by Megatron's own save.

    torchrun --nproc-per-node 2 -m tests.reshard.dist_checkpoint_ranks OUT_DIR

For every case in CASES the checkpoint is OUT_DIR/<case>. Parameters are filled by plain slices that
know nothing of layouts.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from pathlib import Path

import torch

from megarl.actor.shape import ModelShape
from megarl.reshard.mesh import LearnerMesh
from tests.reshard.learner_slices import megatron_slices
from tests.reshard.models import random_weights, tiny_shape

VOCAB_DIVISOR = 128  # what the learner builds its models with


@dataclass(frozen=True)
class Case:
    """One save. `metadata` is what Megatron's `sharded_state_dict` is told besides megarl's own."""

    shape: ModelShape
    mesh: LearnerMesh
    metadata: dict[str, bool] = field(default_factory=dict)


CASES = (
    Case(tiny_shape("Qwen2ForCausalLM"), LearnerMesh(tp=2)),
    Case(tiny_shape("Qwen3ForCausalLM", num_kv_heads=1), LearnerMesh(tp=2)),
    Case(tiny_shape("Qwen3ForCausalLM", tie_embeddings=True), LearnerMesh(pp=2)),
    Case(tiny_shape("Qwen3ForCausalLM"), LearnerMesh(pp=2), {"non_homogeneous_layers": True}),
    Case(tiny_shape("Qwen3ForCausalLM"), LearnerMesh(tp=2), {"singleton_local_shards": True}),
)


def main() -> None:
    """Build, fill and save every case."""
    from megarl.compat import megatron_cpu

    megatron_cpu.install()
    from megatron.core import dist_checkpointing

    from megarl.compat.megatron_checkpoint import content, write_in_process
    from megarl.config.schema import LearnerConfig
    from megarl.learner import distributed, model

    write_in_process()
    learner = LearnerConfig()
    for number, case in enumerate(CASES):
        ranks = distributed.start(case.mesh, "cpu")
        built = model.build_model(case.shape, learner, ranks)
        weights = random_weights(case.shape)
        arrays = megatron_slices(case.shape, case.mesh, ranks.rank, weights, VOCAB_DIVISOR)
        named = model.named_weights(built)
        assert named.keys() == arrays.keys()
        for name, array in arrays.items():
            named[name].copy_(torch.from_numpy(array))
        out = Path(sys.argv[1]) / str(number)
        if ranks.rank == 0:
            out.mkdir()
        torch.distributed.barrier()
        state = built.module.sharded_state_dict(metadata=content() | case.metadata)
        dist_checkpointing.save({"model": state}, str(out), content_metadata=content())
    distributed.stop()


if __name__ == "__main__":
    main()
