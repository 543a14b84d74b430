"""`[learner.transformer_config]`: Megatron's own fields, checked against the pinned engine's list.

Owns which of them a user may set. The list is data (`transformer_fields.json`, made by
`tools/make_transformer_fields.py`), so no engine is imported.
"""

from __future__ import annotations

import difflib
import functools
import json
from collections.abc import Mapping
from pathlib import Path

LIST = Path(__file__).with_name("transformer_fields.json")

# Fields that megarl fills from the model's config.json.
FROM_MODEL = frozenset(
    "num_layers hidden_size num_attention_heads num_query_groups kv_channels ffn_hidden_size "
    "normalization layernorm_epsilon gated_linear_unit add_bias_linear add_qkv_bias qk_layernorm "
    "attention_dropout hidden_dropout multi_latent_attention mtp_num_layers num_moe_experts "
    "moe_layer_freq moe_ffn_hidden_size moe_shared_expert_intermediate_size moe_router_topk "
    "moe_router_score_function moe_router_pre_softmax moe_router_enable_expert_bias "
    "moe_router_num_groups moe_router_group_topk moe_router_topk_scaling_factor".split()
)
# Fields that megarl fills from other settings.
SET_BY = {
    "tensor_model_parallel_size": "learner.parallel.tp",
    "pipeline_model_parallel_size": "learner.parallel.pp",
    "virtual_pipeline_model_parallel_size": "learner.parallel.vpp",
    "context_parallel_size": "learner.parallel.cp",
    "sequence_parallel": "learner.parallel.sequence_parallel",
    "overlap_p2p_comm": "learner.parallel.vpp",
    "batch_p2p_comm": "learner.parallel.vpp",
    "microbatch_group_size_per_vp_stage": "learner.parallel.pp",
    "expert_model_parallel_size": "learner.parallel.ep",
    "expert_tensor_parallel_size": "learner.parallel.etp",
    "num_layers_in_first_pipeline_stage": "learner.parallel.first_stage_layers",
    "num_layers_in_last_pipeline_stage": "learner.parallel.last_stage_layers",
    "pipeline_model_parallel_layout": "learner.parallel.pipeline_layout",
    "bf16": "learner.precision.params",
    "fp16": "learner.precision.params",
    "use_cpu_initialization": "launch.device",
    "recompute_granularity": "learner.recompute.granularity",
    "recompute_method": "learner.recompute.method",
    "recompute_num_layers": "learner.recompute.num_layers",
    "fp8": "learner.precision.fp8",
    "fp8_recipe": "learner.precision.fp8_recipe",
    "fp8_param": "learner.precision.fp8_param",
    "fp8_amax_history_len": "learner.precision.fp8_amax_history",
    "fp8_amax_compute_algo": "learner.precision.fp8_amax_algorithm",
    "tp_only_amax_red": "learner.precision.fp8_amax_group",
    "first_last_layers_bf16": "learner.precision.fp8_first_layers_bf16",
    "num_layers_at_start_in_bf16": "learner.precision.fp8_first_layers_bf16",
    "num_layers_at_end_in_bf16": "learner.precision.fp8_last_layers_bf16",
}

_OTHER_LOSS = "the loss is the policy's alone, without auxiliary losses of the router"
_OTHER_POLICY = "log-probs would not be the policy's"
_OTHER_MODEL = f"the model's config.json says how it computes, and with this {_OTHER_POLICY}"
REFUSED = {
    **dict.fromkeys(
        "softmax_scale softmax_type qk_l2_norm qk_clip no_rope_freq rotary_interleaved "
        "window_attn_skip_freq apply_residual_connection_post_layernorm glu_linear_offset "
        "activation_func_clamp_value attention_output_gate layernorm_zero_centered_gamma use_mup "
        "moe_apply_probs_on_input moe_router_topk_limited_devices test_mode".split(),
        _OTHER_MODEL,
    ),
    "calculate_per_token_loss": "gradients are sums over the tokens of all ranks, never averaged",
    "perform_initialization": "every element comes from the checkpoint",
    "hybrid_context_parallel": "samples are placed on ranks before the learner has them",
    "max_seqlen_per_dp_cp_rank": "samples are placed on ranks before the learner has them",
    "overlap_moe_expert_parallel_comm": "the learner's forward step makes no schedule plan for it",
    "moe_aux_loss_coeff": _OTHER_LOSS,
    "moe_z_loss_coeff": _OTHER_LOSS,
    "moe_router_load_balancing_type": _OTHER_LOSS,
    "moe_expert_capacity_factor": f"it drops tokens, so {_OTHER_POLICY}",
    "moe_expert_rank_capacity_factor": f"it drops tokens, so {_OTHER_POLICY}",
    "moe_token_dropping": f"it drops tokens, so {_OTHER_POLICY}",
    "moe_input_jitter_eps": f"it adds noise to the router, so {_OTHER_POLICY}",
    "moe_router_force_biased": f"it adds noise to the router, so {_OTHER_POLICY}",
    "moe_router_force_load_balancing": f"it routes at random, so {_OTHER_POLICY}",
    "defer_embedding_wgrad_compute": "the output layer runs on tokens with a loss only, which it "
    "does not expect",
}
"""Fields that a learner must not have, and why."""


@functools.cache
def known_fields() -> tuple[str, Mapping[str, tuple[str, ...]]]:
    """Megatron-Core's version, and field -> the kinds of value it takes."""
    data = json.loads(LIST.read_text(encoding="utf-8"))
    return data["version"], {name: tuple(kinds) for name, kinds in data["fields"].items()}


def field_violations(given: Mapping[str, int | float | str | bool]) -> list[str]:
    """What is wrong with the fields, one text each; empty where Megatron can be asked for them.

    >>> field_violations({"moe_permute_fusion": True, "moe_shared_expert_overlap": False})
    []
    >>> field_violations({"moe_permute_fusoin": True})[0].partition("; ")[2]
    'the nearest is moe_permute_fusion'
    """
    version, fields = known_fields()
    found = []
    for name, value in given.items():
        where = f"learner.transformer_config.{name}"
        if name in SET_BY:
            found.append(f"{where}: megarl sets it; use {SET_BY[name]}")
        elif name in FROM_MODEL:
            found.append(f"{where}: megarl sets it from the model's config.json; remove it")
        elif name in REFUSED:
            found.append(f"{where}: {REFUSED[name]}; remove it")
        elif name not in fields:
            close = difflib.get_close_matches(name, fields, n=1)
            hint = f"the nearest is {close[0]}" if close else "see its TransformerConfig"
            found.append(f"{where}: Megatron-Core {version} has no such field; {hint}")
        elif not _takes(fields[name], value):
            expected = " or ".join(fields[name])
            found.append(f"{where} = {value!r}: expected {expected}")
    return found


def _takes(kinds: tuple[str, ...], value: int | float | str | bool) -> bool:
    if isinstance(value, bool):
        return "flag" in kinds
    if isinstance(value, str):
        return "text" in kinds
    return "number" in kinds or (isinstance(value, int) and "integer" in kinds)
