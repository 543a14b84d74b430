"""Program, under torchrun with two ranks: real GPTModels, saved by Megatron's own save.

    torchrun --nproc-per-node 2 -m tests.reshard.dist_checkpoint_ranks OUT_DIR

For every case in CASES the checkpoint is OUT_DIR/<case>. The learner's parameters are filled by
plain slices that know nothing of layouts; those of EXPERTS by layouts that other tests compare with
the logits of Hugging Face's models.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

import torch

from megarl.actor.shape import ModelShape
from megarl.reshard.mesh import LearnerMesh
from tests.reshard import megatron_cases
from tests.reshard.learner_slices import megatron_slices
from tests.reshard.megatron_cases import glm, qwen
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


LEARNERS = (
    Case(tiny_shape("Qwen2ForCausalLM", num_kv_heads=1), LearnerMesh(tp=2)),
    Case(tiny_shape("Qwen3ForCausalLM", tie_embeddings=True), LearnerMesh(pp=2)),
    Case(tiny_shape("Qwen3ForCausalLM"), LearnerMesh(pp=2), {"non_homogeneous_layers": True}),
    Case(tiny_shape("Qwen3ForCausalLM"), LearnerMesh(tp=2), {"singleton_local_shards": True}),
)
EXPERTS = (
    megatron_cases.Case(qwen(), LearnerMesh(tp=2, ep=2)),
    megatron_cases.Case(glm(), LearnerMesh(tp=2, etp=2)),
)
CASES = (*LEARNERS, *EXPERTS)


def main() -> None:
    """Build, fill and save every case."""
    save_learners(Path(sys.argv[1]))
    save_experts(Path(sys.argv[1]))
    torch.distributed.destroy_process_group()


def save_experts(folder: Path) -> None:
    """Models with routed experts and other layer specs, which no learner builds yet."""
    from megatron.core import dist_checkpointing, parallel_state

    from megarl.compat.megatron_checkpoint import content
    from tests.reshard import megatron_models

    rank = torch.distributed.get_rank()
    for number, case in enumerate(EXPERTS, len(LEARNERS)):
        out = folder / str(number)
        parallel_state.destroy_model_parallel()
        (chunk,), held = megatron_models.build_case(case, folder / f"{number}-{rank}")
        with torch.no_grad():
            megatron_models.fill(held, case, rank)
        if rank == 0:
            out.mkdir()
        torch.distributed.barrier()
        state = chunk.sharded_state_dict(metadata=content())
        dist_checkpointing.save({"model": state}, str(out), content_metadata=content())


def save_learners(folder: Path) -> None:
    """Models as the learner builds them."""
    from megarl.compat import megatron_cpu

    megatron_cpu.install()
    from megatron.core import dist_checkpointing

    from megarl.compat.megatron_checkpoint import content, write_in_process
    from megarl.config.schema import LearnerConfig
    from megarl.learner import checkpoint, distributed, model
    from megarl.learner.optimizer import Optimizer

    write_in_process()
    learner = LearnerConfig()
    for number, case in enumerate(LEARNERS):
        ranks = distributed.start(case.mesh, "cpu")
        built = model.build_model(case.shape, learner, ranks)
        weights = random_weights(case.shape)
        arrays = megatron_slices(case.shape, case.mesh, ranks.rank, weights, VOCAB_DIVISOR)
        named = model.named_weights(built)
        assert named.keys() == arrays.keys()
        for name, array in arrays.items():
            named[name].copy_(torch.from_numpy(array))
        out = folder / str(number)
        if not case.metadata:
            optimizer = Optimizer(built, learner.optimizer, torch.bfloat16)
            policy = SimpleNamespace(model=built)
            saved = SimpleNamespace(
                policy=policy, optimizer=optimizer, ranks=ranks, shape=case.shape
            )
            checkpoint.save(saved, out, version=1)  # type: ignore[arg-type]
            continue
        if ranks.rank == 0:
            out.mkdir()
        torch.distributed.barrier()
        state = built.module.sharded_state_dict(metadata=content() | case.metadata)
        dist_checkpointing.save({"model": state}, str(out), content_metadata=content())


if __name__ == "__main__":
    main()
