"""A model that the learner does not compute is refused before anything else is read of it."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from megarl.actor.families import FAMILIES
from megarl.config import check_model
from tests.actor.published import FP8, PUBLISHED


def test_model_of_a_family_that_is_not_trained_is_refused_in_one_sentence(
    place, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The folder still holds another model's weights, and 3 ranks divide no size.
    name = "Qwen3MoeForCausalLM"
    untrained = {**FAMILIES, name: replace(FAMILIES[name], trained=False)}
    monkeypatch.setattr(check_model, "FAMILIES", untrained)
    (place.model / "config.json").write_text(json.dumps(PUBLISHED["Qwen3-30B-A3B"]))
    assert place.violation("--learner.parallel.tp", "3") == (
        f"{place.model} is a {name}, which the learner does not compute yet (megarl plans its "
        "layouts only); use one of LlamaForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM, "
        "DeepseekV3ForCausalLM, Glm4MoeForCausalLM"
    )


def test_float8_checkpoint_of_a_trained_family_is_refused(place) -> None:
    (place.model / "config.json").write_text(json.dumps({**PUBLISHED["Qwen3-8B"], **FP8}))
    assert place.violation().startswith(f"{place.model} has float8 weights")


@pytest.mark.parametrize(
    ("name", "change", "fault"),
    [
        ("Kimi-K2", {"norm_topk_prob": False}, "Megatron normalizes chosen sigmoid scores"),
        ("Qwen3-30B-A3B", {"num_experts_per_tok": 1}, "Megatron normalizes no single score"),
        (
            "Moonlight-16B-A3B",
            {"n_group": 4, "topk_group": 2},
            "a group is chosen by 2 scores, but Megatron takes num_experts_per_tok / topk_group = "
            "6 / 2",
        ),
    ],
)
def test_router_that_megatron_computes_otherwise_is_refused(
    place, name: str, change: dict[str, object], fault: str
) -> None:
    config = {**PUBLISHED[name], **change}
    config.pop("quantization_config", None)
    (place.model / "config.json").write_text(json.dumps(config))
    text = place.violation()
    assert fault in text
    assert text.endswith("megarl cannot train it")
