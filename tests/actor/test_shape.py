"""config.json is read strictly: honoured, harmless, or refused by name."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megarl.actor.families import FAMILIES
from megarl.actor.shape import Llama3Rope, ModelShape, eos_token_ids, read_shape
from megarl.errors import ModelError

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
BASE: dict[str, object] = {
    "hidden_size": 64,
    "intermediate_size": 160,
    "max_position_embeddings": 256,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000,
    "vocab_size": 100,
    "hidden_act": "silu",
    "torch_dtype": "bfloat16",
}


def write(folder: Path, architecture: str = "LlamaForCausalLM", **changes: object) -> Path:
    """A config.json; a change to ... removes the field."""
    config = {**BASE, "architectures": [architecture], **changes}
    config = {field: value for field, value in config.items() if value is not ...}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def refused(folder: Path, *words: str) -> None:
    with pytest.raises(ModelError) as caught:
        read_shape(folder)
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    ("architecture", "qkv_bias", "qk_norm", "head_dim"),
    [
        ("LlamaForCausalLM", False, False, 16),
        ("Qwen2ForCausalLM", True, False, 16),
        ("Qwen3ForCausalLM", False, True, 128),
    ],
)
def test_each_family_has_its_own_attention(
    tmp_path: Path, architecture: str, qkv_bias: bool, qk_norm: bool, head_dim: int
) -> None:
    shape = read_shape(write(tmp_path, architecture))
    assert (shape.qkv_bias, shape.qk_norm, shape.head_dim) == (qkv_bias, qk_norm, head_dim)
    assert (shape.num_layers, shape.rope_theta, shape.tie_embeddings) == (2, 10000.0, False)


def test_form_of_transformers_5_reads_as_the_older_one(tmp_path: Path) -> None:
    older = read_shape(write(tmp_path, rope_scaling=LLAMA3))
    newer = read_shape(
        write(
            tmp_path,
            rope_theta=...,
            torch_dtype=...,
            dtype="bfloat16",
            rope_parameters={"rope_theta": 10000.0, **LLAMA3},
        )
    )
    assert older == newer
    assert newer.rope_scaling == Llama3Rope(8.0)


def test_shape_survives_json(tmp_path: Path) -> None:
    shape = read_shape(write(tmp_path, rope_scaling={**LLAMA3, "factor": 32.0}))
    assert ModelShape.from_dict(json.loads(json.dumps(shape.to_dict()))) == shape


@pytest.mark.parametrize("scaling", [None, {"type": "default"}, {"rope_type": "default"}])
def test_plain_rotary_embedding_has_no_scaling(tmp_path: Path, scaling: object) -> None:
    assert read_shape(write(tmp_path, rope_scaling=scaling)).rope_scaling is None


def test_llama_without_kv_heads_has_one_for_each_head(tmp_path: Path) -> None:
    assert read_shape(write(tmp_path, num_key_value_heads=...)).num_kv_heads == 4


@pytest.mark.parametrize("field", sorted(set(BASE) - {"hidden_act", "torch_dtype"}))
def test_missing_size_is_named(tmp_path: Path, field: str) -> None:
    refused(write(tmp_path, "Qwen3ForCausalLM", **{field: ...}), field, "None")


@pytest.mark.parametrize(
    ("architecture", "field", "value"),
    [
        ("LlamaForCausalLM", "attention_bias", True),
        ("LlamaForCausalLM", "mlp_bias", True),
        ("LlamaForCausalLM", "bias", True),
        ("LlamaForCausalLM", "hidden_act", "gelu"),
        ("LlamaForCausalLM", "attention_dropout", 0.1),
        ("LlamaForCausalLM", "rope_interleaved", True),
        ("LlamaForCausalLM", "partial_rotary_factor", 0.5),
        ("LlamaForCausalLM", "sliding_window", 4096),
        ("LlamaForCausalLM", "quantization_config", {"quant_method": "fp8"}),
        ("LlamaForCausalLM", "attention_multiplier", 0.01),
        ("LlamaForCausalLM", "attn_logit_softcapping", 50.0),
        ("LlamaForCausalLM", "final_logit_softcapping", 30.0),
        ("LlamaForCausalLM", "residual_multiplier", 0.2),
        ("LlamaForCausalLM", "no_rope_layers", [1, 0]),
        ("LlamaForCausalLM", "a_field_of_next_year", 1),
        ("LlamaForCausalLM", "tie_word_embeddings", "yes"),
        ("LlamaForCausalLM", "num_hidden_layers", -1),
        ("LlamaForCausalLM", "vocab_size", "100"),
        ("LlamaForCausalLM", "num_key_value_heads", 3),
        ("LlamaForCausalLM", "head_dim", 15),
        ("LlamaForCausalLM", "rms_norm_eps", 0),
        ("LlamaForCausalLM", "model_type", "mistral"),
        ("Qwen2ForCausalLM", "use_sliding_window", True),
        ("Qwen2ForCausalLM", "layer_types", ["full_attention", "sliding_attention"]),
        ("Qwen3ForCausalLM", "attention_bias", True),
        ("Qwen3ForCausalLM", "use_sliding_window", True),
    ],
)
def test_field_that_changes_the_mathematics_is_named_with_its_value(
    tmp_path: Path, architecture: str, field: str, value: object
) -> None:
    refused(write(tmp_path, architecture, **{field: value}), field, repr(value))


@pytest.mark.parametrize(
    ("rope", "word"),
    [
        ({"rope_type": "yarn", "factor": 4.0}, "yarn"),
        ({"type": "linear", "factor": 2.0}, "linear"),
        ({"rope_type": "dynamic", "factor": 2.0}, "dynamic"),
        ({**LLAMA3, "high_freq_factor": 8.0}, "high_freq_factor is 8.0"),
        ({**LLAMA3, "original_max_position_embeddings": 4096}, "8192"),
        ({**LLAMA3, "attention_factor": 2.0}, "attention_factor"),
        ({**LLAMA3, "factor": None}, "factor"),
        ({**LLAMA3, "low_freq_factor": None}, "low_freq_factor"),
        ({"rope_type": "default", "partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"full_attention": {"rope_type": "default"}}, "one object"),
        ({"rope_theta": 500000.0}, "rope_theta"),
        ({**LLAMA3, "type": "default"}, "type contradicts rope_type"),
    ],
)
def test_rotary_embedding_that_megatron_does_not_compute_is_refused(
    tmp_path: Path, rope: object, word: str
) -> None:
    refused(write(tmp_path, rope_scaling=rope), "rope", word)


def test_contradicting_rope_fields_are_refused(tmp_path: Path) -> None:
    rope = {"rope_theta": 5.0, "rope_type": "default"}
    refused(
        write(tmp_path, rope_theta=..., rope_parameters=rope, rope_scaling=LLAMA3), "contradict"
    )


@pytest.mark.parametrize(
    "architecture",
    ["Qwen2MoeForCausalLM", "DeepseekV2ForCausalLM", "MistralForCausalLM", "LlamaModel"],
)
def test_other_architecture_is_refused_with_those_supported(
    tmp_path: Path, architecture: str
) -> None:
    refused(write(tmp_path, architecture), architecture, *FAMILIES)


@pytest.mark.parametrize("architectures", [None, [], ["LlamaForCausalLM", "X"], "LlamaForCausalLM"])
def test_config_without_one_architecture_is_refused(tmp_path: Path, architectures: object) -> None:
    refused(write(tmp_path, architectures=architectures), "architectures")


def test_missing_folder_is_named(tmp_path: Path) -> None:
    refused(tmp_path / "nowhere", str(tmp_path / "nowhere"), "does not exist", "actor.model")


def test_folder_without_config_is_named(tmp_path: Path) -> None:
    refused(tmp_path, str(tmp_path), "no config.json")


@pytest.mark.parametrize("text", ["{", "", "[1]", "\xff"])
def test_config_that_is_not_a_json_object_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_bytes(text.encode("latin-1"))
    refused(tmp_path, str(tmp_path / "config.json"), "JSON")


def test_end_tokens_come_from_the_generation_config_first(tmp_path: Path) -> None:
    write(tmp_path, eos_token_id=2)
    assert eos_token_ids(tmp_path) == (2,)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [5, 7]}')
    assert eos_token_ids(tmp_path) == (5, 7)
    (tmp_path / "generation_config.json").write_text("{}")
    assert eos_token_ids(tmp_path) == (2,)


def test_model_without_end_tokens_has_none(tmp_path: Path) -> None:
    assert eos_token_ids(write(tmp_path)) == ()


def test_end_token_that_is_no_number_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="eos_token_id is '</s>'"):
        eos_token_ids(write(tmp_path, eos_token_id="</s>"))


def with_raw(folder: Path, field: str, text: str) -> Path:
    """A config.json with a field whose JSON is `text`, whatever Python would make of it."""
    path = write(folder, **{field: "@"}) / "config.json"
    path.write_text(path.read_text().replace('"@"', text))
    return folder


@pytest.mark.parametrize(
    ("field", "text", "words"),
    [
        ("label2id", "[" * 100_000 + "]" * 100_000, "nested more than 32 deep"),
        ("rope_scaling", "[" * 40 + "]" * 40, "nested more than 32 deep"),
        ("hidden_size", "9" * 5000, "an integer of thousands of digits"),
        ("hidden_size", "9" * 4000, "it can be 2147483647 at most"),
        ("hidden_size", "1000000000000", "hidden_size is 1000000000000; it can be 2147483647 at"),
        ("vocab_size", str(2**63), "vocab_size is 9223372036854775808; it can be"),
        ("num_hidden_layers", "10000000", "num_hidden_layers is 10000000; it can be 10000 at most"),
        ("num_attention_heads", str(2**20), "num_attention_heads is 1048576; it can be 65536"),
        ("rope_theta", "1" + "0" * 400, "finite number"),
        ("rope_theta", "1e400", "rope_theta is inf; a finite number"),
        ("rms_norm_eps", "Infinity", "rms_norm_eps is inf; a finite number"),
        ("rms_norm_eps", "NaN", "rms_norm_eps is nan; a positive number"),
    ],
)
def test_number_beyond_all_bounds_is_refused_in_one_short_line(
    tmp_path: Path, field: str, text: str, words: str
) -> None:
    with pytest.raises(ModelError) as caught:
        read_shape(with_raw(tmp_path, field, text))
    message = str(caught.value)
    assert words in message
    assert len(message) < 400 + len(str(tmp_path)) and "\n" not in message


def test_sizes_that_are_too_large_together_are_refused_with_their_tensor(tmp_path: Path) -> None:
    sizes = {"hidden_size": 2**20, "intermediate_size": 2**20}
    refused(
        write(tmp_path, head_dim=16, **sizes),
        "mlp.gate_proj.weight of shape [1048576, 1048576] has 4398046511104 bytes",
        "1099511627776 at most",
    )
    refused(
        write(tmp_path, intermediate_size=2**31 - 1, num_hidden_layers=10_000, head_dim=16),
        f"the model has {4 * 10_000 * 3 * 64 * (2**31 - 1) // 10**10}",
        f"{2**50} at most",
    )
