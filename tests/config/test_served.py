"""What servers hold of a policy in float8, and what keeps it from them, by settings alone."""

from __future__ import annotations

import json
from typing import Any

import pytest

from megarl.actor.parameters import block_table
from megarl.actor.shape import read_shape
from megarl.config.bounds import PROBE_FP8_BOUND, mean_difference_bound, probe_bound
from megarl.config.served import block_of, model_overrides, served_block, served_dtype

FP8 = ("--rollout.precision.weights", "fp8")
WIDE: dict[str, Any] = {
    "hidden_size": 256, "head_dim": 128, "num_attention_heads": 2, "num_key_value_heads": 2,
    "intermediate_size": 512,
}  # fmt: skip


@pytest.mark.parametrize("params", ["fp32", "bf16"])
def test_servers_of_float8_compute_in_bf16_whatever_the_learner_does(place, params: str) -> None:
    place.change_model(**WIDE)
    config = place.load(*FP8, "--learner.precision.params", params)
    assert (served_block(config), served_dtype(config)) == ((128, 128), "bf16")
    assert probe_bound(config) == mean_difference_bound(config) == PROBE_FP8_BOUND
    plain = place.load("--learner.precision.params", params)
    assert (served_block(plain), served_dtype(plain)) == (None, params)


def test_only_linear_weights_of_layers_are_quantized(place) -> None:
    place.change_model(**WIDE, tie_word_embeddings=False)
    quantized = {p.name for p in block_table(read_shape(place.model)).parameters if p.quantized}
    layer = "model.layers.0."
    attention = {f"{layer}self_attn.{name}_proj.weight" for name in "qkvo"}
    mlp = {f"{layer}mlp.{name}_proj.weight" for name in ("gate", "up", "down")}
    assert {name for name in quantized if name.startswith(layer)} == attention | mlp
    assert all(name.startswith("model.layers.") for name in quantized)


def test_quantization_of_another_kind_is_not_taken_for_square_blocks() -> None:
    ours = json.loads(model_overrides((64, 64)))["quantization_config"]
    assert block_of(ours) == (64, 64)
    for change in ({"activation_scheme": "static"}, {"quant_method": "mxfp8"}, {"more": 1}):
        assert block_of({**ours, **change}) is None
    assert block_of({**ours, "weight_block_size": [128]}) is None
    assert block_of(None) is None


@pytest.mark.parametrize(
    ("model", "arguments", "text"),
    [
        (WIDE, ("--rollout.engine_args.load_format", "auto"), "servers start without weights"),
        (WIDE, ("--learner.parallel.tp", "2", "--rollout.precision.fp8_block", "256"), "whole blo"),
        ({**WIDE, "intermediate_size": 448}, (), "pads 448 columns of down_proj to a multiple of"),
        (WIDE, ("--rollout.parallel.tp", "8"), "pads 2 attention heads to a multiple of 8"),
        (
            {**WIDE, "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2",
             "hidden_size": 256, "head_dim": None},
            (),
            "SGLang's Qwen2ForCausalLM is not known to load the scales",
        ),
    ],
)  # fmt: skip
def test_what_cannot_be_served_in_float8_is_refused_in_words(
    place, model: dict[str, Any], arguments: tuple[str, ...], text: str
) -> None:
    place.change_model(**{name: value for name, value in model.items() if value is not None})
    found = "\n".join(place.violations(*FP8, "--launch.device", "cpu", *arguments))
    assert text in found


def test_float8_checkpoint_as_the_policy_is_refused_with_what_to_set(place) -> None:
    place.change_model(**WIDE)
    config = json.loads((place.model / "config.json").read_text())
    config |= json.loads(model_overrides((128, 128)))
    (place.model / "config.json").write_text(json.dumps(config))
    text = "\n".join(place.violations(*FP8))
    assert "does not train; use the checkpoint in bfloat16, with rollout.precision.weights" in text


@pytest.mark.parametrize("mode", ["exact", "shared"])
def test_mode_that_is_not_shown_for_such_servers_is_refused_before_anything_starts(
    place, mode: str
) -> None:
    place.change_model(**WIDE)
    arguments = (*FP8, "--weight_sync.mode", mode)
    assert place.load(*arguments, "--launch.device", "cpu").weight_sync.mode == mode
    text = place.violation(*arguments, "--launch.device", "cuda")
    assert text.startswith(f"weight_sync.mode = {mode} is unproved for these servers: no GPU")
