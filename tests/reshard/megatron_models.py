"""One rank of real GPTModels that are filled by layouts, and its part of their logits.

Its argument is a folder. For every case of so many ranks it writes the shapes of its parameters,
and of the buffers that layouts have, to <ranks>-<case>-<rank>.json there; its part of the logits of
TOKENS, where it has one, to the same name with .npy; and what its MTP layers give, where it has
some, with -mtp.npy.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from megarl.compat import megatron_cpu
from megarl.config.schema import LearnerConfig, LearnerParallelConfig, PrecisionConfig
from megarl.reshard.layout import local_box
from megarl.reshard.megatron import padded_vocab_size
from megarl.reshard.pipeline import Chunk
from tests.reshard.megatron_cases import CASES, TOKENS, VOCAB_DIVISOR, Case
from tests.reshard.models import random_weights

megatron_cpu.install()

from megatron.core import parallel_state  # noqa: E402
from megatron.core.models.gpt import GPTModel  # noqa: E402
from megatron.core.models.gpt.gpt_layer_specs import (  # noqa: E402
    get_gpt_mtp_block_spec,
)
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed  # noqa: E402
from megatron.core.transformer import TransformerConfig  # noqa: E402

from megarl.compat.megatron_layers import block_spec, engine_block_spec, mtp_spec  # noqa: E402
from megarl.learner.transformer import transformer_config  # noqa: E402
from megarl.reshard.engine_tensors import learner_buffers  # noqa: E402
from tests.reshard import te_stand_ins  # noqa: E402


def config_of(case: Case) -> TransformerConfig:
    """Megatron's configuration of the case's model, as the learner has it."""
    mesh, per_expert = case.mesh, case.forms[1] != "sequential"
    sizes = {axis: getattr(mesh, axis) for axis in ("tp", "pp", "vpp", "ep", "etp")}
    learner = LearnerConfig(
        parallel=LearnerParallelConfig(
            **sizes, first_stage_layers=case.first or 0, pipeline_layout=case.written
        ),
        precision=PrecisionConfig(params="fp32"),
        transformer_config={
            "transformer_impl": "transformer_engine" if case.stubs else "local",
            "moe_grouped_gemm": per_expert and case.shape.moe is not None,
        },
    )
    config = transformer_config(case.shape, learner, on_cpu=True)
    config.sequence_parallel = False  # TOKENS do not divide
    return config


def build(case: Case, config: TransformerConfig, v: int, chunk: Chunk) -> GPTModel:
    """Model chunk v of this rank; its pipeline stage is that of the running parallel state."""
    shape = case.shape
    decoder, mtp = specs_of(case, config, v, chunk)
    return GPTModel(
        config,
        decoder,
        vocab_size=padded_vocab_size(shape.vocab_size, case.mesh.tp, VOCAB_DIVISOR),
        max_sequence_length=shape.max_positions,
        pre_process=chunk.embedding,
        post_process=chunk.loss,
        share_embeddings_and_output_weights=shape.tie_embeddings,
        position_embedding_type="rope",
        rotary_percent=shape.rotary_fraction,
        rotary_base=int(shape.rope_theta),
        rope_scaling=shape.rope_scaling is not None,
        rope_scaling_factor=shape.rope_scaling.factor if shape.rope_scaling else 1.0,
        mtp_block_spec=mtp,
        vp_stage=v if case.mesh.vpp > 1 else None,
    ).eval()


def specs_of(case: Case, config: TransformerConfig, v: int, chunk: Chunk) -> tuple[Any, Any]:
    """The specs of the chunk's decoder and of its MTP layers, None where it has none."""
    if case.stubs:
        decoder = engine_block_spec(config)
        mtp = get_gpt_mtp_block_spec(config, decoder, use_transformer_engine=True)
        return decoder, mtp if chunk.num_mtp else None
    fused = case.forms[0] == "te"
    decoder = block_spec(config, chunk.num_layers, chunk.first, fused)
    return decoder, mtp_spec(config, fused) if chunk.num_mtp else None


def tensors_of(chunks: list[GPTModel], case: Case, rank: int) -> dict[str, Tensor]:
    """All parameters, and the buffers that the layout says, under the names of layouts."""
    held = {}
    said = learner_buffers(case.shape, case.layout, rank)
    for v, chunk in enumerate(chunks):
        prefix = f"model{v}." if len(chunks) > 1 else ""
        named = dict(chunk.named_parameters())
        named |= {n: buffer for n, buffer in chunk.named_buffers() if prefix + n in said}
        held |= {prefix + name: tensor for name, tensor in named.items()}
    return held


