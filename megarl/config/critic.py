"""Settings of the critic, the value model of `advantage.estimator = "gae"`."""

from __future__ import annotations

from megarl.config.group import Group, NonNegative, NonNegativeFloat
from megarl.config.optimizer import OptimizerConfig


class CriticParallelConfig(Group):
    """Layout of the critic. It has the learner's ranks and process groups, of which Megatron-Core
    keeps one set in a process (parallel_state): other sizes than the learner's are refused."""

    tp: NonNegative = 0
    """Tensor-parallel ranks. 0 means `learner.parallel.tp`."""
    pp: NonNegative = 0
    """Pipeline stages. 0 means `learner.parallel.pp`."""


class CriticConfig(Group):
    """The value model, for `advantage.estimator = "gae"` only: the layers of a language model with
    one output for each token, on the learner's ranks, in `learner.precision.params`."""

    model: str = ""
    """Folder of the Hugging Face checkpoint that its layers begin as; its output layer begins at
    zero. Empty means `actor.model`. It must have the policy's vocabulary. Relative as `actor.model`
    is."""
    clip: NonNegativeFloat = 0.2
    """A value is learned to within so much of what it was before the first optimizer step on the
    batch. 0 does not clip."""
    warmup_versions: NonNegative = 0
    """Passes of the loop, from the first of the run, in which the critic learns alone."""
    optimizer: OptimizerConfig = OptimizerConfig()
    parallel: CriticParallelConfig = CriticParallelConfig()
