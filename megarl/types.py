"""Values that cross a folder: prompts, samples, groups, batches by reference, servers, sync
reports.

Owns their shape and the rules that keep one sample's parts in step. Knows nothing of engines,
files or HTTP. Log-probs are natural logarithms; a policy version counts weight syncs from 0.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, field, replace
from typing import Literal
from urllib.parse import urlsplit

from megarl.errors import ShapeError

FinishReason = Literal["stop", "length", "abort"]
RewardState = Literal["value", "failed", "timeout"]


@dataclass(frozen=True, slots=True)
class Prompt:
    """One row of the prompt source, tokenized. `facts` is the row itself, for the reward."""

    prompt_id: str
    prompt_ids: tuple[int, ...]
    text: str
    answer: str
    facts: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class VersionSpan:
    """Response tokens [start, end) were sampled from policy version `version`."""

    start: int
    end: int
    version: int


@dataclass(frozen=True, slots=True)
class Reward:
    """A reward is a value, a failure or a timeout; never a silent 0.0."""

    state: RewardState
    value: float | None = None
    reason: str = ""

    def __post_init__(self) -> None:
        assert (self.value is not None) == (self.state == "value"), self


@dataclass(frozen=True, slots=True)
class Sample:
    """One response to one prompt. Its per-token parts are of one length; `extended` grows them."""

    sample_id: str
    group_id: str
    prompt_id: str
    prompt_ids: tuple[int, ...]
    response_ids: tuple[int, ...] = ()
    loss_mask: tuple[bool, ...] = ()
    behavior_logprobs: tuple[float, ...] = ()
    version_spans: tuple[VersionSpan, ...] = ()
    finish_reason: FinishReason = "abort"
    text: str = ""
    reward: Reward | None = None
    advantage: float | None = None

    def extended(
        self,
        token_ids: Sequence[int],
        logprobs: Sequence[float],
        version: int,
        trainable: bool = True,
    ) -> Sample:
        """This sample with more response tokens, all sampled (or inserted) at `version`.

        Raises ShapeError where the two sequences differ in length.

        >>> s = Sample("s", "g", "p", (1,)).extended([5, 6], [-0.5, -1.0], version=3)
        >>> s.response_ids, s.loss_mask, s.version_spans
        ((5, 6), (True, True), (VersionSpan(start=0, end=2, version=3),))
        >>> s.extended([7], [0.0], version=3, trainable=False).version_spans
        (VersionSpan(start=0, end=3, version=3),)
        """
        if len(token_ids) != len(logprobs):
            raise ShapeError(
                f"{self.sample_id}: {len(token_ids)} tokens with {len(logprobs)} log-probs; "
                "every token needs one"
            )
        start, end = len(self.response_ids), len(self.response_ids) + len(token_ids)
        spans = self.version_spans
        if end > start:
            if spans and spans[-1].version == version:
                spans = (*spans[:-1], replace(spans[-1], end=end))
            else:
                spans = (*spans, VersionSpan(start, end, version))
        return replace(
            self,
            response_ids=(*self.response_ids, *token_ids),
            loss_mask=(*self.loss_mask, *([trainable] * len(token_ids))),
            behavior_logprobs=(*self.behavior_logprobs, *logprobs),
            version_spans=spans,
        )

    @property
    def num_tokens(self) -> int:
        """Prompt and response tokens."""
        return len(self.prompt_ids) + len(self.response_ids)

    @property
    def num_loss_tokens(self) -> int:
        """Response tokens that the loss sees."""
        return sum(self.loss_mask)

    @property
    def oldest_version(self) -> int:
        """The oldest policy version that made any of its tokens. Needs at least one token."""
        return min(span.version for span in self.version_spans)


@dataclass(frozen=True, slots=True)
class Group:
    """G responses to one prompt. `path` is the file that the collector wrote its tokens to."""

    group_id: str
    prompt: Prompt
    samples: tuple[Sample, ...]
    path: str = ""


@dataclass(frozen=True, slots=True)
class SampleRef:
    """A sample by reference: row `index` of group file `path`, and what a schedule must know.

    Of a sample that `is_truncated` the learner sees the first `num_tokens` only. `is_cut` says that
    its response reached the longest length. Where advantages are of tokens, `advantage` is what
    they are made of: the reward.
    """

    sample_id: str
    path: str
    index: int
    num_tokens: int
    num_loss_tokens: int
    advantage: float
    version: int
    is_truncated: bool = False
    is_cut: bool = False


@dataclass(frozen=True, slots=True)
class MinibatchPlan:
    """One optimizer step's samples: `schedule[dp_rank][microbatch]` is a tuple of samples.

    Every data-parallel rank has the same number of microbatches; where samples run out, a
    microbatch is empty, and the learner fills it with tokens of weight zero. `microbatch_tokens`
    is the length of the longest microbatch, before the learner's own alignment. `num_loss_tokens`
    is the denominator of the token mean, over all ranks.
    """

    schedule: tuple[tuple[tuple[SampleRef, ...], ...], ...]
    microbatch_tokens: int
    num_loss_tokens: int


@dataclass(frozen=True, slots=True)
class Batch:
    """A rollout batch made ready for the learner: its optimizer steps in order, and its numbers.

    `worst_staleness` counts policy versions between a sample and the version that learns from it.
    `num_truncated` samples are cut at the token budget, `num_overlong` are left out because of it.
    `dp_imbalance` is the busiest data-parallel rank's estimated work over the mean, minus 1.
    """

    version: int
    minibatches: tuple[MinibatchPlan, ...]
    worst_staleness: int
    num_samples: int
    num_truncated: int = 0
    num_overlong: int = 0
    dp_imbalance: float = 0.0


@dataclass(frozen=True, slots=True)
class TokenNumbers:
    """A number for each loss token of a sample, in order: float32, little-endian."""

    sample_id: str
    data: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class CriticScores:
    """What a critic makes of a rollout batch: its numbers, and advantages of every sample."""

    metrics: dict[str, float]
    advantages: tuple[TokenNumbers, ...]


@dataclass(frozen=True, slots=True)
class ServerEndpoint:
    """A running rollout server. `incarnation` rises with each restart; `name` stays.

    Of its `tp` ranks `attention_dp` groups each hold the whole attention; the routed experts are in
    `ep` parts, each cut over tp / ep ranks. `nodes` and `gpus` say where each TP rank runs; without
    nodes it is the learner's first one, without GPUs no rank shares one with the learner.

    `api_key` opens generation and information, and nothing else; `admin_key` opens what changes or
    empties the server (weights, cache, pause, abort), and nothing else. Neither is printed.
    """

    name: str
    url: str
    tp: int
    incarnation: int
    api_key: str = field(default="", repr=False)
    admin_key: str = field(default="", repr=False)
    nodes: tuple[str, ...] = ()
    gpus: tuple[int, ...] = ()
    ep: int = 1
    attention_dp: int = 1


def is_loopback(url: str) -> bool:
    """Whether a URL's host is a machine as seen from itself only.

    >>> is_loopback("http://localhost:1"), is_loopback("http://10.0.0.7:30000")
    (True, False)
    """
    return (urlsplit(url).hostname or "").startswith(("127.", "localhost", "::1"))


@dataclass(frozen=True, slots=True)
class ServerSync:
    """What one server proved about one version.

    `is_lost`: it did not answer, or could not be stopped again, so that only a new start helps.
    `probe_max_abs_logprob` is the largest difference of the log-prob probe in nats, where there is
    one. `label`, where it is verified, is what the tokens of these weights carry: the version, a
    point, and what tells this publish from all others, of this learner and of any other.
    """

    server: str
    incarnation: int
    verified: bool
    error: str = ""
    is_lost: bool = False
    probe_max_abs_logprob: float | None = None
    label: str = ""


@dataclass(frozen=True, slots=True)
class SyncTimes:
    """Where the seconds of a sync went: in the slowest learner rank, and for the slowest server.

    `stage_s` is what servers wait for, `sums_s` the learner's checksums while they copy for
    `copy_s` and check for `check_s`; `verdict_s` is from a server's answer to the verdict on it.
    """

    stage_s: float = 0.0
    sums_s: float = 0.0
    copy_s: float = 0.0
    check_s: float = 0.0
    verdict_s: float = 0.0

    def plus(self, other: SyncTimes) -> SyncTimes:
        """Those of two attempts, one after the other.

        >>> SyncTimes(copy_s=1.0).plus(SyncTimes(copy_s=0.5, check_s=2.0)).copy_s
        1.5
        """
        pairs = zip(astuple(self), astuple(other), strict=True)
        return SyncTimes(*(mine + theirs for mine, theirs in pairs))


@dataclass(frozen=True, slots=True)
class QuantizationError:
    """What a sync lost to float8: relative errors (L2) of layers, `worst` naming the largest's.

    All empty where nothing was quantized.
    """

    largest: float = 0.0
    mean: float = 0.0
    worst: str = ""

    @classmethod
    def of(cls, layers: Mapping[str, float]) -> QuantizationError:
        """The summary of errors by layer.

        >>> QuantizationError.of({"model.layers.0": 0.02, "model.layers.1": 0.04})
        QuantizationError(largest=0.04, mean=0.03, worst='model.layers.1')
        """
        if not layers:
            return cls()
        worst = max(layers, key=lambda layer: layers[layer])
        return cls(layers[worst], sum(layers.values()) / len(layers), worst)


@dataclass(frozen=True, slots=True)
class SyncReport:
    """The result of publishing one version. Bytes are of payload, over all servers.

    `moved_bytes` are those that ranks of verified servers took, `minimum_bytes` those that all
    servers hold, `network_bytes` those that learner ranks sent to other nodes.
    """

    version: int
    servers: tuple[ServerSync, ...]
    moved_bytes: int
    minimum_bytes: int
    took_s: float
    network_bytes: int = 0
    quantization: QuantizationError = QuantizationError()
    times: SyncTimes = SyncTimes()
