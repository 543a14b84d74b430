"""Fields of mixtures of experts, latent attention and block FP8: honoured, or refused by name."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from megarl.actor.shape import ModelShape, read_shape
from megarl.errors import ModelError
from tests.actor.published import FP8, PUBLISHED

QWEN, KIMI, DEEPSEEK, GLM = "Qwen3-30B-A3B", "Kimi-K2", "DeepSeek-V3", "GLM-4.5"
YARN = PUBLISHED[KIMI]["rope_scaling"]
BLOCKS = FP8["quantization_config"]


def read(folder: Path, name: str, changes: dict[str, object]) -> ModelShape:
    """A published model's shape after changes; a change to ... removes the field."""
    config = {**PUBLISHED[name], **changes}
    config = {field: value for field, value in config.items() if value is not ...}
    (folder / "config.json").write_text(json.dumps(config))
    return read_shape(folder)


@pytest.mark.parametrize(
    ("name", "changes", "words"),
    [
        (QWEN, {"num_experts": ...}, "num_experts is None; a positive integer"),
        (QWEN, {"num_local_experts": 64}, "num_local_experts is 64; it contradicts num_experts"),
        (QWEN, {"num_experts_per_tok": 129}, "num_experts_per_tok is 129; there are only 128"),
        (QWEN, {"mlp_only_layers": [48]}, "mlp_only_layers is [48]; numbers of the 48 layers"),
        (QWEN, {"decoder_sparse_step": 0}, "decoder_sparse_step is 0; a positive integer"),
        (QWEN, {"norm_topk_prob": 1}, "norm_topk_prob is 1; true or false"),
        (QWEN, {"attention_bias": True}, "attention_bias is True"),
        (QWEN, {"n_shared_experts": 1}, "n_shared_experts is 1; megarl does not know"),
        (QWEN, {"num_nextn_predict_layers": 1}, "num_nextn_predict_layers is 1"),
        (KIMI, {"n_group": 5}, "n_group is 5; it must divide the 384 experts"),
        (KIMI, {"topk_group": 2}, "topk_group is 2; there are only 1 groups"),
        (KIMI, {"n_shared_experts": None}, "n_shared_experts is None; an integer from 0"),
        (KIMI, {"first_k_dense_replace": -1}, "first_k_dense_replace is -1"),
        (KIMI, {"routed_scaling_factor": 0}, "routed_scaling_factor is 0; a positive number"),
        (KIMI, {"scoring_func": "softmax"}, "scoring_func is 'softmax'; only 'sigmoid'"),
        (KIMI, {"topk_method": "greedy"}, "topk_method is 'greedy'; only 'noaux_tc'"),
        (KIMI, {"moe_layer_freq": 2}, "moe_layer_freq is 2; only 1"),
        (KIMI, {"attention_bias": True}, "attention_bias is True"),
        (KIMI, {"rope_interleave": False}, "rope_interleave is False"),
        (KIMI, {"num_key_value_heads": 8}, "num_key_value_heads is 8; latent attention has one"),
        (KIMI, {"head_dim": 128}, "head_dim is 128; beside the other widths it must be 64"),
        (KIMI, {"qk_head_dim": 128}, "qk_head_dim is 128; beside the other widths it must be 192"),
        (KIMI, {"kv_lora_rank": ...}, "kv_lora_rank is None"),
        (KIMI, {"qk_rope_head_dim": 63}, "qk_rope_head_dim is 63; rotary embeddings need an even"),
        (KIMI, {"max_position_embeddings": ...}, "max_position_embeddings is None"),
        (KIMI, {"index_topk": 2048}, "index_topk is 2048; megarl does not know"),
        (KIMI, {"model_type": "deepseek_v2"}, "must be 'deepseek_v3' or 'kimi_k2'"),
        (GLM, {"partial_rotary_factor": 1.5}, "partial_rotary_factor is 1.5; it can be 1 at most"),
        (GLM, {"partial_rotary_factor": 0.0}, "partial_rotary_factor is 0.0; a positive number"),
        (GLM, {"head_dim": 126, "partial_rotary_factor": 0.5}, "head_dim is 126; rotary"),
        (GLM, {"use_qk_norm": "yes"}, "use_qk_norm is 'yes'; true or false"),
        (GLM, {"rope_scaling": YARN}, "rope_type 'yarn' is not supported; 'default' is"),
    ],
)
def test_field_that_cannot_be_honoured_is_named_with_its_value(
    tmp_path: Path, name: str, changes: dict[str, object], words: str
) -> None:
    with pytest.raises(ModelError) as caught:
        read(tmp_path, name, changes)
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"mscale": None}, "rope_scaling.mscale is None"),
        ({"factor": None}, "rope_scaling.factor is None"),
        ({"original_max_position_embeddings": None}, "original_max_position_embeddings is None"),
        ({"attention_factor": 1.0}, "rope_scaling.attention_factor is 1.0; it is unknown to"),
        ({"truncate": False}, "rope_scaling.truncate is False; it is unknown to"),
        ({"type": "llama3"}, "rope_type 'llama3' is not supported; 'default' and 'yarn' are"),
    ],
)
def test_yarn_field_that_is_missing_or_unknown_is_named(
    tmp_path: Path, changes: dict[str, object], words: str
) -> None:
    assert isinstance(YARN, dict)
    with pytest.raises(ModelError) as caught:
        read(tmp_path, KIMI, {"rope_scaling": {**YARN, **changes}})
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"quant_method": "compressed-tensors"}, "quant_method is 'compressed-tensors'; only"),
        ({"quant_method": "mxfp4"}, "quantization_config.quant_method is 'mxfp4'"),
        ({"quant_method": None}, "only quant_method 'fp8' with a weight_block_size"),
        ({"weight_block_size": None}, "only quant_method 'fp8' with a weight_block_size"),
        ({"weight_block_size": [128, 0]}, "weight_block_size is [128, 0]; two positive integers"),
        ({"fmt": "e5m2"}, "quantization_config.fmt is 'e5m2'"),
        ({"activation_scheme": "static"}, "activation_scheme is 'static'"),
        ({"scale_fmt": "ue8m0"}, "quantization_config.scale_fmt is 'ue8m0'; megarl does not know"),
        (
            {"modules_to_not_convert": ["lm_head", "model.layers.7.mlp.experts.3.up_proj"]},
            "'model.layers.7.mlp.experts.3.up_proj'; megarl takes this module for quantized",
        ),
        ({"modules_to_not_convert": "lm_head"}, "a list of module names is needed"),
    ],
)
def test_other_quantization_than_fp8_in_blocks_is_refused(
    tmp_path: Path, changes: dict[str, object], words: str
) -> None:
    assert isinstance(BLOCKS, dict)
    with pytest.raises(ModelError) as caught:
        read(tmp_path, KIMI, {"quantization_config": {**BLOCKS, **changes}})
    assert words in str(caught.value)


