"""A reference that would not be what its settings say is refused."""

from __future__ import annotations

import shutil

import pytest


@pytest.mark.parametrize(("name", "value"), [("model", "elsewhere"), ("storage", "fp8")])
def test_setting_of_a_reference_without_a_kl_term_is_refused(place, name: str, value: str) -> None:
    text = place.violation(f"--reference.{name}", value)
    assert text.startswith(f"reference.{name} with kl.coef = 0: there is no reference then")


def test_reference_of_the_policy_s_shape_is_taken_and_its_path_is_made_whole(place) -> None:
    other = place.model.with_name("other")
    shutil.copytree(place.model, other)
    config = place.load("--kl.coef", "0.1", "--reference.model", str(other))
    assert config.reference.model == str(other)


def test_reference_of_another_shape_is_refused_by_what_differs(place) -> None:
    other = place.model.with_name("other")
    shutil.copytree(place.model, other)
    place.change_model(rope_theta=500.0)
    text = place.violation("--kl.coef", "0.1", "--reference.model", str(other))
    assert text.startswith("reference.model has rope_theta = 10000.0, actor.model has 500.0; ")


def test_reference_that_is_no_checkpoint_is_named(place) -> None:
    text = place.violation("--kl.coef", "0.1", "--reference.model", "/nowhere")
    assert text.startswith("reference.model: ")
