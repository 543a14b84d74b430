"""Stage e, the experience buffer: holds finished groups until the learner takes them as one batch.

Owns admission: how old a sample may be, in policy versions read from its own version spans, and
which samples are left out before any statistic. Knows nothing of tokens on disk, losses or ranks.
"""

from __future__ import annotations

import logging
import math
from dataclasses import replace

from megarl.actor.flops import SequenceFlops
from megarl.buffer.batches import BatchShape, make_batch
from megarl.config.schema import Config
from megarl.errors import RolloutError, StalenessError
from megarl.types import Batch, Group, Sample, SampleRef

log = logging.getLogger(__name__)


class Buffer:
    """Groups waiting to be learned from, by a policy that takes `flops`.

    One controller owns it; it is not for several threads.
    """

    def __init__(self, config: Config, flops: SequenceFlops) -> None:
        self._shape = BatchShape.of(config, flops)
        self._overlong = config.learner.overlong_samples
        self._max_staleness = int(config.loop.max_staleness)
        self._groups: dict[str, tuple[SampleRef, ...]] = {}
        self._num_left_out = self._num_overlong = 0

    def add(self, group: Group, version: int) -> None:
        """Admit a group whose advantages are assigned, while the policy is at `version`.

        Raises StalenessError for a sample made by a version older than `loop.max_staleness`
        allows, or newer than `version`, and RolloutError for a group that is already here.
        """
        if group.group_id in self._groups:
            raise RolloutError(
                f"group {group.group_id} arrived twice; its samples would count twice"
            )
        usable = {i: sample for i, sample in enumerate(group.samples) if is_usable(sample)}
        refs = []
        for index, sample in usable.items():
            for span_version in {span.version for span in sample.version_spans}:
                self._admit(sample.sample_id, span_version, version)
            ref = self._within_budget(sample, sample_ref(group, index))
            refs += [] if ref is None else [ref]
        self._groups[group.group_id] = tuple(refs)
        self._num_overlong += len(usable) - len(refs)
        self._num_left_out += len(group.samples) - len(refs)

    def take(self, version: int) -> Batch:
        """Everything that waits, as one batch for the learner at `version`; the buffer is then
        empty.

        A batch of which every sample was left out has no minibatches. Raises StalenessError as
        `add` does, since `version` may have moved on, and ConfigError for a sample longer than a
        microbatch where `learner.overlong_samples` is "error".
        """
        for refs in self._groups.values():
            for ref in refs:
                self._admit(ref.sample_id, ref.version, version)
        batch = make_batch(list(self._groups.values()), version, self._shape)
        batch = replace(batch, num_overlong=self._num_overlong)
        if self._num_left_out or batch.num_truncated:
            log.info(
                "samples left out version=%d left_out=%d overlong=%d truncated=%d used=%d",
                version,
                self._num_left_out,
                batch.num_overlong,
                batch.num_truncated,
                batch.num_samples,
            )
        self._groups.clear()
        self._num_left_out = self._num_overlong = 0
        return batch

    def _within_budget(self, sample: Sample, ref: SampleRef) -> SampleRef | None:
        """The reference as `learner.overlong_samples` has it; None where it is left out.

        A sample is truncated at the end of its response, and left out where no loss token is left.
        """
        budget = self._shape.schedule.max_tokens
        if ref.num_tokens <= budget or self._overlong == "error":
            return ref
        num_response = max(0, budget - len(sample.prompt_ids))
        num_loss_tokens = sum(sample.loss_mask[:num_response])
        if self._overlong == "filter" or not num_loss_tokens:
            return None
        return replace(ref, num_tokens=budget, num_loss_tokens=num_loss_tokens, is_truncated=True)

    def _admit(self, sample_id: str, made_by: int, version: int) -> None:
        if made_by > version:
            raise StalenessError(
                f"sample {sample_id} was made by policy version {made_by}, but the learner is at "
                f"{version}; the versions of rollout servers and learner are out of step"
            )
        if version - made_by > self._max_staleness:
            raise StalenessError(
                f"sample {sample_id} was made by policy version {made_by}, "
                f"{version - made_by} behind the learner's {version}; "
                f"loop.max_staleness allows {self._max_staleness}"
            )


def is_usable(sample: Sample) -> bool:
    """Whether the learner can learn from a sample: it has an advantage and a loss token."""
    return sample.advantage is not None and sample.num_loss_tokens > 0


def sample_ref(group: Group, index: int) -> SampleRef:
    """Row `index` of a group by reference. The sample must be usable, and the group written."""
    sample = group.samples[index]
    assert group.path, f"group {group.group_id} has no file; the collector writes it"
    assert sample.advantage is not None and math.isfinite(sample.advantage), sample.sample_id
    return SampleRef(
        sample_id=sample.sample_id,
        path=group.path,
        index=index,
        num_tokens=sample.num_tokens,
        num_loss_tokens=sample.num_loss_tokens,
        advantage=sample.advantage,
        version=sample.oldest_version,
        is_cut=sample.finish_reason == "length",
    )
