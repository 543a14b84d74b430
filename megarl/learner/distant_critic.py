"""What the learner's ranks have of a critic that has ranks of its own: what it made of a batch.

Owns the advantages that were given, by sample, and the rewards of tokens that the critic wants.
Beside `critic.Critic` it is the other thing that a learner may have for a critic. Knows nothing of
models or of how either comes and goes.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace

from torch import Tensor

from megarl.config.schema import Config
from megarl.errors import LearnerError
from megarl.learner.distributed import Ranks
from megarl.learner.packing import PackedMicrobatch
from megarl.learner.token_numbers import LossTokenNumbers
from megarl.types import Batch, MinibatchPlan, TokenNumbers


class DistantCritic:
    """Advantages from elsewhere. Methods are not collective unless they say so."""

    trainings = ()  # its checkpoint is its own ranks'
    tensors = None  # and it has nothing on this device

    def __init__(self, config: Config, ranks: Ranks) -> None:
        self.learns_alone = False
        self._config, self._ranks = config, ranks
        self._advantages = LossTokenNumbers("advantages")
        self._rewards = LossTokenNumbers("rewards")
        self._batch: Batch | None = None

    def clear(self) -> None:
        """Forget the batch before."""
        self._advantages.clear()
        self._rewards.clear()
        self._batch = None

    def begin(self, batch: Batch) -> None:
        """Forget the batch before; `batch` is scored next."""
        self.clear()
        self._batch = batch
        self.learns_alone = batch.version < self._config.critic.warmup_versions

    def score(
        self,
        plan: MinibatchPlan,
        microbatches: Sequence[PackedMicrobatch],
        length: int,
        counted: Collection[str],
        rewards: Callable[[PackedMicrobatch], Tensor | None],
    ) -> None:
        """Keep what tokens of this rank's microbatches are rewarded with."""
        for microbatch in microbatches if self._ranks.is_last_stage else ():
            if (reward_T := rewards(microbatch)) is not None:
                self._rewards.keep(microbatch, reward_T)

    def finish(self) -> dict[str, float]:
        """Nothing: the critic's ranks have the numbers."""
        return {}

    def token_rewards(self) -> tuple[TokenNumbers, ...]:
        """What was kept of the batch, on every rank; nothing before one is scored. Collective."""
        if self._batch is None or self._config.kl.where == "loss":
            return ()
        return self._rewards.gathered(self._batch, self._ranks)

    def take_advantages(self, given: Sequence[TokenNumbers]) -> None:
        """Advantages of the batch that was scored. ShapeError where they are none."""
        self._advantages.take(given)

    def prepared(self, microbatches: Sequence[PackedMicrobatch]) -> list[PackedMicrobatch]:
        """The microbatches with their tokens' advantages, where this rank has a loss.

        Raises LearnerError where a sample was not given any.
        """
        if not self._ranks.is_last_stage:
            return list(microbatches)
        spread = self._advantages.spread
        return [replace(each, advantage_T=spread(each)) for each in microbatches]

    def step(
        self, microbatches: Sequence[PackedMicrobatch], length: int, num_loss_tokens: int
    ) -> dict[str, float]:
        """Nothing: the critic steps on its own ranks, at the same time."""
        return {}


def distant(critic: object) -> DistantCritic:
    """`critic`, which must be one. Raises LearnerError where a learner has another, or none."""
    if not isinstance(critic, DistantCritic):
        raise LearnerError('this run has no critic with ranks of its own (critic.ranks = "own")')
    return critic
