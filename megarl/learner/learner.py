"""Stage f on one rank: the verbs of the learner, each a collective call over all ranks.

Owns the order of work inside a verb. Mathematics is in `passes`, `logprobs` and `loss`, the update
in `optimizer`, checkpoints in `checkpoint`, weight sync in `weight_sync`. Knows nothing of HTTP.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from megarl.actor.shape import read_shape
from megarl.config.bounds import PROBE_CONTEXT
from megarl.config.fp8 import optimizer_fields, token_multiple
from megarl.config.layouts import learner_layout, trained_shape
from megarl.config.schema import Config
from megarl.learner import shared_weights
from megarl.learner.chunks import Chunks
from megarl.learner.control_group import together
from megarl.learner.distant_critic import distant
from megarl.learner.joining import join
from megarl.learner.loss import LossWeights
from megarl.learner.meter import MemoryMeter, measured
from megarl.learner.packing import (
    Multiples,
    PackedMicrobatch,
    check_plan,
    pack_minibatch,
    token_counts,
)
from megarl.learner.saving_verbs import SavingVerbs
from megarl.learner.scoring import (
    KeptLogProbs,
    Mismatch,
    ReferencePolicy,
    kl_rewards,
    passes_needed,
)
from megarl.planning.memory import predict
from megarl.types import Batch, MinibatchPlan, ServerEndpoint, SyncReport, TokenNumbers

if TYPE_CHECKING:
    from megarl.learner.passes import Scores
    from megarl.weight_sync.modes import ModalSync

log = logging.getLogger(__name__)


def _ignore(phase: str) -> None:
    pass


class Learner(SavingVerbs):
    """One rank of the learner, built from the settings; every method is collective over all ranks.

    `mark(phase)` is told where a verb stands. `policy.model` is Megatron's model on this rank,
    `weights` its live parameters, and the buffers that are weights, by the names of `layout`.
    """

    def __init__(
        self, config: Config, run_dir: Path, mark: Callable[[str], None] = _ignore
    ) -> None:
        """Join the other ranks, build the model and read the checkpoint `actor.model` into it.

        Raises LaunchError where the processes do not fit the layout, ModelError, LayoutError or
        ConfigError where the model, its layout, `learner.transformer_config` or FP8 cannot be run,
        LearnerError where a package that Megatron imports is broken.
        """
        self.config, self.run_dir, self._mark = config, run_dir, mark
        self.version = 0
        stored = read_shape(config.actor.model)
        self.shape = trained_shape(stored)
        self.layout = learner_layout(config, self.shape)
        self.ranks = join(config, mark)
        module = self._build_policy()
        # Megatron can be imported only now, with its CPU substitution in place.
        from megarl.learner import critic, offload, passes, saving, sequences

        self._passes, self._sequence_logprobs = passes, sequences.sequence_logprobs
        self._old = KeptLogProbs()
        self._reference_logprobs = KeptLogProbs()
        self._reference = self._build_reference()
        mark("critic")
        self.critic = critic.make_critic(config, self.ranks)
        beside = None if self.critic is None else self.critic.tensors
        training = saving.Training(module, self.optimizer, self.ranks, self.shape)
        self._saving = saving.Saving(training, *(self.critic.trainings if self.critic else ()))
        megatron = self.optimizer.megatron
        self.state = offload.LearnerState(module, megatron, self.ranks.device, beside)
        on_cpu = self.ranks.device.type == "cpu"
        predicted = predict(config, self.shape, self.layout, self.ranks.rank, on_cpu)
        self.meter = MemoryMeter(self.ranks.device, self.state.num_bytes, predicted)
        self.meter.tell()
        self._weight_sync: ModalSync | None = None
        if stored.num_mtp_layers and self.ranks.rank == 0:
            log.warning(
                "layers for multi-token prediction are left out: not loaded, trained or published "
                "num_layers=%d",
                stored.num_mtp_layers,
            )

    def _build_policy(self) -> Chunks:
        """The model, with the checkpoint's weights in it, and its optimizer."""
        from megarl.learner import model, optimizer, passes, transformer

        self._mark("model")
        config, rank = self.config, self.ranks.rank
        module = model.build_model(self.shape, config.learner, self.ranks, self.layout)
        self.shared_memory = shared_weights.share(config, module, self.ranks)
        self.weights = model.named_weights(module, self.shape, self.layout, rank)
        self._mark("checkpoint")
        model.load_checkpoint(config.actor.model, self.layout, rank, self.weights)
        self.optimizer = optimizer.Optimizer(
            module,
            config.learner.optimizer,
            transformer.DTYPES[config.learner.precision.params],
            config.decay_steps,
            optimizer_fields(config.learner.precision),
        )
        self.policy = passes.Policy(
            model=module,
            ranks=self.ranks,
            vocab_size=self.shape.vocab_size,
            temperature=config.rollout.sampling.temperature,
        )
        return module

    def info(self) -> dict[str, int]:
        """Sizes of the mesh and the policy version that the weights are."""
        mesh = self.ranks.mesh
        return {
            "tp": mesh.tp,
            "pp": mesh.pp,
            "vpp": mesh.vpp,
            "cp": mesh.cp,
            "dp": mesh.dp,
            "ep": mesh.ep,
            "etp": mesh.etp,
            "world_size": mesh.size,
            "version": self.version,
        }

    @measured("score")
    def score(self, batch: Batch) -> dict[str, float]:
        """Forward passes over the whole batch before its first optimizer step.

        Keeps the policy's own log-probs where `correction.old_logprobs` is "recomputed", the
        reference's where there is one, and a critic's values. Returns the `mismatch/*` metrics and
        what the critic makes of the batch, over all ranks, each sample counted once. Raises
        ShapeError or DataError where a schedule or a group file does not fit.
        """
        self._require("score")
        self._old.clear()
        self._reference_logprobs.clear()
        mismatch = Mismatch(self.ranks.device)
        keep_old = self.config.correction.old_logprobs == "recomputed"
        keep = keep_old or self._reference is not None or self.critic is not None
        if self.critic is not None:
            self.critic.begin(batch)
        for plan, counted in passes_needed(batch, keep):
            microbatches, length = self._pack(plan)
            self._mark("forward")
            scored = self._passes.forward_logprobs(self.policy, microbatches, length)
            for microbatch, (logp_T, _) in zip(microbatches, scored, strict=False):
                if keep_old:
                    self._old.keep(microbatch, logp_T)
                if self.ranks.reports:
                    mismatch.count(microbatch, logp_T, counted)
            if self._reference is not None:
                self._mark("reference")
                with self._reference.applied():
                    scored = self._passes.forward_logprobs(self.policy, microbatches, length)
                for microbatch, (logp_T, _) in zip(microbatches, scored, strict=False):
                    self._reference_logprobs.keep(microbatch, logp_T)
            if self.critic is not None:
                self._mark("values")
                self.critic.score(plan, microbatches, length, counted, self._token_rewards)
        self._mark("metrics")
        made = self.critic.finish() if self.critic is not None else {}
        return {**mismatch.metrics(), **made}

    def token_rewards(self) -> tuple[TokenNumbers, ...]:
        """What tokens of the batch that was scored are rewarded with, for a critic elsewhere."""
        return distant(self.critic).token_rewards()

    def take_advantages(self, given: Sequence[TokenNumbers]) -> None:
        """The advantages that a critic elsewhere made of the batch that was scored."""
        distant(self.critic).take_advantages(given)

    @measured("train")
    def step(self, minibatch: MinibatchPlan) -> dict[str, float]:
        """One optimizer step on one minibatch; returns its `loss/*` and other metrics.

        A critic's comes first, with `value/*`, and is the only one while it learns alone. Where a
        step was skipped, what is not finite is left out. Raises LearnerError, on every rank and
        before the weights change, where a needed log-prob was not scored or too many steps were
        skipped in a row; ShapeError and DataError as `score` does.
        """
        self.state.require("step")
        microbatches, length = self._pack(minibatch)
        scores = together(lambda: [self._scores(each) for each in microbatches], self.ranks.device)
        of_critic: dict[str, float] = {}
        if (critic := self.critic) is not None:
            packed = microbatches
            microbatches = together(lambda: critic.prepared(packed), self.ranks.device)
            self._mark("critic")
            of_critic = critic.step(microbatches, length, minibatch.num_loss_tokens)
            if critic.learns_alone:
                return of_critic
        self._mark("forward-backward")
        self.optimizer.clear()
        weights, num_tokens = LossWeights.of(self.config), minibatch.num_loss_tokens
        sums = self._passes.accumulate_gradients(
            self.policy, microbatches, length, scores, weights, num_tokens
        )
        sums = torch.cat([sums, token_counts(microbatches).to(sums.device)])
        if not self.ranks.reports:
            sums.zero_()
        dist.all_reduce(sums)
        *loss_sums, num_real, num_packed = sums.tolist()
        means = (each / num_tokens for each in loss_sums)
        total, policy, clipped, kl, entropy = means
        self._mark("optimizer")
        metrics = {
            "loss/total": total,
            "loss/policy": policy,
            "loss/clip_fraction": clipped,
            "entropy": entropy,
            "packing/efficiency": num_real / num_packed,
            **self.optimizer.step(),
        }
        if self._reference is not None:
            metrics["kl/mean"] = kl
        if metrics["optimizer/skipped_steps"]:
            metrics = {name: value for name, value in metrics.items() if math.isfinite(value)}
        return {**metrics, **of_critic}

    def logprobs(
        self,
        sequences: Sequence[tuple[Sequence[int], Sequence[int]]],
        temperature: float | None = None,
    ) -> list[list[float]]:
        """Log-probs of the responses of (prompt, response) pairs, at the sampling temperature
        unless one is given.

        Returned on every rank. Raises ShapeError where a sequence is longer than
        `learner.max_tokens_per_microbatch` or has no prompt.
        """
        self._require("logprobs")
        self._mark("forward")
        policy = (
            self.policy if temperature is None else replace(self.policy, temperature=temperature)
        )
        budget = self.config.learner.max_tokens_per_microbatch
        return self._sequence_logprobs(policy, sequences, budget, self.multiples)

    def probe_logprobs(self, tokens: Sequence[int]) -> tuple[float, ...]:
        """Log-probs of the tokens of a probe after its context, at temperature 1, amid a sync."""
        (found,) = self.logprobs(
            [(tokens[:PROBE_CONTEXT], tokens[PROBE_CONTEXT:])], temperature=1.0
        )
        self._mark("weight sync")
        return tuple(found)

    @measured("sync")
    def publish(self, version: int, servers: Sequence[ServerEndpoint]) -> SyncReport:
        """Send the weights as policy `version` to `servers`; the report counts on rank 0 only."""
        self._require("publish")
        if self._weight_sync is None:
            from megarl.learner.publishing import build_weight_sync

            self._weight_sync = build_weight_sync(
                self.config,
                self.shape,
                self.ranks,
                self.weights,
                self.shared_memory,
                self.probe_logprobs,
            )
        self._mark("weight sync")
        report = self._weight_sync.publish(version, list(servers))
        self.version = version
        return report or SyncReport(version, (), 0, 0, 0.0)

    def export(self, path: str) -> int:
        """Write the policy as Hugging Face folder `path`; returns its bytes. See `export`."""
        from megarl.learner.export import export

        self._require("export")
        self._mark("export")
        return export(self.config, self.shape, self.layout, self.ranks, self.weights, Path(path))

    def load(self, path: str) -> int:
        """Continue from folder `path`; returns its policy version. See `checkpoint.load`."""
        self._require("load")
        self._mark("load")
        self._old.clear()
        self._reference_logprobs.clear()
        if self.critic is not None:
            self.critic.clear()
        self.version = self._saving.load(path)
        return self.version

    def offload(self, parts: Sequence[str]) -> None:
        """Take `parts` of the state off the device. See `offload.LearnerState`."""
        self._mark("offload")
        self.state.gather_weights()
        self.state.offload(parts)
        self.meter.note("offloaded")

    def onload(self, parts: Sequence[str]) -> None:
        """Bring `parts` back, bit for bit."""
        self._mark("onload")
        self.state.onload(parts)

    def memory(self) -> dict[str, int]:
        """Bytes that the ranks take, by kind. See `offload.LearnerState.figures`."""
        return self.state.figures()

    def peaks(self) -> dict[str, int]:
        """`memory/*` of the phases since the last call. See `meter.MemoryMeter.take`."""
        return self.meter.take()

    def close(self) -> None:
        """Remove what would outlive this process: shared memory of weights and their sync."""
        if self._weight_sync is not None:
            self._weight_sync.close()
        if self.shared_memory is not None:
            self.shared_memory.close()

    @property
    def multiples(self) -> Multiples:
        """What microbatches and their sequences are padded to, for ranks to share them."""
        mesh, precision = self.ranks.mesh, self.config.learner.precision
        return Multiples.of(mesh, token_multiple(precision, mesh.tp, mesh.cp))

    def _require(self, verb: str) -> None:
        """See that what `verb` needs is here, and that the weights are whole."""
        self.state.require(verb)
        self.state.gather_weights()

    def _build_reference(self) -> ReferencePolicy | None:
        """The frozen model, where the KL term has a weight: the weights as they are, or others."""
        if self.config.kl.coef == 0:
            return None
        from megarl.learner.reference import build_reference

        self._mark("reference")
        return build_reference(self.config, self.layout, self.ranks, self.weights)

    def _token_rewards(self, microbatch: PackedMicrobatch) -> Tensor | None:
        """What its tokens are rewarded with besides their samples' rewards, [T] on the CPU."""
        return kl_rewards(self.config.kl, self._scores(microbatch))

    def _scores(self, microbatch: PackedMicrobatch) -> Scores:
        """What the loss compares with, on the device; nothing but on the last pipeline stage."""
        device = self.ranks.device
        old_T, reference_T = microbatch.behavior_logp_T, None
        if self.ranks.is_last_stage:
            if self.config.correction.old_logprobs == "recomputed":
                old_T = self._old.spread(microbatch)
            if self._reference is not None:
                reference_T = self._reference_logprobs.spread(microbatch).to(device)
        return self._passes.Scores(old_T.to(device), reference_T)

    def _pack(self, plan: MinibatchPlan) -> tuple[list[PackedMicrobatch], int]:
        """This rank's microbatches of `plan`; fails on every rank where it fails on one."""
        self._mark("reading")
        check_plan(plan, self.ranks.mesh.dp)
        return together(
            lambda: pack_minibatch(plan, self.ranks.dp_rank, self.multiples), self.ranks.device
        )
