"""The two layouts that a run's settings describe, and where their ranks run.

Owns what settings mean as meshes, pipelines and layouts, SGLang's own arguments among them. The
sizes that the model does not allow are named by the layouts, as LayoutError.
"""

from __future__ import annotations

from dataclasses import dataclass

from megarl.actor.shape import ModelShape, read_shape
from megarl.config.check_parallel import NO_ALL_TO_ALL
from megarl.config.schema import Config
from megarl.reshard.layout import Layout
from megarl.reshard.megatron import check_supported, megatron_layout
from megarl.reshard.mesh import LearnerMesh, ServerMesh
from megarl.reshard.pipeline import Pipeline
from megarl.reshard.placement import Placement
from megarl.reshard.precision import Decisions, with_fp8
from megarl.reshard.sglang import sglang_layout

POLICY_BYTES = {"fp32": 4, "bf16": 2}

# By how many routed experts a DeepSeek-V3 has, SGLang puts its shared expert into one more slot.
FUSED_EXPERTS = 256  # shared_experts_fusion_disable_reason, sglang 0.5.23 models/deepseek_v2.py


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
    source = megatron_layout(
        shape, learner, pipeline=learner_pipeline(config, shape), forms=_forms(config)
    )
    decisions: Decisions = {}
    if config.rollout.precision.weights == "fp8":
        block = (config.rollout.precision.fp8_block,) * 2
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
        POLICY_BYTES[config.learner.precision.params],
        decisions,
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
    """Which layers each pipeline stage of the learner has."""
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


def server_mesh(config: Config, shape: ModelShape) -> ServerMesh:
    """The servers' ranks, with what SGLang's arguments do to their layout."""
    parallel, arguments = config.rollout.parallel, config.rollout.engine_args
    return ServerMesh(
        tp=parallel.tp,
        cpu=config.launch.device == "cpu",
        ep=parallel.ep,
        attention_dp=parallel.attention_dp,
        pp=parallel.pp,
        servers=config.rollout.servers,
        dp_head=bool(arguments.get("enable_dp_lm_head")),
        dense_whole=arguments.get("moe_dense_tp_size") == 1,
        shared_whole=_all_to_all(config),
        fused_shared_experts=_fuses(config, shape),
    )


def _all_to_all(config: Config) -> bool:
    return config.rollout.engine_args.get("moe_a2a_backend", NO_ALL_TO_ALL) != NO_ALL_TO_ALL


def _fuses(config: Config, shape: ModelShape) -> bool:
    """Whether SGLang puts the shared expert into a slot behind the routed ones.

    Source: shared_experts_fusion_disable_reason in sglang 0.5.23, models/deepseek_v2.py and
    models/glm4_moe.py, on NVIDIA GPUs.
    """
    arguments, moe = config.rollout.engine_args, shape.moe
    if arguments.get("disable_shared_experts_fusion") or config.launch.device == "cpu":
        return False
    if arguments.get("enforce_shared_experts_fusion"):
        return True
    if moe is None or moe.shared_intermediate_size != moe.expert_intermediate_size:
        return False
    if config.rollout.parallel.ep > 1 or _all_to_all(config):
        return False
    if shape.architecture == "DeepseekV3ForCausalLM":
        return moe.num_experts == FUSED_EXPERTS
    return shape.architecture == "Glm4MoeForCausalLM"


def _forms(config: Config) -> tuple[str, ...]:
    """How the learner holds attention and experts."""
    fields = config.learner.transformer_config
    if fields.get("moe_single_grouped_weight"):
        return ("te", "grouped")
    alone = fields.get("moe_grouped_gemm") is False or config.launch.device == "cpu"
    return ("te", "sequential" if alone else "per_expert")


def _placement(
    config: Config, source: Layout, destination: Layout, gpus_per_node: int
) -> Placement:
    if config.placement.mode == "colocated":
        return Placement.together(source, destination, gpus_per_node)
    if config.launch.device == "cpu":
        return Placement.one_node(source, destination)
    return Placement.apart(source, destination, gpus_per_node)
