"""Program, under torchrun with two ranks: real GPTModels, filled by plans, and their logits.

    torchrun --nproc-per-node 2 -m tests.reshard.megatron_models OUT_DIR

For every case in CASES each rank writes its parameters' shapes to OUT_DIR/<case>-<rank>.json, and
its part of the logits of TOKENS, where it has one, to OUT_DIR/<case>-<rank>.npy.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F

from megarl.actor.parameters import parameter_table
from megarl.actor.shape import ModelShape
from megarl.compat import megatron_cpu
from megarl.reshard.execute import clear_paddings, run
from megarl.reshard.layout import full_layout
from megarl.reshard.megatron import megatron_layout, padded_vocab_size
from megarl.reshard.mesh import LearnerMesh
from megarl.reshard.plan import make_plan
from tests.reshard.megatron_cases import CASES, TOKENS, VOCAB_DIVISOR
from tests.reshard.models import random_weights

megatron_cpu.install()

from megatron.core import parallel_state  # noqa: E402
from megatron.core.models.gpt import GPTModel  # noqa: E402
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed  # noqa: E402
from megatron.core.transformer import TransformerConfig  # noqa: E402

from megarl.compat.megatron_layers import block_spec  # noqa: E402


def build(shape: ModelShape, mesh: LearnerMesh) -> GPTModel:
    """This rank's part of the model; its pipeline stage is that of the running parallel state."""
    config = TransformerConfig(
        num_layers=shape.num_layers,
        hidden_size=shape.hidden_size,
        num_attention_heads=shape.num_heads,
        num_query_groups=shape.num_kv_heads,
        kv_channels=shape.head_dim,
        ffn_hidden_size=shape.intermediate_size,
        normalization="RMSNorm",
        layernorm_epsilon=shape.rms_norm_eps,
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
        add_qkv_bias=shape.qkv_bias,
        qk_layernorm=shape.qk_norm,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        tensor_model_parallel_size=mesh.tp,
        pipeline_model_parallel_size=mesh.pp,
        pipeline_dtype=torch.float32,
        use_cpu_initialization=True,
    )
    return GPTModel(
        config,
        block_spec(config, shape.num_layers // mesh.pp),
        vocab_size=padded_vocab_size(shape.vocab_size, mesh.tp, VOCAB_DIVISOR),
        max_sequence_length=shape.max_positions,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        share_embeddings_and_output_weights=shape.tie_embeddings,
        position_embedding_type="rope",
        rotary_base=int(shape.rope_theta),
        rope_scaling=shape.rope_scaling is not None,
        rope_scaling_factor=shape.rope_scaling.factor if shape.rope_scaling else 1.0,
    ).eval()


def fill(model: GPTModel, shape: ModelShape, mesh: LearnerMesh, rank: int) -> None:
    """Write the random weights into the rank's parameters, by a plan from whole tensors."""
    learner = megatron_layout(shape, mesh, VOCAB_DIVISOR)
    plan = make_plan(full_layout(parameter_table(shape)), learner)
    weights = {name: torch.from_numpy(array) for name, array in random_weights(shape).items()}
    held = dict(model.named_parameters())
    for parameter in held.values():
        parameter.fill_(float("nan"))  # what the plan leaves out shows
    run(plan.between(0, rank), weights, held)
    clear_paddings(learner.ranks[rank], held)


def logits_of(model: GPTModel, shape: ModelShape, mesh: LearnerMesh) -> torch.Tensor | None:
    """This rank's part of the logits [batch, tokens, vocabulary / tp]; None before the last."""
    tokens = torch.tensor(TOKENS)
    positions = torch.arange(tokens.shape[1]).expand_as(tokens)
    if mesh.pp > 1 and dist.get_rank() == 1:
        hidden = torch.empty(tokens.shape[1], tokens.shape[0], shape.hidden_size)
        dist.recv(hidden, src=0)
        model.set_input_tensor(hidden)
    out: torch.Tensor = model(tokens, positions, None)
    if mesh.pp > 1 and dist.get_rank() == 0:
        dist.send(out.contiguous(), dst=1)
        return None
    return out


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    for case, (shape, mesh) in enumerate(CASES):
        parallel_state.initialize_model_parallel(mesh.tp, mesh.pp)
        model_parallel_cuda_manual_seed(1, force_reset_rng=True)
        model = build(shape, mesh)
        out = Path(sys.argv[1]) / f"{case}-{rank}"
        shapes = {name: tuple(tensor.shape) for name, tensor in model.named_parameters()}
        out.with_suffix(".json").write_text(json.dumps(shapes))
        with torch.no_grad():
            fill(model, shape, mesh, rank)
            logits = logits_of(model, shape, mesh)
        if logits is not None:
            np.save(out.with_suffix(".npy"), logits.numpy())
        parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
