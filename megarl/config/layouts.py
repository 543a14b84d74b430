"""The two layouts that a run's settings describe, and where their ranks run.

Owns what settings mean as meshes, pipelines and layouts; the servers' mesh is in
`server_arguments.py`. Sizes that the model does not allow are named by the layouts, as LayoutError.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from megarl.actor.shape import ModelShape, read_shape
from megarl.config.schema import Config
from megarl.config.served import check_family, served_block, served_dtype
from megarl.config.server_arguments import server_mesh
from megarl.errors import LayoutError
from megarl.reshard.layout import Layout
from megarl.reshard.megatron import check_supported, megatron_layout
from megarl.reshard.mesh import LearnerMesh, ServerMesh
from megarl.reshard.pipeline import Pipeline
from megarl.reshard.placement import Placement
from megarl.reshard.precision import Decisions, with_fp8
from megarl.reshard.sglang import sglang_layout

POLICY_BYTES = {"fp32": 4, "bf16": 2}


@dataclass(frozen=True)
class RunLayouts:
    """What to plan: `make_plan(source, destination, placement, policy_bytes)`.

    `decisions` say which float8 weights are quantized before and which after the wire.
    """

    shape: ModelShape
    learner: LearnerMesh
    server: ServerMesh
    source: Layout
    destination: Layout
    placement: Placement
    policy_bytes: int
    decisions: Decisions


def run_layouts(config: Config, gpus_per_node: int = 8) -> RunLayouts:
    """The layouts of a run on nodes of so many GPUs, made from `actor.model`'s config.json alone.

    `launch.device` = auto is taken as GPUs, so that a login node says what a cluster does. Raises
    ModelError where the model cannot be read and LayoutError where it cannot be laid out so.
    """
    shape = read_shape(config.actor.model)
    learner, server = learner_mesh(config), server_mesh(config, shape)
    fields = config.learner.transformer_config
    check_supported(fields)
    source = learner_layout(config, shape)
    decisions: Decisions = {}
    block = served_block(config)
    if block is not None:
        check_family(shape)
        precisions = with_fp8(source, sglang_layout(shape, server, block), block)
        source, destination = precisions.source, precisions.destination
        decisions = precisions.decisions
    else:
        destination = sglang_layout(shape, server)
    return RunLayouts(
        shape,
        learner,
        server,
        source,
        destination,
        _placement(config, source, destination, gpus_per_node),
        POLICY_BYTES[served_dtype(config)],
        decisions,
    )


def trained_shape(shape: ModelShape) -> ModelShape:
    """The policy that a learner holds: the model without layers for multi-token prediction.

    They are a draft for decoding, and no log-prob of the policy depends on them: a learner neither
    loads, trains nor publishes them.
    """
    return replace(shape, num_mtp_layers=0)


def learner_layout(config: Config, shape: ModelShape) -> Layout:
    """What each rank of the learner holds of `shape`. Raises LayoutError where it does not split.

    On CPUs and on GPUs alike: names and shapes are Transformer Engine's.
    """
    return megatron_layout(
        shape,
        learner_mesh(config),
        pipeline=learner_pipeline(config, shape),
        forms=learner_forms(config),
    )


def critic_settings(config: Config) -> Config:
    """The settings as ranks of the critic's own take them: its layout is the learner's there."""
    learner = config.learner.model_copy(update={"parallel": config.critic.parallel})
    placement = config.placement.model_copy(update={"learner_gpus": config.critic.gpus})
    return config.model_copy(update={"learner": learner, "placement": placement})


def critic_shape(config: Config) -> ModelShape:
    """The critic's layers. Raises ModelError where their checkpoint's config.json cannot be read.

    Its output is of its own, so that its embedding is tied to nothing.
    """
    return replace(trained_shape(read_shape(config.critic_model)), tie_embeddings=False)


def critic_layout(config: Config, shape: ModelShape) -> Layout:
    """What each learner rank holds of the critic but for its output: no language model's head.

    Of a critic with ranks of its own it is that of `critic_settings`.
    """
    layout = learner_layout(config, shape)
    table = layout.table
    *blocks, head = table.blocks
    assert head.kind == "head", "a trained model without tied embeddings ends in its head"
    kinds = {kind: parameters for kind, parameters in table.kinds.items() if kind != head.kind}
    return replace(
        layout,
        kind=f"critic, {layout.kind}",
        table=replace(table, blocks=tuple(blocks), kinds=kinds),
        sites=tuple(site for site in layout.sites if site.block < len(blocks)),
    )


def learner_mesh(config: Config) -> LearnerMesh:
    """The learner's ranks."""
    parallel = config.learner.parallel
    return LearnerMesh(
        tp=parallel.tp,
        pp=parallel.pp,
        dp=config.data_parallel,
        cp=parallel.cp,
        ep=parallel.ep,
        etp=parallel.etp,
        vpp=parallel.vpp,
    )


def learner_pipeline(config: Config, shape: ModelShape) -> Pipeline:
    """Which layers each pipeline stage of the learner has. LayoutError names the setting."""
    parallel = config.learner.parallel
    name = "first_stage_layers, last_stage_layers" if not parallel.even else "pp"
    try:
        return _pipeline(config, shape)
    except LayoutError as error:
        name = "pipeline_layout" if parallel.pipeline_layout else name
        raise LayoutError(f"learner.parallel.{name}: {error}") from error


def _pipeline(config: Config, shape: ModelShape) -> Pipeline:
    parallel, fields = config.learner.parallel, config.learner.transformer_config
    if parallel.pipeline_layout:
        return Pipeline.from_layout(parallel.pipeline_layout, parallel.pp)
    if not parallel.even:
        return Pipeline.uneven(
            shape.num_layers,
            parallel.pp,
            parallel.first_stage_layers or None,
            parallel.last_stage_layers or None,
            parallel.vpp,
            num_mtp=shape.num_mtp_layers,
        )
    return Pipeline.even(
        shape.num_layers,
        parallel.pp,
        parallel.vpp,
        num_mtp=shape.num_mtp_layers,
        embedding_counts=bool(fields.get("account_for_embedding_in_pipeline_split")),
        loss_counts=bool(fields.get("account_for_loss_in_pipeline_split")),
    )


def learner_forms(config: Config) -> tuple[str, ...]:
    """How the learner holds attention and experts."""
    fields = config.learner.transformer_config
    if fields.get("moe_single_grouped_weight"):
        return ("te", "grouped")
    return ("te", "sequential" if fields.get("moe_grouped_gemm") is False else "per_expert")


def _placement(
    config: Config, source: Layout, destination: Layout, gpus_per_node: int
) -> Placement:
    if config.placement.mode == "colocated":
        return Placement.together(source, destination, gpus_per_node)
    if config.launch.device == "cpu":
        return Placement.one_node(source, destination)
    return Placement.apart(source, destination, gpus_per_node)
