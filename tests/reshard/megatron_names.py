"""Program, under torchrun with two ranks: the parameters of real Megatron GPTModels on each rank.

    torchrun --nproc-per-node 2 -m tests.reshard.megatron_names OUT_DIR

For every case in CASES it writes OUT_DIR/<case>-<rank>.json: {parameter name: shape}.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from megarl.actor.shape import ModelShape
from megarl.reshard.megatron import padded_vocab_size
from megarl.reshard.mesh import LearnerMesh
from tests.reshard.models import tiny_shape

VOCAB_DIVISOR = 8

# (shape, mesh): each family; tp within and above the kv heads; tied and untied over stages.
CASES: list[tuple[ModelShape, LearnerMesh]] = [
    (tiny_shape("LlamaForCausalLM"), LearnerMesh(dp=2)),
    (tiny_shape("LlamaForCausalLM", tie_embeddings=True), LearnerMesh(tp=2)),
    (tiny_shape("Qwen2ForCausalLM"), LearnerMesh(tp=2)),
    (tiny_shape("Qwen2ForCausalLM", num_kv_heads=1), LearnerMesh(tp=2)),
    (tiny_shape("Qwen3ForCausalLM"), LearnerMesh(pp=2)),
    (tiny_shape("Qwen3ForCausalLM", tie_embeddings=True), LearnerMesh(pp=2)),
    (tiny_shape("Qwen3ForCausalLM", tie_embeddings=True), LearnerMesh(dp=2)),
]


def build(shape: ModelShape, mesh: LearnerMesh) -> dict[str, tuple[int, ...]]:
    """Names and shapes of this rank's GPTModel."""
    import torch.nn.functional as F
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    from megatron.core.transformer import TransformerConfig

    from megarl.compat.megatron_layers import block_spec

    parallel_state.initialize_model_parallel(mesh.tp, mesh.pp)
    model_parallel_cuda_manual_seed(1, force_reset_rng=True)
    import torch

    config = TransformerConfig(
        num_layers=shape.num_layers,
        hidden_size=shape.hidden_size,
        num_attention_heads=shape.num_heads,
        num_query_groups=shape.num_kv_heads,
        kv_channels=shape.head_dim,
        ffn_hidden_size=shape.intermediate_size,
        normalization="RMSNorm",
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
        add_qkv_bias=shape.qkv_bias,
        qk_layernorm=shape.qk_norm,
        tensor_model_parallel_size=mesh.tp,
        pipeline_model_parallel_size=mesh.pp,
        pipeline_dtype=torch.float32,
        use_cpu_initialization=True,
    )
    model = GPTModel(
        config,
        block_spec(config, shape.num_layers // mesh.pp),
        vocab_size=padded_vocab_size(shape.vocab_size, mesh.tp, VOCAB_DIVISOR),
        max_sequence_length=shape.max_positions,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        share_embeddings_and_output_weights=shape.tie_embeddings,
        position_embedding_type="rope",
    )
    parallel_state.destroy_model_parallel()
    return {name: tuple(tensor.shape) for name, tensor in model.named_parameters()}


def main() -> None:
    import torch.distributed as dist

    from megarl.compat import megatron_cpu

    megatron_cpu.install()
    dist.init_process_group("gloo")
    for i, (shape, mesh) in enumerate(CASES):
        path = Path(sys.argv[1]) / f"{i}-{dist.get_rank()}.json"
        path.write_text(json.dumps(build(shape, mesh)))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
