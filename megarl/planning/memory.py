"""The most memory that each phase of a pass takes on a learner rank, predicted from the settings.

Owns what is on the device when, and what waits in host memory. Bytes of the state are `state.py`'s,
of activations `activations.py`'s. Pure: imports no torch and no engine.

The learner measures the same phases and logs both (docs/metrics.md).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from megarl.actor.shape import ModelShape
from megarl.config.fp8 import token_multiple
from megarl.config.layouts import (
    POLICY_BYTES,
    critic_layout,
    critic_shape,
    learner_mesh,
    learner_pipeline,
)
from megarl.config.optimizer import OptimizerConfig
from megarl.config.schema import Config
from megarl.config.served import served_dtype
from megarl.planning.activations import Cuts, Sizes
from megarl.planning.passes import (
    Head,
    Microbatch,
    Work,
    in_flight,
    policy_head,
    stage_work,
    value_head,
)
from megarl.planning.state import MAIN_BYTES, StateBytes, StateForm, state_bytes
from megarl.reshard.engine_tensors import learner_buffers
from megarl.reshard.layout import Layout, LocalTensor

Phase = Literal["score", "train", "sync", "offloaded"]
PHASES: tuple[Phase, ...] = ("score", "train", "sync", "offloaded")

FP8_BLOCK = 128  # rows and columns, of a frozen model in float8 (reference.storage)
PRECISE = ("embedding", "output_layer", "router", "norm")  # in names of what it keeps as it is


@dataclass(frozen=True, slots=True)
class HostBytes:
    """Host memory of one rank. `parked`: weights and optimizer state while they are offloaded;
    `frozen`: the reference; `swapped`: the policy besides, while a reference in float8 is in its
    place; `optimizer`: what of the optimizer's state is always there."""

    parked: int = 0
    frozen: int = 0
    swapped: int = 0
    optimizer: int = 0

    @property
    def total(self) -> int:
        """The most at one time: the policy is swapped out while nothing is offloaded."""
        return max(self.parked, self.swapped) + self.frozen + self.optimizer


@dataclass(frozen=True)
class RankMemory:
    """Bytes of one learner rank: the state of policy and critic, the forward and backward passes of
    each, and what is in host memory. `peaks` has the most on the device in each phase."""

    policy: StateBytes
    critic: StateBytes
    works: tuple[Work, ...]
    host: HostBytes
    peaks: dict[Phase, int]

    @property
    def state(self) -> StateBytes:
        """What is trained, the critic's with the policy's."""
        return self.policy + self.critic


def predict(
    config: Config, shape: ModelShape, layout: Layout, rank: int, on_cpu: bool
) -> RankMemory:
    """What `rank` of the learner with `layout` will take, at most, where microbatches are full.

    `shape` is the policy's, as it is trained. `sync` counts a staged copy of the weights, which not
    every rank needs. Left out are CUDA contexts, communicators, and what an allocator loses. Raises
    ModelError where the critic's checkpoint cannot be read.
    """
    microbatch = full_microbatch(config)
    held = layout.rank(rank).tensors
    buffers = learner_buffers(shape, layout, rank)
    parameters = [tensor for tensor in held if tensor.name not in buffers]
    policy = trained_bytes(config, config.learner.optimizer, shape, parameters, rank, on_cpu)
    works = [rank_work(config, shape, rank, microbatch, on_cpu)]
    critic, critic_parameters = StateBytes(), list[LocalTensor]()
    if config.has_critic and not config.critic_is_apart:
        other = critic_shape(config)
        critic_parameters = critic_tensors(config, other, rank)
        settings = config.critic.optimizer
        critic = trained_bytes(config, settings, other, critic_parameters, rank, on_cpu)
        works.append(rank_work(config, other, rank, microbatch, on_cpu, has_values=True))
    state = policy + critic
    gradient = _largest([*parameters, *critic_parameters]) * _element(config)
    colocated = config.placement.mode == "colocated"
    at_sync = policy.weights if colocated else state.total
    kept_away = colocated and config.placement.offload_learner_weights
    peaks: dict[Phase, int] = {
        "score": state.total + max(*(work.forward for work in works), _swap_bytes(config, held)),
        "train": state.total + gradient + max(work.backward for work in works),
        "sync": at_sync + _staged_bytes(config, held, on_cpu),
        "offloaded": 0 if kept_away else policy.weights,
    }
    host = HostBytes(
        parked=state.weights + state.optimizer if colocated else 0,
        frozen=0 if config.kl.coef == 0 else frozen_bytes(config, held, buffers),
        swapped=_swapped_bytes(config, held, buffers),
        optimizer=state.optimizer_host,
    )
    return RankMemory(policy, critic, tuple(works), host, peaks)


def predict_critic(config: Config, rank: int, on_cpu: bool) -> RankMemory:
    """What `rank` of a critic with ranks of its own will take, of their `critic_settings`, as
    `predict` says of the learner's. It is never offloaded, and is sent nowhere."""
    shape = critic_shape(config)
    parameters = critic_tensors(config, shape, rank)
    state = trained_bytes(config, config.critic.optimizer, shape, parameters, rank, on_cpu)
    work = rank_work(config, shape, rank, full_microbatch(config), on_cpu, has_values=True)
    gradient = _largest(parameters) * _element(config)
    peaks: dict[Phase, int] = {
        "score": state.total + work.forward,
        "train": state.total + gradient + work.backward,
    }
    host = HostBytes(optimizer=state.optimizer_host)
    return RankMemory(StateBytes(), state, (work,), host, peaks)


