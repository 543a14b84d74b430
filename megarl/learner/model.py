"""The policy in Megatron-Core: GPTModels of the right shape on each rank, and their first weights.

Owns how the model is built and proved to be as its layout says, and the reading of a Hugging Face
checkpoint into the ranks. Its configuration is `transformer.py`'s. Knows nothing of losses, batches
or optimizers. Import it after `megatron_cpu.install()`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.transformer_block import get_num_layers_to_build
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset
from torch import Tensor

from megarl.actor.parameters import block_table
from megarl.actor.shape import Llama3Rope, ModelShape, read_shape
from megarl.compat import megatron_cpu
from megarl.config.fp8 import buffer_fields
from megarl.config.schema import LearnerConfig
from megarl.errors import ConfigError, LayoutError
from megarl.learner.chunks import Chunks
from megarl.learner.distributed import Ranks
from megarl.learner.transformer import has_transformer_engine, transformer_config
from megarl.reshard import execute
from megarl.reshard.engine_tensors import learner_buffers
from megarl.reshard.files import layout_of_headers, map_tensors, policy_headers
from megarl.reshard.layout import Layout
from megarl.reshard.megatron import padded_vocab_size
from megarl.reshard.plan import Move, make_plan

HEAD = "output_layer."  # in its names in a GPTModel


def build_model(
    shape: ModelShape,
    learner: LearnerConfig,
    ranks: Ranks,
    layout: Layout,
    head: Callable[[Any], torch.nn.Module] | None = None,
) -> Chunks:
    """This rank's GPTModels, each inside Megatron's DistributedDataParallel, all weights zero.

    `layout` is the learner's. Parameters of a model chunk live in one buffer for the distributed
    optimizer, those of experts in another. Gradients are summed over data- and context-parallel
    ranks, in fp32. `head` makes, of the TransformerConfig, an output layer in the place of the
    vocabulary's, which is not in `layout`. Raises ConfigError and LayoutError as
    `transformer_config` does, and LayoutError where the model is not as laid out.
    """
    config = transformer_config(shape, learner, ranks.device.type == "cpu")
    ddp = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        use_distributed_optimizer=True,
        overlap_grad_reduce=learner.parallel.overlap_grad_reduce,
        overlap_param_gather=learner.parallel.overlap_param_gather,
        **buffer_fields(learner.precision),
    )
    modules = [_chunk(shape, config, ranks, number) for number in range(ranks.mesh.vpp)]
    if head is not None and ranks.is_last_stage:
        modules[-1].output_layer = head(config).to(ranks.device)
    chunks = Chunks([DistributedDataParallel(config, ddp, module) for module in modules])
    if ddp.overlap_grad_reduce:  # gradients are reduced with the last microbatch only
        pauses = [part.no_sync for part in chunks.parts]
        config.no_sync_func = pauses if len(pauses) > 1 else pauses[0]
    held = named_weights(chunks, shape, layout, ranks.rank)
    with torch.no_grad():
        for tensor in held.values():
            tensor.zero_()
    expected = {tensor.name: tensor.shape for tensor in layout.rank(ranks.rank).tensors}
    found = {
        name: tuple(tensor.shape)
        for name, tensor in held.items()
        if head is None or HEAD not in name
    }
    if found != expected:
        differing = sorted(set(found.items()) ^ set(expected.items()))
        raise LayoutError(
            f"Megatron's model and its layout differ on rank {ranks.rank}, first in "
            f"{differing[0]}; this Megatron-Core is another version than the layout is for"
        )
    return chunks


def _chunk(shape: ModelShape, config: Any, ranks: Ranks, number: int) -> GPTModel:
    """The GPTModel of one model chunk of this rank."""
    rope = shape.rope_scaling
    model = GPTModel(
        config=config,
        transformer_layer_spec=_layer_spec(config, ranks, number),
        vocab_size=padded_vocab_size(shape.vocab_size, ranks.mesh.tp),
        max_sequence_length=shape.max_positions,
        pre_process=ranks.is_first_stage and number == 0,
        post_process=ranks.is_last_stage and number == ranks.mesh.vpp - 1,
        share_embeddings_and_output_weights=shape.tie_embeddings,
        position_embedding_type="rope",
        rotary_percent=shape.rotary_fraction,
        rotary_base=shape.rope_theta,
        rope_scaling=isinstance(rope, Llama3Rope),
        vp_stage=_virtual(ranks, number),
        **({"rope_scaling_factor": rope.factor} if isinstance(rope, Llama3Rope) else {}),
    ).to(ranks.device)
    for name, parameter in model.named_parameters():
        if ".experts." in name:
            # Theirs is an optimizer of its own in every layout, so that checkpoints fit each other:
            # Megatron has one only where their ranks are not those of dense tensors.
            parameter.allreduce = False
    return model


def _layer_spec(config: Any, ranks: Ranks, number: int) -> Any:
    """Transformer Engine's layers where they can run, else the local block with the same names."""
    from megarl.compat.megatron_layers import block_spec, engine_block_spec

    virtual = _virtual(ranks, number)
    if has_transformer_engine():
        return engine_block_spec(config, virtual)
    if not megatron_cpu.is_installed():
        raise ConfigError(
            "the learner runs on CUDA without Transformer Engine; install megarl[gpu], which has it"
        )
    num_layers = get_num_layers_to_build(config, vp_stage=virtual, pp_rank=ranks.pp_rank)
    first_layer = get_transformer_layer_offset(config, vp_stage=virtual, pp_rank=ranks.pp_rank)
    return block_spec(config, num_layers, first_layer)


