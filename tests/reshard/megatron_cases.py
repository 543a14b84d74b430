"""The policies and meshes that are built as real GPTModels on two ranks."""

from __future__ import annotations

from megarl.actor.shape import Llama3Rope, ModelShape
from megarl.reshard.mesh import LearnerMesh
from tests.reshard.models import tiny_shape

VOCAB_DIVISOR = 8
TOKENS = [[1, 5, 99, 3, 0, 42, 17], [64, 63, 2, 2, 88, 50, 7]]

# Each family; tp within and above the kv heads; tied and untied over stages.
CASES: list[tuple[ModelShape, LearnerMesh]] = [
    (
        # Wavelengths below, within and above the scaled range.
        tiny_shape(
            "LlamaForCausalLM", head_dim=8, rope_theta=500000.0, rope_scaling=Llama3Rope(32.0)
        ),
        LearnerMesh(dp=2),
    ),
    (tiny_shape("LlamaForCausalLM", tie_embeddings=True), LearnerMesh(tp=2)),
    (tiny_shape("Qwen2ForCausalLM", head_dim=2), LearnerMesh(tp=2)),
    (tiny_shape("Qwen2ForCausalLM", head_dim=2, num_kv_heads=1), LearnerMesh(tp=2)),
    (tiny_shape("Qwen3ForCausalLM"), LearnerMesh(pp=2)),
    (tiny_shape("Qwen3ForCausalLM", tie_embeddings=True), LearnerMesh(pp=2)),
    (tiny_shape("Qwen3ForCausalLM", tie_embeddings=True), LearnerMesh(dp=2)),
]
