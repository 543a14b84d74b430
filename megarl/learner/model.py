"""The policy in Megatron-Core: a GPTModel of the right shape on each rank, and its first weights.

Owns the translation of a ModelShape and the settings to Megatron's own configuration, and the
reading of a Hugging Face checkpoint into the ranks. Knows nothing of losses, batches or optimizers.
Import it after `megatron_cpu.install()`.
"""

from __future__ import annotations

import dataclasses
import difflib
import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.transformer_block import get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from megarl.actor.parameters import block_table
from megarl.actor.shape import ModelShape
from megarl.compat import megatron_cpu
from megarl.config.schema import LearnerConfig
from megarl.errors import ConfigError, LayoutError
from megarl.learner.distributed import Ranks
from megarl.reshard import execute
from megarl.reshard.files import layout_of_headers, map_tensors, read_headers
from megarl.reshard.megatron import megatron_layout, megatron_rank, padded_vocab_size
from megarl.reshard.plan import Move, make_plan

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def transformer_config(shape: ModelShape, learner: LearnerConfig, ranks: Ranks) -> Any:
    """Megatron's TransformerConfig of this policy, layout and precision.

    Raises ConfigError where `learner.transformer_config` names a field that Megatron does not have,
    or one that megarl sets itself.
    """
    dtype = DTYPES[learner.precision.params]
    ours: dict[str, Any] = {
        "num_layers": shape.num_layers,
        "hidden_size": shape.hidden_size,
        "num_attention_heads": shape.num_heads,
        "num_query_groups": shape.num_kv_heads,
        "kv_channels": shape.head_dim,
        "ffn_hidden_size": shape.intermediate_size,
        "normalization": "RMSNorm",
        "layernorm_epsilon": shape.rms_norm_eps,
        "gated_linear_unit": True,
        "activation_func": F.silu,
        "add_bias_linear": False,
        "add_qkv_bias": shape.qkv_bias,
        "qk_layernorm": shape.qk_norm,
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
        "tensor_model_parallel_size": ranks.mesh.tp,
        "pipeline_model_parallel_size": ranks.mesh.pp,
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "bf16": dtype is torch.bfloat16,
        "use_cpu_initialization": ranks.device.type == "cpu",
        "perform_initialization": False,  # every element comes from the checkpoint
        "calculate_per_token_loss": True,  # gradients are summed over ranks, never averaged
        "finalize_model_grads_func": sum_gradients,
    }
    extra = dict(learner.transformer_config)
    fused = {"apply_rope_fusion": has_transformer_engine()}  # unfused loops over the sequences
    violations = _violations(extra, ours)
    if violations:
        raise ConfigError(violations)
    try:
        return TransformerConfig(**{**ours, **fused, **extra})
    except (ValueError, AssertionError) as error:
        raise ConfigError(
            f"Megatron-Core refuses the learner's configuration with learner.transformer_config = "
            f"{extra}: {error}"
        ) from error


def _violations(extra: Mapping[str, object], ours: Mapping[str, object]) -> list[str]:
    known = {field.name for field in dataclasses.fields(TransformerConfig)}
    violations = []
    for name in extra:
        setting = f"learner.transformer_config.{name}"
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            hint = f"the nearest is {close[0]}" if close else "see megatron.core.transformer"
            violations.append(f"{setting}: Megatron's TransformerConfig has no such field; {hint}")
        elif name in ours:
            violations.append(
                f"{setting}: megarl sets this field from the model and other settings; remove it"
            )
        elif name in ("fp8", "fp4") and not has_transformer_engine():
            violations.append(
                f"{setting}: without Transformer Engine, Megatron would silently run without it"
            )
    return violations


def has_transformer_engine() -> bool:
    """Whether this process can build Transformer Engine's layers: it has CUDA and the package."""
    found = importlib.util.find_spec("transformer_engine") is not None
    return found and torch.cuda.is_available()


def sum_gradients(model: list[Any], num_tokens: Tensor | None = None, **groups: Any) -> None:
    """Megatron's finalize_model_grads without its division: the loss is divided already."""
    finalize_model_grads(model, None, **groups)