def _virtual(ranks: Ranks, number: int) -> int | None:
    """How Megatron numbers a model chunk: not at all where it is the only one."""
    return number if ranks.mesh.vpp > 1 else None


def named_weights(model: Chunks, shape: ModelShape, layout: Layout, rank: int) -> dict[str, Tensor]:
    """This rank's parameters and, of its buffers, those that are weights: the router's bias.

    Under the names of its layout; the live storage, not copies. A bias is float32 always.
    """
    buffers = learner_buffers(shape, layout, rank)
    named = {name: parameter.data for name, parameter in model.named_parameters()}
    return named | {name: t for name, t in model.named_buffers() if name in buffers}


class _Stored:
    """A tensor of a checkpoint file, read by slices; bfloat16 bits become torch's bfloat16."""

    def __init__(self, array: np.ndarray[Any, Any]) -> None:
        self._array = array

    def __getitem__(self, index: tuple[slice | int, ...]) -> Tensor:
        part = torch.from_numpy(np.array(self._array[index]))
        return part.view(torch.bfloat16) if part.dtype == torch.uint16 else part


def load_checkpoint(
    model_dir: str | Path, layout: Layout, rank: int, weights: Mapping[str, Tensor]
) -> None:
    """Read this rank's part of the Hugging Face checkpoint into `weights` (by Megatron's names).

    Only the slices that this rank holds are read. Numbers are converted to the weights' type;
    elements of no parameter become zero. What the checkpoint has beyond the policy, layers for
    multi-token prediction, is passed over. Raises ModelError where the checkpoint is not whole.
    """
    mine = layout.only(rank)
    headers = policy_headers(model_dir, block_table(read_shape(model_dir)), layout.table)
    plan = make_plan(layout_of_headers(headers, layout.table), mine)
    moves: dict[int, list[Move]] = {}
    for move in plan.receives(rank):
        moves.setdefault(move.src, []).append(move)
    with torch.no_grad():
        execute.clear_paddings(mine.rank(rank), weights)
        for src, (path, header) in enumerate(headers.items()):
            read = {move.src_local: header[move.src_local] for move in moves.get(src, ())}
            stored = {name: _Stored(array) for name, array in map_tensors(path, read).items()}
            execute.run(moves.get(src, ()), stored, weights)
