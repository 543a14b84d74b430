"""A model that the learner does not compute is refused before anything else is read of it."""

from __future__ import annotations

import json

import pytest

from tests.actor.published import FP8, PUBLISHED


@pytest.mark.parametrize("name", ["Qwen3-30B-A3B", "Moonlight-16B-A3B", "Kimi-K2", "GLM-4.5-Air"])
def test_model_of_a_family_that_is_not_trained_is_refused_in_one_sentence(place, name: str) -> None:
    # The folder still holds another model's weights, and 3 ranks divide no size.
    (place.model / "config.json").write_text(json.dumps(PUBLISHED[name]))
    architecture = PUBLISHED[name]["architectures"][0]
    assert place.violation("--learner.parallel.tp", "3") == (
        f"{place.model} is a {architecture}, which the learner does not compute yet (megarl plans "
        "its layouts only); use one of LlamaForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM"
    )


def test_float8_checkpoint_of_a_trained_family_is_refused(place) -> None:
    (place.model / "config.json").write_text(json.dumps({**PUBLISHED["Qwen3-8B"], **FP8}))
    assert place.violation().startswith(f"{place.model} has float8 weights")