def build_model(shape: ModelShape, learner: LearnerConfig, ranks: Ranks) -> Any:
    """This rank's GPTModel inside Megatron's DistributedDataParallel, all weights zero.

    Parameters live in one buffer for the distributed optimizer. Gradients are summed over
    data-parallel ranks, in fp32. Raises ConfigError and LayoutError as `transformer_config` and the
    layout do.
    """
    rank_layout = megatron_rank(shape, ranks.mesh, ranks.rank)
    config = transformer_config(shape, learner, ranks)
    rope = shape.rope_scaling
    model = GPTModel(
        config=config,
        transformer_layer_spec=_layer_spec(config, ranks),
        vocab_size=padded_vocab_size(shape.vocab_size, ranks.mesh.tp),
        max_sequence_length=shape.max_positions,
        pre_process=ranks.is_first_stage,
        post_process=ranks.is_last_stage,
        share_embeddings_and_output_weights=shape.tie_embeddings,
        position_embedding_type="rope",
        rotary_base=shape.rope_theta,
        rope_scaling=rope is not None,
        **({"rope_scaling_factor": rope.factor} if rope else {}),
    ).to(ranks.device)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    expected = {tensor.name: tensor.shape for tensor in rank_layout.tensors}
    found = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    if found != expected:
        differing = sorted(set(found.items()) ^ set(expected.items()))
        raise LayoutError(
            f"Megatron's model and its layout differ on rank {ranks.rank}, first in "
            f"{differing[0]}; this Megatron-Core is another version than the layout is for"
        )
    ddp = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        use_distributed_optimizer=True,
        overlap_grad_reduce=False,
        overlap_param_gather=False,  # weights would be stale after a step until they are gathered
    )
    return DistributedDataParallel(config, ddp, model)


def _layer_spec(config: Any, ranks: Ranks) -> Any:
    """Transformer Engine's layer where it can run, else the local block with the same names."""
    if has_transformer_engine():
        from megatron.core.models.gpt.gpt_layer_specs import (
            get_gpt_layer_with_transformer_engine_spec,
        )

        return get_gpt_layer_with_transformer_engine_spec(qk_layernorm=config.qk_layernorm)
    if not megatron_cpu.is_installed():
        raise ConfigError(
            "the learner runs on CUDA without Transformer Engine; install megarl[gpu], which has it"
        )
    from megarl.compat.megatron_layers import block_spec

    return block_spec(config, get_num_layers_to_build(config, pp_rank=ranks.pp_rank))


def named_weights(model: Any) -> dict[str, Tensor]:
    """This rank's parameters under the names of its layout; the live storage, not copies."""
    return {name: parameter.data for name, parameter in model.module.named_parameters()}


class _Stored:
    """A tensor of a checkpoint file, read by slices; bfloat16 bits become torch's bfloat16."""

    def __init__(self, array: np.ndarray[Any, Any]) -> None:
        self._array = array

    def __getitem__(self, index: tuple[slice | int, ...]) -> Tensor:
        part = torch.from_numpy(np.array(self._array[index]))
        return part.view(torch.bfloat16) if part.dtype == torch.uint16 else part


def load_checkpoint(
    model_dir: str | Path, shape: ModelShape, ranks: Ranks, weights: Mapping[str, Tensor]
) -> None:
    """Read this rank's part of the Hugging Face checkpoint into `weights` (by Megatron's names).

    Only the slices that this rank holds are read. Numbers are converted to the weights' type;
    elements of no parameter become zero. Raises ModelError where the checkpoint is not whole.
    """
    mine = megatron_layout(shape, ranks.mesh).only(ranks.rank)
    headers = read_headers(model_dir)
    plan = make_plan(layout_of_headers(headers, block_table(shape)), mine)
    moves: dict[int, list[Move]] = {}
    for move in plan.receives(ranks.rank):
        moves.setdefault(move.src, []).append(move)
    with torch.no_grad():
        execute.clear_paddings(mine.rank(ranks.rank), weights)
        for src, (path, header) in enumerate(headers.items()):
            read = {move.src_local: header[move.src_local] for move in moves.get(src, ())}
            stored = {name: _Stored(array) for name, array in map_tensors(path, read).items()}
            execute.run(moves.get(src, ()), stored, weights)
