"""The policies, meshes and pipelines that are built as real GPTModels, on two or four ranks."""

from __future__ import annotations

from dataclasses import dataclass, replace

from megarl.actor.shape import Llama3Rope, ModelShape
from megarl.reshard.layout import Layout
from megarl.reshard.megatron import megatron_layout
from megarl.reshard.mesh import LearnerMesh
from megarl.reshard.pipeline import Pipeline
from tests.reshard.models import TINY_EXPERTS, TINY_LATENT, tiny_shape

VOCAB_DIVISOR = 8
TOKENS = [[1, 5, 99, 3, 0, 42, 17], [64, 63, 2, 2, 88, 50, 7]]

FULL_RANK_LATENT = replace(TINY_LATENT, q_lora_rank=None)

FUSED, LOCAL = ("te", "per_expert"), ("local", "sequential")
"""Forms of the CPU's block: the learner's, which are Transformer Engine's, and Megatron's local."""


@dataclass(frozen=True)
class Case:
    """One model in one layout; `stubs`: with stand-ins for Transformer Engine's classes."""

    shape: ModelShape
    mesh: LearnerMesh
    forms: tuple[str, str] = FUSED
    written: str = ""
    first: int | None = None
    stubs: bool = False

    @property
    def pipeline(self) -> Pipeline:
        """As written out, or uneven, or even."""
        layers, mtp = self.shape.num_layers, self.shape.num_mtp_layers
        pp, vpp = self.mesh.pp, self.mesh.vpp
        if self.written:
            return Pipeline.from_layout(self.written, pp)
        if self.first is not None:
            return Pipeline.uneven(layers, pp, self.first, vpp=vpp, num_mtp=mtp)
        return Pipeline.even(layers, pp, vpp, num_mtp=mtp)

    @property
    def layout(self) -> Layout:
        """The layout under test."""
        return megatron_layout(self.shape, self.mesh, VOCAB_DIVISOR, self.pipeline, self.forms)

    @property
    def name(self) -> str:
        """For test ids."""
        mesh = ",".join(f"{axis}{n}" for axis, n in vars_of(self.mesh) if n > 1)
        extra = [self.written, "+".join(self.forms) if self.forms != FUSED else ""]
        tied = "tied" if self.shape.tie_embeddings else ""
        parts = [self.shape.architecture.removesuffix("ForCausalLM"), mesh, tied, *extra]
        return "-".join(part for part in parts if part)


def vars_of(mesh: LearnerMesh) -> list[tuple[str, int]]:
    return [(axis, getattr(mesh, axis)) for axis in ("tp", "pp", "vpp", "dp", "ep", "etp")]


def glm(num_layers: int = 3, **changes: object) -> ModelShape:
    """GLM-4.5: one dense layer, then experts and a shared one; half of each head is rotated."""
    return tiny_shape(
        "Glm4MoeForCausalLM",
        num_layers=num_layers,
        head_dim=8,
        rotary_fraction=0.5,
        **changes,
    )


def deepseek(**changes: object) -> ModelShape:
    """DeepSeek-V3: latent attention, 8 experts in 2 groups."""
    moe = replace(TINY_EXPERTS, num_experts=8, num_groups=2, groups_per_token=1, scaling=2.5)
    return tiny_shape("DeepseekV3ForCausalLM", **{"num_layers": 3, "moe": moe, **changes})


def qwen(**changes: object) -> ModelShape:
    """Qwen3-MoE: experts in every layer, no shared one."""
    return tiny_shape("Qwen3MoeForCausalLM", **changes)


