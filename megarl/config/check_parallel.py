"""Parallel sizes against each other, and which of them a run cannot do yet.

Owns the arithmetic of ranks and the refusals of what only `megarl reshard explain` plans so far.
What SGLang's own arguments do to a layout is in `server_arguments.py`.
Which sizes of a model divide is the layouts' to say (`reshard/`); `check_model.py` asks them.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator

from megarl.actor.model_shape import Yarn
from megarl.actor.shape import ModelShape, read_shape
from megarl.config.capability import check_mode
from megarl.config.check_model import rollout_faults, uses_cpu
from megarl.config.schema import Config
from megarl.config.served import served_block
from megarl.config.server_arguments import argument_violations, server_mesh
from megarl.config.transformer_fields import field_violations
from megarl.config.violation import Violation
from megarl.errors import LayoutError, ModelError
from megarl.reshard.mesh import MAX_RANKS
from megarl.reshard.sglang import sglang_layout

PLANNED = "`megarl reshard explain` plans it"
COUNTED_ENDS = ("account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split")
SERVED = "SGLang's update call does not tell the ranks of pipeline stages apart"


def check_layout(config: Config) -> list[Violation]:
    """What keeps `config` from being laid out, with the model's config.json read but no weights.

    Sizes that do not divide the model are not among it: the layouts name them when they are made.
    """
    found: list[Violation] = []
    shape = None
    try:
        shape = read_shape(config.actor.model)
    except ModelError as error:
        found.append(Violation(str(error), ("actor.model",)))
    found += check_ranks(config)
    found += argument_violations(config, shape, os.environ)
    name = "learner.transformer_config"
    found += [
        Violation(text, (name,)) for text in field_violations(config.learner.transformer_config)
    ]
    return found


def check_ranks(config: Config) -> Iterator[Violation]:
    """How many ranks there are, and the ways to say which layers a pipeline stage has."""
    too_many = list(_too_many(config))
    yield from too_many
    if not too_many:
        yield from _replicas(config)
    yield from _pipeline(config)
    yield from _servers(config)


def check_servers(config: Config, shape: ModelShape | None) -> Iterator[Violation]:
    """What keeps servers of a run from holding the policy in a layout that the weight sync knows.

    `shape` is None where the model cannot be read; what depends on it is then not checked.
    """
    found = list(argument_violations(config, shape, os.environ))
    yield from found
    if shape is not None:
        yield from check_mode(config, shape.architecture, "cpu" if uses_cpu(config) else "cuda")
    if found or shape is None or any(_servers(config)) or rollout_faults(config, shape):
        return  # said already, or by `check_shape`
    if uses_cpu(config) and shape.mla is not None and not isinstance(shape.rope_scaling, Yarn):
        yield Violation(
            f"{config.actor.model}: SGLang serves latent attention on a CPU with yarn positions "
            "only, and its config.json has none (rope_scaling); use a GPU, or a model that has",
            ("actor.model",),
        )
    try:
        sglang_layout(shape, server_mesh(config, shape, uses_cpu(config)), served_block(config))
    except LayoutError as error:
        names = ("tp", "ep", "attention_dp")
        text = f"rollout.parallel.tp, ep, attention_dp: {error}"
        yield Violation(text, tuple(f"rollout.parallel.{name}" for name in names))


def _too_many(config: Config) -> Iterator[Violation]:
    """Sides of more ranks than are laid out, in words before anything is made of them."""
    learner, rollout = config.learner.parallel, config.rollout
    sides = [
        {f"learner.parallel.{name}": getattr(learner, name) for name in ("tp", "pp", "cp")},
        {
            "rollout.servers": rollout.servers,
            **{
                f"rollout.parallel.{name}": getattr(rollout.parallel, name) for name in ("tp", "pp")
            },
        },
    ]
    if config.placement.learner_gpus:
        sides.append({"placement.learner_gpus": config.placement.learner_gpus})
    for sizes in sides:
        ranks = math.prod(sizes.values())
        if ranks > MAX_RANKS:
            words = " = ".join((" x ".join(sizes), " x ".join(map(str, sizes.values()))))
            total = f" = {ranks}" if len(sizes) > 1 else ""
            yield Violation(
                f"{words}{total}: megarl lays out {MAX_RANKS} ranks of a side at most; use fewer",
                tuple(sizes),
            )


def _replicas(config: Config) -> Iterator[Violation]:
    """The learner's ranks are whole replicas, and their experts' axes divide them."""
    parallel, processes = config.learner.parallel, config.placement.learner_gpus
    names = ["tp", "pp", "cp"] if parallel.cp > 1 else ["tp", "pp"]
    sizes = [getattr(parallel, name) for name in names]
    settings = tuple(f"learner.parallel.{name}" for name in names)
    ranks = parallel.num_ranks
    if processes % ranks:
        nearest = -(-processes // ranks) * ranks
        yield Violation(
            f"placement.learner_gpus = {processes} is no multiple of {' x '.join(settings)} = "
            f"{' x '.join(str(size) for size in sizes)} = {ranks}; "
            f"use {nearest}, or 0 for one data-parallel rank",
            ("placement.learner_gpus", *settings),
        )
    else:
        yield from _experts(config)


def _pipeline(config: Config) -> Iterator[Violation]:
    """Ways to say which layers a pipeline stage has, of which Megatron takes one."""
    parallel = config.learner.parallel
    ends = ("first_stage_layers", "last_stage_layers")
    given = [f"learner.parallel.{end}" for end in ends if getattr(parallel, end)]
    if parallel.pipeline_layout and given:
        yield Violation(
            f"learner.parallel.pipeline_layout already says how many layers each stage has; "
            f"remove it, or {' and '.join(given)}",
            ("learner.parallel.pipeline_layout", *given),
        )
    if parallel.pipeline_layout:
        given.append("learner.parallel.pipeline_layout")
    fields = config.learner.transformer_config
    for field in COUNTED_ENDS:
        if given and fields.get(field):
            yield Violation(
                f"learner.transformer_config.{field} = true beside {' and '.join(given)}: Megatron "
                "counts an end as a layer only where all stages have the same number; remove one",
                ("learner.transformer_config", *given),
            )


def _experts(config: Config) -> Iterator[Violation]:
    parallel = config.learner.parallel
    stage = config.learner_processes // parallel.pp
    shards = parallel.ep * parallel.etp
    if stage % shards:
        yield Violation(
            f"learner.parallel.ep x learner.parallel.etp = {parallel.ep} x {parallel.etp} = "
            f"{shards} does not divide the {stage} ranks of a pipeline stage (tp x cp x dp); use "
            "sizes that do, or other placement.learner_gpus",
            ("learner.parallel.ep", "learner.parallel.etp", "placement.learner_gpus"),
        )


def _servers(config: Config) -> Iterator[Violation]:
    parallel = config.rollout.parallel
    for name in ("ep", "attention_dp"):
        size = getattr(parallel, name)
        if parallel.tp % size:
            yield Violation(
                f"rollout.parallel.{name} = {size} does not divide rollout.parallel.tp = "
                f"{parallel.tp}; use one that does",
                (f"rollout.parallel.{name}", "rollout.parallel.tp"),
            )


def check_runnable(config: Config) -> Iterator[Violation]:
    """What can be laid out and planned, but not be trained or served yet."""
    stages = config.rollout.parallel.pp
    if stages > 1:
        yield Violation(
            f"rollout.parallel.pp = {stages}: {SERVED} as yet; use 1 ({PLANNED})",
            ("rollout.parallel.pp",),
        )
    if config.placement.mode == "colocated":
        yield from _colocated(config)


def _colocated(config: Config) -> Iterator[Violation]:
    """Each server rank needs the GPU of a learner rank, and a replica of servers their node."""
    servers, ranks = config.rollout.servers, config.rollout.parallel.num_ranks
    if servers * ranks > config.learner_processes:
        yield Violation(
            f"placement.mode = colocated: {servers} servers x {ranks} ranks = {servers * ranks} "
            f"server ranks share the GPUs of {config.learner_processes} learner ranks; use fewer "
            "servers, a smaller rollout.parallel.tp, or more placement.learner_gpus",
            (
                "placement.mode",
                "placement.learner_gpus",
                "rollout.servers",
                "rollout.parallel.tp",
            ),
        )
