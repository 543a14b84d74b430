"""Stage g from the learner's side: what `weight_sync` is told about this rank and its run.

Owns nothing but that translation. How weights travel and are proved is `weight_sync/`'s.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist
from torch import Tensor

from megarl.actor.shape import ModelShape
from megarl.config.bounds import probe_bound
from megarl.config.layouts import learner_forms, learner_pipeline
from megarl.config.schema import Config
from megarl.config.served import served_block, served_dtype
from megarl.config.server_arguments import server_mesh
from megarl.float8 import BlockScaling
from megarl.learner.addresses import listen_address
from megarl.learner.distributed import Ranks
from megarl.learner.shared_weights import run_id
from megarl.nodes import node_name
from megarl.weight_sync.control import SourceSpec
from megarl.weight_sync.modes import ModalSync, ModeSettings
from megarl.weight_sync.places import Place
from megarl.weight_sync.probe import Probe, probe_tokens
from megarl.weight_sync.session import WeightSync
from megarl.weight_sync.transport.arenas import Policy
from megarl.weight_sync.transport.shared import Arena

Logprobs = Callable[[Sequence[int]], tuple[float, ...]]
"""The log-probs of the tokens of a probe, in nats; collective."""

STAGING_S = 1800.0  # for ranks to wait for each other besides what deadline.sync_s bounds


def _arenas(config: Config) -> Policy:
    """A GPU that is shared in time needs its memory back; otherwise staging memory stays."""
    if config.weight_sync.gpu_arenas == "never":
        return "host"
    return "released" if config.placement.mode == "colocated" else "kept"


def build_weight_sync(
    config: Config,
    shape: ModelShape,
    ranks: Ranks,
    weights: Mapping[str, Tensor],
    shared_memory: Arena | None,
    logprobs: Logprobs,
) -> ModalSync:
    """This rank's half of stage g, over its live weights. Collective over all learner ranks.

    Its group is Gloo's, also on GPUs: an idle NCCL group would hold a device that a server needs.
    """
    on_cpu = ranks.device.type == "cpu"
    block = served_block(config)
    source = SourceSpec(
        shape,
        ranks.mesh,
        forms=learner_forms(config),
        pipeline=learner_pipeline(config, shape),
        float8=None if block is None else BlockScaling(*block),
    )
    dtype, timeout = served_dtype(config), config.deadline.sync_s + STAGING_S
    group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout))
    host, score = listen_address(), probe_of(config, shape, logprobs)
    exact = WeightSync(
        run_id=run_id(),
        source=source,
        rank=ranks.rank,
        parameters=weights,
        dtype=dtype,
        group=group,
        host=host,
        cpu_servers=on_cpu,
        server_mesh=replace(server_mesh(config, shape, on_cpu), pp=1, servers=1),
        deadline_s=config.deadline.sync_s,
        place=Place(node_name(os.environ), int(os.environ.get("LOCAL_RANK", "0"))),
        bucket_bytes=config.weight_sync.bucket_mib << 20,
        arenas=_arenas(config),
        memory=shared_memory,
        pause=config.weight_sync.pause,
        probe=score,
    )
    return ModalSync(
        exact,
        source,
        ranks.rank,
        weights,
        dtype,
        group=group,
        host=host,
        settings=mode_settings(config),
        score=score,
    )


def mode_settings(config: Config) -> ModeSettings:
    """What the run's settings say of the modes of a sync."""
    sync = config.weight_sync
    return ModeSettings(
        mode=sync.mode,
        hf_via=sync.hf_route,
        pause=sync.pause,
        deadline_s=config.deadline.sync_s,
        bucket_bytes=sync.bucket_mib << 20,
        disk=Path(sync.disk_dir).absolute() / config.run.name,
        model=Path(config.actor.model),
    )


def probe_of(config: Config, shape: ModelShape, logprobs: Logprobs) -> Callable[[], Probe] | None:
    """What scores the run's probe tokens with the live weights, collectively; None without any.

    There is none either where servers have given back their KV cache when they are synced.
    """
    tokens = probe_tokens(config.weight_sync.probe_tokens, shape.vocab_size, config.run.seed)
    if not tokens or config.placement.mode == "colocated":
        return None

    def score() -> Probe:
        return Probe(tokens, logprobs(tokens), probe_bound(config))

    return score