DENSE = [
    # Each family; tp within and above the kv heads; tied and untied over stages.
    Case(
        # Wavelengths below, within and above the scaled range.
        tiny_shape(
            "LlamaForCausalLM", head_dim=8, rope_theta=500000.0, rope_scaling=Llama3Rope(32.0)
        ),
        LearnerMesh(dp=2),
    ),
    Case(tiny_shape("LlamaForCausalLM", tie_embeddings=True), LearnerMesh(tp=2)),
    Case(tiny_shape("Qwen2ForCausalLM", head_dim=2), LearnerMesh(tp=2)),
    Case(tiny_shape("Qwen2ForCausalLM", head_dim=2, num_kv_heads=1), LearnerMesh(tp=2)),
    Case(tiny_shape("Qwen3ForCausalLM"), LearnerMesh(pp=2)),
    Case(tiny_shape("Qwen3ForCausalLM", tie_embeddings=True), LearnerMesh(pp=2)),
    Case(tiny_shape("Qwen3ForCausalLM", tie_embeddings=True), LearnerMesh(dp=2)),
    Case(tiny_shape("Qwen3ForCausalLM"), LearnerMesh(tp=2), LOCAL),
    Case(
        tiny_shape("Qwen3ForCausalLM", num_layers=4, tie_embeddings=True), LearnerMesh(pp=2, vpp=2)
    ),
    Case(tiny_shape("Qwen3ForCausalLM", num_layers=3), LearnerMesh(pp=2), first=1),
]

EXPERTS = [
    Case(qwen(), LearnerMesh(dp=2, ep=2)),
    Case(qwen(), LearnerMesh(tp=2, etp=2)),
    Case(qwen(), LearnerMesh(tp=2, ep=2)),
    Case(qwen(), LearnerMesh(tp=2, ep=2), ("te", "sequential")),
    Case(qwen(num_layers=4), LearnerMesh(pp=2, vpp=2), LOCAL),
    Case(glm(), LearnerMesh(tp=2, etp=2)),
    Case(glm(num_mtp_layers=1), LearnerMesh(dp=2, ep=2)),
    Case(glm(num_mtp_layers=1), LearnerMesh(pp=2), first=1),
    Case(glm(num_mtp_layers=1, tie_embeddings=True), LearnerMesh(pp=2), written="Ett|tmL"),
    Case(glm(4, num_mtp_layers=1), LearnerMesh(pp=2, vpp=2), written="Et|t|t|tmL"),
    Case(deepseek(), LearnerMesh(tp=2, ep=2)),
    Case(deepseek(), LearnerMesh(tp=2, ep=2), LOCAL),
    Case(deepseek(num_mtp_layers=1), LearnerMesh(tp=2, etp=2)),
    Case(deepseek(mla=FULL_RANK_LATENT), LearnerMesh(tp=2, ep=2)),  # as Moonlight
    Case(deepseek(mla=FULL_RANK_LATENT), LearnerMesh(tp=2, ep=2), LOCAL),
    Case(deepseek(mla=FULL_RANK_LATENT), LearnerMesh(pp=2), first=1),
    Case(deepseek(num_mtp_layers=1), LearnerMesh(pp=2), written="Et|ttmL"),
]

# The learner's block with Transformer Engine, Megatron's own spec, with stand-ins for its classes.
STAND_INS = [
    Case(qwen(), LearnerMesh(tp=2, ep=2), stubs=True),
    Case(glm(num_mtp_layers=1), LearnerMesh(dp=2, ep=2), stubs=True),
    Case(deepseek(num_mtp_layers=1), LearnerMesh(tp=2, etp=2), stubs=True),
    Case(deepseek(mla=FULL_RANK_LATENT), LearnerMesh(tp=2, ep=2), stubs=True),
    Case(deepseek(), LearnerMesh(tp=2, ep=2), ("te", "grouped"), stubs=True),
]

# On four ranks: both kinds of expert parallelism, tp above the kv heads, and MTP on its own.
FOUR = [
    Case(tiny_shape("Qwen3ForCausalLM"), LearnerMesh(tp=4)),
    Case(qwen(), LearnerMesh(tp=2, dp=2, ep=2, etp=2)),
    Case(deepseek(num_mtp_layers=1), LearnerMesh(tp=2, pp=2, ep=2), written="Ett|tmL"),
    Case(glm(num_mtp_layers=1, tie_embeddings=True), LearnerMesh(pp=4), written="Et|tt|m|L"),
]

CASES: dict[int, list[Case]] = {2: DENSE + EXPERTS + STAND_INS, 4: FOUR}
"""By the number of ranks; those with stand-ins last, as they stay."""