def fill(held: dict[str, Tensor], case: Case, rank: int) -> None:
    """Write the random weights into the rank's tensors, piece by piece as its layout says."""
    weights = random_weights(case.shape)
    for tensor in held.values():
        tensor.fill_(float("nan"))  # what the layout leaves out shows
    mine = case.layout.rank(rank)
    for piece in mine.pieces:
        values = weights[piece.tensor][tuple(slice(*span) for span in piece.box)]
        into = held[piece.local][tuple(slice(*span) for span in local_box(piece.box, piece.at))]
        into.copy_(torch.from_numpy(values.reshape(into.shape)))
    for padding in mine.paddings:
        held[padding.local][tuple(slice(*span) for span in padding.box)] = 0


def logits_of(chunks: list[GPTModel], case: Case) -> Tensor | None:
    """This rank's part of the logits [batch, tokens, vocabulary / tp]; None before the last."""
    tokens = torch.tensor(TOKENS)
    positions = torch.arange(tokens.shape[1]).expand_as(tokens)
    mesh, rank = case.mesh, dist.get_rank()
    stage, hidden = rank // mesh.stage_size, None
    order = list(case.pipeline)
    for (p, v, _), (next_p, _, _) in zip(order, [*order[1:], (-1, 0, None)], strict=True):
        if p == stage:
            if hidden is not None:
                chunks[v].set_input_tensor(hidden)
            hidden = chunks[v](tokens, positions, None)
        if next_p < 0 or next_p == p:
            continue
        if p == stage:
            send(hidden, rank + (next_p - p) * mesh.stage_size)
        if next_p == stage:
            hidden = receive(rank + (p - next_p) * mesh.stage_size)
    return hidden if order[-1][0] == stage else None


def send(hidden: Tensor, to: int) -> None:
    dist.send(torch.tensor(hidden.shape), dst=to)
    dist.send(hidden.contiguous(), dst=to)


def receive(source: int) -> Tensor:
    shape = torch.empty(3, dtype=torch.int64)
    dist.recv(shape, src=source)
    hidden = torch.empty(shape.tolist())
    dist.recv(hidden, src=source)
    return hidden


def run_case(case: Case, out: Path) -> None:
    """Build, fill and ask one case, and write what comes out."""
    chunks, held = build_case(case, out)
    with torch.no_grad():
        fill(held, case, dist.get_rank())
        for chunk in chunks:
            if hasattr(chunk, "mtp"):
                path = out.with_name(out.name + "-mtp.npy")
                chunk.mtp.register_forward_hook(
                    lambda module, args, result, path=path: np.save(path, result.numpy())
                )
        logits = logits_of(chunks, case)
    if logits is not None:
        np.save(out.with_suffix(".npy"), logits.numpy())
    parallel_state.destroy_model_parallel()


def build_case(case: Case, out: Path) -> tuple[list[GPTModel], dict[str, Tensor]]:
    """This rank's chunks and their tensors, whose shapes are written."""
    rank, mesh = dist.get_rank(), case.mesh
    parallel_state.initialize_model_parallel(
        mesh.tp,
        mesh.pp,
        mesh.vpp if mesh.vpp > 1 else None,
        expert_model_parallel_size=mesh.ep,
        expert_tensor_parallel_size=mesh.etp,
        distributed_timeout_minutes=2,
    )
    model_parallel_cuda_manual_seed(1, force_reset_rng=True)
    config = config_of(case)
    if case.stubs:
        te_stand_ins.install()
        config.moe_single_grouped_weight = case.forms[1] == "grouped"
    stage = case.pipeline.chunks[rank // mesh.stage_size]
    chunks = [build(case, config, v, chunk) for v, chunk in enumerate(stage)]
    held = tensors_of(chunks, case, rank)
    shapes = {name: tuple(tensor.shape) for name, tensor in held.items()}
    out.with_suffix(".json").write_text(json.dumps(shapes))
    return chunks, held


def main() -> None:
    """All cases of so many ranks."""
    rank, ranks, out = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), Path(sys.argv[1])
    store = dist.FileStore(str(out / f"store-{ranks}"), ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
    for number, case in enumerate(CASES[ranks]):
        run_case(case, out / f"{ranks}-{number}-{rank}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
