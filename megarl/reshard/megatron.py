"""The layout of Megatron-Core's GPTModel over tensor, pipeline, context, data and expert ranks.

Owns Megatron's rules: interleaved grouped QKV, gated fc1, vocabulary padding, routed experts on
their own axes, and what each model chunk holds, copies of the embedding among it. Names are those
of the rank's `named_parameters()`, and `named_buffers()` for the router's expert bias, behind
`model<v>.` where a stage has several chunks.

Source: megatron-core 0.19.2, models/gpt, transformer/ and tensor_parallel/layers.py. The tests
build real GPTModels on the CPU and compare names, shapes, and logits with Hugging Face's models:
with the norms inside linears ("te") or beside them ("local"), with experts as weights of one module
("per_expert", moe_grouped_gemm) or as modules ("sequential"). "grouped" (moe_single_grouped_weight
besides) is built with stand-ins for Transformer Engine's classes, as is its own spec: names and
shapes inside TELinear and the grouped linears are from reading.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from megarl.actor.families import FAMILIES
from megarl.actor.families.family import Held
from megarl.actor.parameters import Block, Parameter, block_table
from megarl.actor.shape import ModelShape
from megarl.errors import LayoutError
from megarl.reshard.layout import BlockLayout, Layout, RankLayout, ShardedTensor, Site
from megarl.reshard.mesh import LearnerMesh
from megarl.reshard.pipeline import Chunk, Pipeline
from megarl.reshard.rules import Heads, cut_experts, cut_tensor

FORMS = ("te", "per_expert")
"""Those of a learner, with Transformer Engine and without."""

_ATTENTION_FORMS = ("te", "local")
_EXPERT_FORMS = ("per_expert", "grouped", "sequential")

UNSUPPORTED: Mapping[str, tuple[object, ...]] = {
    "moe_mlp_glu_interleave_size": (None,),
    "moe_shared_expert_glu_interleave_size": (None,),
    "use_kitchen": (False,),
    "moe_latent_size": (None,),
    "mla_down_proj_fusion": (False,),
    "mtp_use_repeated_layer": (False,),
    "heterogeneous_block_specs": (False,),
    "experimental_attention_variant": (None,),
    "is_hybrid_model": (False,),
    "softmax_type": ("vanilla", "off-by-one"),
    "add_bias_linear": (False,),
    "normalization": ("RMSNorm",),
    "layernorm_zero_centered_gamma": (False,),
    "moe_shared_expert_gate": (False,),
    "gtp_weight_remat_size": (1,),
    "expert_gtp_weight_remat_size": (1,),
    "tensor_parallel_num_weight_shards": (None,),
    "expert_tensor_parallel_num_weight_shards": (None,),
}
"""Fields of Megatron's TransformerConfig that change which elements a rank holds and where, or what
they mean, and the values under which this layout is right."""


def megatron_layout(
    shape: ModelShape,
    mesh: LearnerMesh,
    vocab_divisor: int = 128,
    pipeline: Pipeline | None = None,
    forms: tuple[str, ...] = FORMS,
) -> Layout:
    """All ranks of the learner; context- and data-parallel replicas hold the same.

    `vocab_divisor` is Megatron's make-vocab-size-divisible-by; `pipeline` None is the even split;
    `forms` are one form of attention and one of experts. Raises LayoutError where a size does not
    divide or the pipeline is another model's.
    """
    _check_forms(forms)
    check_divisible(shape, mesh)
    pipeline = _pipeline(shape, mesh, pipeline)
    cuts = _Cuts(shape, mesh, vocab_divisor, forms)
    table = block_table(shape)
    kinds = {kind: i for i, kind in enumerate(table.kinds)}
    templates = [cuts.block(kind, parameters) for kind, parameters in table.kinds.items()]
    if shape.tie_embeddings:
        templates.append(cuts.tied_head(table.kinds["embedding"]))
    sites: list[Site] = []
    for p, v, chunk in pipeline:
        prefix = f"model{v}." if pipeline.vpp > 1 else ""
        for number, template, layer in _held(table.blocks, kinds, pipeline, chunk):
            sites.append(Site(number, p, template, layer, prefix))
    return Layout(
        f"megatron tp={mesh.tp} pp={mesh.pp} vpp={pipeline.vpp} cp={mesh.cp} dp={mesh.dp} "
        f"ep={mesh.ep} etp={mesh.etp} vocab_divisor={vocab_divisor} forms={'+'.join(forms)}",
        table,
        tuple(templates),
        tuple(sorted(sites, key=lambda site: (site.block, site.stage, site.prefix))),
        tuple(mesh.stage(p) for p in range(mesh.pp)),
    )


def megatron_rank(
    shape: ModelShape,
    mesh: LearnerMesh,
    rank: int,
    vocab_divisor: int = 128,
    pipeline: Pipeline | None = None,
    forms: tuple[str, ...] = FORMS,
) -> RankLayout:
    """One rank of `megatron_layout`, written out."""
    mesh.coordinates(rank)
    return megatron_layout(shape, mesh, vocab_divisor, pipeline, forms).rank(rank)


def padded_vocab_size(vocab_size: int, tp: int, vocab_divisor: int = 128) -> int:
    """Rows of Megatron's embedding over all ranks: a multiple of vocab_divisor * tp.

    Raises LayoutError where `vocab_divisor` is below 1.

    >>> padded_vocab_size(50257, tp=2)
    50432
    """
    if vocab_divisor < 1:
        raise LayoutError(f"megatron: vocab_divisor is {vocab_divisor}; give a number from 1 up")
    unit = vocab_divisor * tp
    return (vocab_size + unit - 1) // unit * unit


def check_supported(transformer_config: Mapping[str, object]) -> None:
    """Raise LayoutError naming the fields of a TransformerConfig under which layouts differ.

    Absent fields are taken to be right, as Megatron's defaults are but for `normalization` of
    other attention than latent and `add_bias_linear`.
    """
    wrong = [
        f"{name}={transformer_config[name]!r} (use {' or '.join(repr(v) for v in right)})"
        for name, right in UNSUPPORTED.items()
        if name in transformer_config and transformer_config[name] not in right
    ]
    balancing = transformer_config.get("moe_router_load_balancing_type", "aux_loss")
    if "quantile_balancing" in (balancing if isinstance(balancing, list) else [balancing]):
        wrong.append("moe_router_load_balancing_type=quantile_balancing (it adds a buffer qb_beta)")
    if wrong:
        raise LayoutError(
            f"megatron: {', '.join(wrong)}: another layout of parameters than megarl knows"
        )


@dataclass(frozen=True, slots=True)
class Unsplit:
    """A size of a policy that does not split over an axis (tp, ep, etp), and what would do."""

    axis: str
    what: str
    remedy: str


def unsplit(shape: ModelShape, tp: int = 1, ep: int = 1, etp: int = 1) -> Iterator[Unsplit]:
    """The sizes that Megatron-Core cannot split over so many ranks; none where it can.

    Layers are not among them: a pipeline says how they are split. Source: megatron-core 0.19.2,
    TransformerConfig.__post_init__ and SelfAttention.__init__, which cuts the fused QKV's rows
    evenly, a head in the middle where tp exceeds the kv heads.
    """
    moe = shape.moe
    sizes: list[tuple[str, int, str, int]] = [("attention heads", shape.num_heads, "tp", tp)]
    if "dense" in shape.layer_kinds:
        sizes.append(("rows of the gate (intermediate_size)", shape.intermediate_size, "tp", tp))
    if moe is not None:
        inner = moe.expert_intermediate_size
        sizes += [
            ("experts", moe.num_experts, "ep", ep),
            ("rows of an expert's gate (moe_intermediate_size)", inner, "etp", etp),
            ("rows of the shared experts' gate", moe.shared_intermediate_size, "tp", tp),
        ]
    for name, size, axis, count in sizes:
        if size % count:
            article = "an" if axis[0] == "e" else "a"
            yield Unsplit(axis, f"{size} {name}", f"use {article} {axis} that divides {size}")
    if shape.mla is None:
        yield from _unsplit_groups(shape, tp)


def _unsplit_groups(shape: ModelShape, tp: int) -> Iterator[Unsplit]:
    """The fused QKV's groups: each on several ranks, or several on each."""
    groups = shape.num_kv_heads
    if groups % tp and tp % groups:
        remedy = f"use a tp that divides {groups}, or a multiple of it"
        yield Unsplit("tp", f"{groups} kv heads", remedy)
    gates = shape.num_heads if shape.attention_output_gate else 0
    rows = (shape.num_heads + gates + 2 * groups) * shape.head_dim
    if rows % tp:
        yield Unsplit("tp", f"{rows} rows of the fused qkv", f"use a tp that divides {groups}")


