"""One rank of a critic with ranks of its own: its verbs, each a collective call over all of them.

Owns the order of work inside a verb. What a critic is, and its mathematics, is in `critic`. Knows
nothing of the policy, but for the rewards that its tokens are given, and nothing of HTTP.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from megarl.config.fp8 import token_multiple
from megarl.config.layouts import critic_settings
from megarl.config.schema import Config
from megarl.learner.control_group import together
from megarl.learner.joining import join
from megarl.learner.meter import MemoryMeter, measured
from megarl.learner.packing import Multiples, PackedMicrobatch, check_plan, pack_minibatch
from megarl.learner.saving_verbs import SavingVerbs
from megarl.learner.scoring import passes_needed
from megarl.learner.token_numbers import LossTokenNumbers
from megarl.planning.memory import predict_critic
from megarl.types import Batch, CriticScores, MinibatchPlan, TokenNumbers


class LoneCritic(SavingVerbs):
    """The critic on this rank; every method is collective over all of its ranks.

    `mark(phase)` is told where a verb stands.
    """

    def __init__(self, config: Config, run_dir: Path, mark: Callable[[str], None]) -> None:
        """Join the other ranks, build the model and read the checkpoint of `critic.model`.

        Raises as `learner.Learner` does.
        """
        self.config, self._mark = critic_settings(config), mark
        self.ranks = join(self.config, mark)
        # Megatron can be imported only now, with its CPU substitution in place.
        from megarl.learner import critic, offload, saving

        mark("model")
        self.critic = critic.Critic.build(self.config, self.ranks)
        self._saving = saving.Saving(*self.critic.trainings)
        state = offload.LearnerState(*self.critic.tensors, self.ranks.device)
        self._gather_weights = state.gather_weights
        on_cpu = self.ranks.device.type == "cpu"
        predicted = predict_critic(self.config, self.ranks.rank, on_cpu)
        self.meter = MemoryMeter(self.ranks.device, state.num_bytes, predicted)
        self.meter.tell()

    def info(self) -> dict[str, int]:
        """Sizes of the mesh."""
        mesh = self.ranks.mesh
        sizes = {"tp": mesh.tp, "pp": mesh.pp, "cp": mesh.cp, "dp": mesh.dp}
        return {**sizes, "world_size": mesh.size}

    @measured("score")
    def score(self, batch: Batch, rewards: Sequence[TokenNumbers]) -> CriticScores:
        """Values of the whole batch before its first optimizer step, and advantages of them.

        `rewards` are what tokens are rewarded with besides their sample's reward; none says
        nothing. Raises ShapeError or DataError where a schedule, a group file or rewards do not
        fit, LearnerError where some samples have rewards and others none.
        """
        self._gather_weights()
        self.critic.begin(batch)
        given, made = LossTokenNumbers("rewards"), LossTokenNumbers("advantages")
        given.take(rewards)
        scored: list[PackedMicrobatch] = []
        for plan, counted in passes_needed(batch, keep=True):
            microbatches, length = self._pack(plan)
            self._mark("values")
            self.critic.score(
                plan, microbatches, length, counted, given.spread if rewards else _nothing
            )
            scored += microbatches
        self._mark("metrics")
        metrics = self.critic.finish()
        if self.ranks.reports:
            for microbatch in self.critic.prepared(scored):
                made.keep(microbatch, microbatch.advantage_T)
        return CriticScores(metrics, made.gathered(batch, self.ranks))

    @measured("train")
    def step(self, minibatch: MinibatchPlan) -> dict[str, float]:
        """One optimizer step on one minibatch; returns its `value/*`.

        Raises LearnerError, on every rank and before the weights change, where a sample was not
        scored or too many steps were skipped in a row; ShapeError and DataError as `score` does.
        """
        microbatches, length = self._pack(minibatch)
        together(lambda: self.critic.prepared(microbatches), self.ranks.device)
        self._mark("critic")
        return self.critic.step(microbatches, length, minibatch.num_loss_tokens)

    def load(self, path: str) -> int:
        """Continue from folder `path`; returns its policy version. See `checkpoint.load`."""
        self._mark("load")
        self.critic.clear()
        return self._saving.load(path)

    def peaks(self) -> dict[str, int]:
        """`memory/*` of the phases since the last call. See `meter.MemoryMeter.take`."""
        return self.meter.take()

    def close(self) -> None:
        """Nothing of it outlives this process."""

    def _require(self, verb: str) -> None:
        """All of it is always here."""
        self._gather_weights()

    def _pack(self, plan: MinibatchPlan) -> tuple[list[PackedMicrobatch], int]:
        """This rank's microbatches of `plan`; fails on every rank where it fails on one."""
        self._mark("reading")
        mesh = self.ranks.mesh
        check_plan(plan, mesh.dp)
        tokens = token_multiple(self.config.learner.precision, mesh.tp, mesh.cp)
        multiples = Multiples.of(mesh, tokens)
        return together(
            lambda: pack_minibatch(plan, self.ranks.dp_rank, multiples), self.ranks.device
        )


def _nothing(microbatch: PackedMicrobatch) -> None:
    pass