def full_microbatch(config: Config) -> Microbatch:
    """The largest one that the budget of tokens allows, each token with a loss."""
    mesh, learner = learner_mesh(config), config.learner
    multiple = token_multiple(learner.precision, mesh.tp, mesh.cp)
    unit = math.lcm(multiple, mesh.sequence_multiple)
    tokens = -(-learner.max_tokens_per_microbatch // unit) * unit // mesh.cp
    return Microbatch(tokens, tokens)


def trained_bytes(
    config: Config,
    optimizer: OptimizerConfig,
    shape: ModelShape,
    parameters: Iterable[LocalTensor],
    rank: int,
    on_cpu: bool,
) -> StateBytes:
    """Weights, gradients and optimizer state of a model that `rank` has these parameters of."""
    form = StateForm(
        weight_bytes=_element(config),
        overlap=config.learner.parallel.overlap_grad_reduce,
        tied=shape.tie_embeddings,
        on_cpu=on_cpu,
        offload=optimizer.offload_fraction,
    )
    return state_bytes(parameters, learner_mesh(config), rank, form)


def critic_tensors(config: Config, shape: ModelShape, rank: int) -> list[LocalTensor]:
    """The critic's parameters on one rank: its layers', and its output's on the last stage."""
    layout = critic_layout(config, shape)
    buffers = learner_buffers(shape, layout, rank)
    tensors = [t for t in layout.rank(rank).tensors if t.name not in buffers]
    mesh = learner_mesh(config)
    if rank >= mesh.size - mesh.stage_size:
        prefix = f"model{mesh.vpp - 1}." if mesh.vpp > 1 else ""
        tensors.append(LocalTensor(f"{prefix}output_layer.weight", (1, shape.hidden_size)))
        tensors.append(LocalTensor(f"{prefix}output_layer.bias", (1,)))
    return tensors


def rank_work(
    config: Config,
    shape: ModelShape,
    rank: int,
    microbatch: Microbatch,
    on_cpu: bool,
    has_values: bool = False,
) -> Work:
    """Forward and backward passes of `rank` over microbatches of that size; a critic's
    `has_values`."""
    mesh, parallel = learner_mesh(config), config.learner.parallel
    stage = rank // mesh.stage_size
    chunks = learner_pipeline(config, shape).chunks[stage]
    cuts = Cuts(
        tp=mesh.tp,
        sequence=mesh.tp if parallel.sequence_parallel else 1,
        cp=mesh.cp,
        ep=mesh.ep,
        etp=mesh.etp,
        fused=bool(config.learner.transformer_config.get("bias_activation_fusion")),
        local=on_cpu,
    )
    sizes = Sizes(shape, cuts, microbatch.tokens, _element(config))
    head = Head()
    if chunks[-1].loss:
        head = value_head(sizes) if has_values else policy_head(sizes, microbatch.predictions)
    waiting = in_flight(mesh.pp, len(chunks), stage, microbatch.count)
    return stage_work(sizes, chunks, config.learner.recompute, waiting, head, mesh.pp > 1)


def frozen_bytes(config: Config, held: Iterable[LocalTensor], buffers: Collection[str]) -> int:
    """Host memory of the reference on a rank that holds these tensors of the policy."""
    element, total = _element(config), 0
    for tensor in held:
        count = math.prod(tensor.shape)
        if tensor.name in buffers:
            total += count * MAIN_BYTES
        elif config.reference.storage == "policy" or _is_precise(tensor):
            total += count * element
        else:
            blocks = math.prod(-(-size // FP8_BLOCK) for size in tensor.shape)
            total += count + blocks * MAIN_BYTES
    return total


def _swapped_bytes(config: Config, held: Iterable[LocalTensor], buffers: Collection[str]) -> int:
    """The policy's tensors whose frozen ones are in float8."""
    if config.kl.coef == 0 or config.reference.storage != "fp8":
        return 0
    tensors = (tensor for tensor in held if tensor.name not in buffers and not _is_precise(tensor))
    return sum(math.prod(tensor.shape) for tensor in tensors) * _element(config)


def _is_precise(tensor: LocalTensor) -> bool:
    """Whether a frozen model keeps it as it is, in float8 too."""
    return len(tensor.shape) < 2 or any(word in tensor.name for word in PRECISE)


def _swap_bytes(config: Config, held: Sequence[LocalTensor]) -> int:
    """Device memory for exchanging policy and reference: of one tensor at a time.

    From float8 it goes through fp32, as blocks and as numbers, before it is the policy's type.
    """
    if config.kl.coef == 0:
        return 0
    through = 1 + 2 * MAIN_BYTES if config.reference.storage == "fp8" else 0
    return _largest(held) * (_element(config) + through)


def _staged_bytes(config: Config, held: Iterable[LocalTensor], on_cpu: bool) -> int:
    """Device memory for a copy of what is sent, and one message between nodes.

    Float8 and its copy for servers together are as much as bf16. On CPUs it is shared memory.
    """
    if on_cpu:
        return 0
    element = POLICY_BYTES[served_dtype(config)]
    sent = sum(math.prod(tensor.shape) for tensor in held) * element
    return sent + (config.weight_sync.bucket_mib << 20)


def _largest(tensors: Iterable[LocalTensor]) -> int:
    """Elements of the largest tensor."""
    return max((math.prod(tensor.shape) for tensor in tensors), default=0)


def _element(config: Config) -> int:
    return POLICY_BYTES[config.learner.precision.params]
