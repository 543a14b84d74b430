"""Settings of the critic, the value model of `advantage.estimator = "gae"`."""

from __future__ import annotations

from typing import Literal

from megarl.config.group import Group, NonNegative, NonNegativeFloat
from megarl.config.optimizer import OptimizerConfig
from megarl.config.parallel import LearnerParallelConfig


class CriticParallelConfig(LearnerParallelConfig):
    """Layout of a critic with `critic.ranks = "own"`, in the words of `learner.parallel`; the
    data-parallel size follows from `critic.gpus`."""


class CriticConfig(Group):
    """The value model, for `advantage.estimator = "gae"` only: the layers of a language model with
    one output for each token, in `learner.precision`, within `learner.max_tokens_per_microbatch`
    and with `learner.recompute` and `learner.transformer_config`."""

    model: str = ""
    """Folder of the Hugging Face checkpoint that its layers begin as; its output layer begins at
    zero. Empty means `actor.model`. It must have the policy's vocabulary. Relative as `actor.model`
    is."""
    clip: NonNegativeFloat = 0.2
    """A value is learned to within so much of what it was before the first optimizer step on the
    batch. 0 does not clip."""
    warmup_versions: NonNegative = 0
    """Passes of the loop, from the first of the run, in which the critic learns alone."""
    ranks: Literal["learner", "own"] = "learner"
    """`learner`: on the learner's ranks and in their layout, one model after the other; `own`: in
    processes of its own, laid out by `critic.parallel`, which work while the policy's do."""
    gpus: NonNegative = 0
    """Processes of a critic with ranks of its own, each with one GPU where there is one. 0 means
    one data-parallel rank."""
    optimizer: OptimizerConfig = OptimizerConfig()
    parallel: CriticParallelConfig = CriticParallelConfig()