def check_divisible(shape: ModelShape, mesh: LearnerMesh) -> None:
    """Raise LayoutError naming the first size that Megatron cannot split over the mesh's ranks."""
    for found in unsplit(shape, mesh.tp, mesh.ep, mesh.etp):
        raise LayoutError(
            f"{found.what} do not split over learner.parallel.{found.axis}="
            f"{getattr(mesh, found.axis)}; {found.remedy}"
        )


def _check_forms(forms: tuple[str, ...]) -> None:
    for known in (_ATTENTION_FORMS, _EXPERT_FORMS):
        if sum(form in known for form in forms) != 1:
            raise LayoutError(f"megatron: forms {forms} must have one of {', '.join(known)}")
    unknown = set(forms) - {*_ATTENTION_FORMS, *_EXPERT_FORMS}
    if unknown:
        raise LayoutError(f"megatron: forms {sorted(unknown)} are unknown")


def _pipeline(shape: ModelShape, mesh: LearnerMesh, pipeline: Pipeline | None) -> Pipeline:
    """The given pipeline, or the even split, after a check against the model and the mesh."""
    if pipeline is None:
        return Pipeline.even(shape.num_layers, mesh.pp, mesh.vpp, num_mtp=shape.num_mtp_layers)
    for name, found, wanted in (
        ("decoder layers", pipeline.num_layers, shape.num_layers),
        ("MTP layers", pipeline.num_mtp, shape.num_mtp_layers),
        ("stages", pipeline.pp, mesh.pp),
        ("chunks in a stage", pipeline.vpp, mesh.vpp),
    ):
        if found != wanted:
            raise LayoutError(
                f"the pipeline has {found} {name}, the model and its mesh have {wanted}; give "
                "the pipeline of this model, and its pp and vpp to the mesh"
            )
    return pipeline


