"""Two ranks of real learners: training is saved in one layout, and goes on from files in another.

state_ranks save FOLDER     for each case FOLDER/saved-<case>, after two optimizer steps
state_ranks go_on FOLDER    each case's other layout, from FOLDER/saved-<case> and from what
                            megarl made of it, FOLDER/made-<case>: all must be the same, bit
                            for bit, before another step and after it
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megarl.actor.shape import ModelShape
from megarl.reshard.megatron import megatron_layout
from megarl.reshard.mesh import LearnerMesh
from tests.reshard.learner_slices import megatron_slices
from tests.reshard.megatron_cases import deepseek, qwen
from tests.reshard.models import random_weights, tiny_shape

VOCAB_DIVISOR = 128  # what the learner builds its models with


@dataclass(frozen=True)
class Case:
    """A model, the layout that saves it and the one that goes on."""

    shape: ModelShape
    before: LearnerMesh
    after: LearnerMesh


CASES = (
    Case(tiny_shape("Qwen3ForCausalLM", tie_embeddings=True), LearnerMesh(tp=2), LearnerMesh(pp=2)),
    Case(qwen(), LearnerMesh(tp=2, ep=2), LearnerMesh(pp=2)),
    Case(deepseek(), LearnerMesh(dp=2, ep=2), LearnerMesh(tp=2, etp=2)),
)


class Trained:
    """A learner's model and optimizer in one layout, on this rank."""

    def __init__(self, case: Case, mesh: LearnerMesh) -> None:
        from megarl.config.schema import LearnerConfig, LearnerParallelConfig
        from megarl.learner import checkpoint, distributed, model
        from megarl.learner.optimizer import Optimizer

        sizes = {axis: getattr(mesh, axis) for axis in ("tp", "pp", "vpp", "ep", "etp")}
        learner = LearnerConfig(
            parallel=LearnerParallelConfig(**sizes), optimizer={"lr": 1e-2, "clip_grad": 0.0}
        )
        ranks = distributed.start(mesh, "cpu")
        layout = megatron_layout(case.shape, mesh)
        built = model.build_model(case.shape, learner, ranks, layout)
        self.named = model.named_weights(built, case.shape, layout, ranks.rank)
        weights = random_weights(case.shape)
        arrays = megatron_slices(case.shape, mesh, ranks.rank, weights, VOCAB_DIVISOR)
        for name, tensor in self.named.items():
            tensor.copy_(torch.from_numpy(arrays[name]))
        self.optimizer = Optimizer(built, learner.optimizer, torch.bfloat16, decay_steps=9)
        self.training = checkpoint.Training(built, self.optimizer, ranks, case.shape)

    def step(self) -> None:
        """An optimizer step whose gradient is a part of the weights, in every layout the same.

        Rows of padding have none, as in training.
        """
        self.optimizer.clear()
        for parameter in self.training.model.parameters():
            parameter.main_grad.copy_(parameter.detach().float().mul(0.3))
        self.optimizer.step()

    def load(self, path: Path) -> None:
        """As the learner goes on. What was converted has no list of files, which `check` wants."""
        from megarl.learner import checkpoint

        for tensor in self.named.values():
            tensor.fill_(-1)
        assert checkpoint.load(self.training, path, is_checked=True) == 7

    def everything(self) -> dict[str, torch.Tensor]:
        """Weights, main weights, moments and steps of this rank."""
        found = {name: tensor.clone() for name, tensor in self.named.items()}
        for index, part in enumerate(self.optimizer.megatron.chained_optimizers):
            for number, group in enumerate(part.optimizer.param_groups):
                for place, parameter in enumerate(group["params"]):
                    key = f"{index}.{number}.{place}"
                    found[key] = parameter.detach().clone()
                    for name, value in part.optimizer.state[parameter].items():
                        found[f"{key}.{name}"] = torch.as_tensor(value).clone()
        return found


def save(case: Case, folder: Path, number: int) -> None:
    """Two steps, and a checkpoint of megarl's learner."""
    from megarl.learner.saving import Saving

    trained = Trained(case, case.before)
    trained.step()
    trained.step()
    saving = Saving(trained.training)
    saving.begin(str(folder / f"saved-{number}"), 7)
    saving.end(wait=True)
    if not number:
        save_buckets(trained, folder / "buckets")


def save_buckets(trained: Trained, out: Path) -> None:
    """By Megatron's own save, as Megatron-LM has optimizers by default: in buckets."""
    from megatron.core import dist_checkpointing

    described = {
        "distrib_optim_sharding_type": "dp_reshardable",
        "chained_optim_avoid_prefix": True,
    }
    if torch.distributed.get_rank() == 0:
        out.mkdir()
    torch.distributed.barrier()
    model = trained.training.model.sharded_state_dict(dict(described))
    optimizer = trained.optimizer.megatron.sharded_state_dict(model, metadata=dict(described))
    state = {"model": model, "optimizer": optimizer, "iteration": 7}
    dist_checkpointing.save(state, str(out), content_metadata=described)


def go_on(case: Case, folder: Path, number: int) -> None:
    """From Megatron's own files and from those that were made of them."""
    trained = Trained(case, case.after)
    found: list[dict[str, Any]] = []
    for name in ("saved", "made"):
        trained.load(folder / f"{name}-{number}")
        before = trained.everything()
        assert any(key.endswith(".exp_avg") and bool(t.any()) for key, t in before.items())
        trained.step()
        after = {f"after {key}": tensor for key, tensor in trained.everything().items()}
        assert any(not torch.equal(before[key], after[f"after {key}"]) for key in trained.named)
        found.append(before | after)
    assert found[0].keys() == found[1].keys()
    apart = [key for key, tensor in found[0].items() if not torch.equal(tensor, found[1][key])]
    assert not apart, (case, apart)


def main() -> None:
    """Every case."""
    from megarl.compat import megatron_cpu

    megatron_cpu.install()
    from megarl.compat.megatron_checkpoint import write_in_process

    write_in_process()
    act = {"save": save, "go_on": go_on}[sys.argv[1]]
    for number, case in enumerate(CASES):
        act(case, Path(sys.argv[2]), number)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
