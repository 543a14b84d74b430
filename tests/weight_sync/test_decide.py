"""Which mode a server gets, from what it says of itself; why not another."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megarl.config.capability import ServerFacts
from megarl.types import ServerEndpoint
from megarl.weight_sync.modes import Setting, decide

QWEN3 = "Qwen3ForCausalLM"
FACTS = ServerFacts("cpu", "none", "auto", "0.5.23", True, 1, 1, 1, False)
SERVER = ServerEndpoint("server-0", "http://127.0.0.1:1", 1, 0)
HERE = "127.0.0.1"
BLOCK = (128, 128)
FLOAT8 = replace(FACTS, quantization="fp8", fp8_block=BLOCK)


@pytest.mark.parametrize(
    ("setting", "facts", "mode"),
    [
        ("auto", FACTS, "exact"),
        ("auto", replace(FACTS, has_loader=False), "hf"),
        ("auto", replace(FACTS, device="cuda"), "hf"),
        ("exact", FACTS, "exact"),
        ("shared", FACTS, "exact"),
        ("hf", FACTS, "hf"),
        ("disk", FACTS, "disk"),
    ],
)
def test_mode_follows_the_setting_and_what_is_proved(
    setting: Setting, facts: ServerFacts, mode: str
) -> None:
    found = decide(setting, SERVER, facts, QWEN3, HERE)
    assert (found.mode, found.error) == (mode, "")
    assert found.why


@pytest.mark.parametrize(
    ("setting", "facts", "reason"),
    [
        ("exact", replace(FACTS, device="cuda"), "unproved"),
        ("shared", replace(FACTS, has_loader=False), "custom-weight-loader"),
        ("auto", replace(FACTS, tp=2), "tp=2"),
        ("hf", replace(FACTS, copies=2), "data-parallel replicas"),
        ("hf", FLOAT8, "its weights are fp8 in blocks of 128 x 128"),
        ("auto", replace(FACTS, quantization="fp8"), "rollout.precision.weights = fp8"),
        ("auto", replace(FACTS, quantization="awq"), "Marlin"),
        ("disk", replace(FACTS, has_draft=True), "draft model"),
    ],
)
def test_server_that_no_mode_serves_is_refused_in_words(
    setting: Setting, facts: ServerFacts, reason: str
) -> None:
    found = decide(setting, SERVER, facts, QWEN3, HERE)
    assert reason in found.error and SERVER.name in found.error


def test_without_a_probe_only_checksums_can_show_that_weights_arrived() -> None:
    unproved = replace(FACTS, device="cuda")
    found = decide("auto", SERVER, unproved, QWEN3, HERE, can_probe=False)
    assert (found.mode, found.error) == ("exact", "")
    assert "checksums must show it" in found.why
    found = decide("auto", SERVER, replace(FACTS, has_loader=False), QWEN3, HERE, can_probe=False)
    assert "needs a log-prob probe" in found.error


def test_server_elsewhere_gets_hf_from_a_learner_that_only_this_machine_reaches() -> None:
    away = replace(SERVER, url="http://10.0.0.7:30000")
    found = decide("auto", away, FACTS, QWEN3, HERE)
    assert found.mode == "hf" and "cannot reach" in found.why
    assert decide("auto", away, FACTS, QWEN3, "10.0.0.1").mode == "exact"


def test_float8_servers_are_written_in_place_only_where_that_was_shown() -> None:
    architecture = QWEN3
    found = decide("auto", SERVER, FLOAT8, architecture, HERE, fp8_block=BLOCK)
    assert (found.mode, found.error) == ("exact", "")
    found = decide("auto", SERVER, FLOAT8, "Qwen3MoeForCausalLM", HERE, fp8_block=BLOCK)
    assert (found.mode, found.error) == ("hf", "")
    gpu = replace(FLOAT8, device="cuda")
    found = decide("auto", SERVER, gpu, architecture, HERE, fp8_block=BLOCK)
    assert (found.mode, found.error) == ("hf", "")
    assert "Blackwell" in found.why
    found = decide("auto", SERVER, gpu, architecture, HERE, can_probe=False, fp8_block=BLOCK)
    assert found.mode == "exact" and "checksums must show it" in found.why


@pytest.mark.parametrize(
    "facts", [FACTS, replace(FLOAT8, fp8_block=(64, 64)), replace(FACTS, quantization="fp8")]
)
def test_float8_goes_to_no_server_of_other_weights(facts: ServerFacts) -> None:
    found = decide("auto", SERVER, facts, QWEN3, HERE, fp8_block=BLOCK)
    assert "rollout.precision has float8 in blocks of 128 x 128; start it with" in found.error