def test_list_of_the_modules_that_are_never_quantized_is_accepted(tmp_path: Path) -> None:
    assert isinstance(BLOCKS, dict)
    never = ["lm_head", "model.layers.0.input_layernorm", "model.layers.0.mlp.gate"]
    quantization = {**BLOCKS, "modules_to_not_convert": never}
    shape = read(tmp_path, QWEN, {"quantization_config": quantization})
    assert shape.fp8_block == (128, 128)


def test_sparse_step_and_listed_layers_decide_which_layers_are_dense(tmp_path: Path) -> None:
    changes = {"num_hidden_layers": 6, "decoder_sparse_step": 2, "mlp_only_layers": [3]}
    kinds = read(tmp_path, QWEN, changes).layer_kinds
    # transformers and SGLang: layer i has experts where step divides i + 1 and it is not listed.
    assert kinds == ("dense", "moe", "dense", "dense", "dense", "moe")


def test_absent_fields_mean_what_they_mean_to_transformers(tmp_path: Path) -> None:
    absent = dict.fromkeys(("decoder_sparse_step", "mlp_only_layers", "norm_topk_prob"), ...)
    qwen = read(tmp_path, QWEN, absent)
    assert qwen.moe is not None and not qwen.moe.normalize
    assert qwen.layer_kinds == ("moe",) * 48
    glm = read(tmp_path, GLM, dict.fromkeys(("partial_rotary_factor", "attention_bias"), ...))
    assert (glm.rotary_fraction, glm.qkv_bias) == (0.5, False)
    kimi = read(tmp_path, KIMI, dict.fromkeys(("norm_topk_prob", "num_nextn_predict_layers"), ...))
    assert kimi.moe is not None and kimi.moe.normalize
    assert kimi.num_mtp_layers == 0


def test_new_name_of_the_number_of_experts_is_read(tmp_path: Path) -> None:
    newer = read(tmp_path, QWEN, {"num_experts": ..., "num_local_experts": 128})
    assert newer == read(tmp_path, QWEN, {})


def test_form_of_transformers_5_reads_as_the_older_one(tmp_path: Path) -> None:
    rope = {**YARN, "rope_theta": 50000.0}  # type: ignore[dict-item]
    newer = read(tmp_path, KIMI, {"rope_scaling": ..., "rope_theta": ..., "rope_parameters": rope})
    assert newer == read(tmp_path, KIMI, {})
    partial = {"rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": 0.5}
    glm = read(tmp_path, GLM, {"partial_rotary_factor": ..., "rope_parameters": partial})
    assert glm == read(tmp_path, GLM, {})


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"n_routed_experts": 2**31}, "n_routed_experts is 2147483648; it can be 100000 at most"),
        ({"n_shared_experts": 2**31 - 1}, "shared_experts.gate_proj.weight of shape"),
    ],
)
def test_more_experts_than_are_laid_out_are_refused(
    tmp_path: Path, changes: dict[str, object], words: str
) -> None:
    with pytest.raises(ModelError, match=re.escape(words)):
        read(tmp_path, KIMI, changes)