def _held(
    blocks: tuple[Block, ...], kinds: Mapping[str, int], pipeline: Pipeline, chunk: Chunk
) -> list[tuple[int, int, int | None]]:
    """(block, template, layer number in the chunk) of all that one model chunk holds.

    Besides its layers: MTP layers need the embedding, tied or not, so their chunk has a copy of it.
    A tied head is the embedding where the chunk has it; elsewhere it is a copy of its own. Where a
    chunk beyond the first has MTP layers and a tied head, its `output_layer.weight` exists but
    nothing reads or writes it (GPTModel._postprocess uses the embedding): it is left out.
    """
    held: list[tuple[int, int, int | None]] = []
    has_embedding = chunk.embedding or chunk.num_mtp > 0
    for number, block in enumerate(blocks):
        match block.kind:
            case "embedding":
                here, layer = has_embedding, None
            case "final_norm":
                here, layer = pipeline.has_final_norm(chunk), None
            case "head":
                here, layer = chunk.loss, None
            case "mtp":
                assert block.layer is not None
                here, layer = chunk.num_mtp > 0, block.layer - pipeline.num_layers
            case _:
                assert block.layer is not None
                here, layer = chunk.first <= block.layer < chunk.end, block.layer - chunk.first
        if here:
            held.append((number, kinds[block.kind], layer))
    if chunk.loss and "head" not in kinds and not has_embedding:
        held.append((0, len(kinds), None))  # the template behind those of the kinds
    return held


class _Cuts:
    """The local tensors of each kind of block over the ranks of a stage."""

    def __init__(
        self, shape: ModelShape, mesh: LearnerMesh, vocab_divisor: int, forms: tuple[str, ...]
    ) -> None:
        self.blocks = FAMILIES[shape.architecture].blocks
        self.heads = Heads(
            shape.num_heads, shape.num_kv_heads, shape.head_dim, shape.attention_output_gate
        )
        self.vocabulary_rows = (
            padded_vocab_size(shape.vocab_size, mesh.tp, vocab_divisor) // mesh.tp
        )
        self.everyone = (tuple(range(mesh.stage_size)),)
        self.dense, self.experts = mesh.dense_holders(), mesh.expert_holders()
        self.forms = frozenset(forms)

    def block(self, kind: str, parameters: tuple[Parameter, ...]) -> BlockLayout:
        """The template of a kind of block."""
        return self._template(kind, self.blocks[kind].megatron, parameters)

    def tied_head(self, parameters: tuple[Parameter, ...]) -> BlockLayout:
        """The embedding under the head's name."""
        head = self.blocks["head"].megatron[0]
        copy = Held(head.name, head.cut, ("embedding",), head.axis)
        return self._template("embedding", (copy,), parameters)

    def _template(
        self, kind: str, table: tuple[Held, ...], parameters: tuple[Parameter, ...]
    ) -> BlockLayout:
        known = {parameter.kind: parameter for parameter in parameters}
        tensors: list[ShardedTensor] = []
        for held in table:
            if not set(held.kinds) <= known.keys() or not self.forms.issuperset(held.forms):
                continue
            mine = [known[k] for k in held.kinds]
            if held.axis == "experts":
                tensors += cut_experts(held, mine, self.experts)
            else:
                holders = self.everyone if held.cut == "whole" else self.dense
                rows = self.vocabulary_rows
                tensors.append(cut_tensor(held, mine, holders, self.heads, rows))
        return BlockLayout(kind, tuple(tensors))
