"""Real SGLang servers of float8 that start empty: what each mode of a sync leaves in them.

The reference is a server that loads, by SGLang's own loader, a checkpoint that numpy quantized; of
log-probs, Hugging Face with the numbers that the codes stand for.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megarl.actor.shape import ModelShape
from megarl.config.served import model_overrides
from megarl.float8 import BlockScaling, quantize
from megarl.reshard.mesh import LearnerMesh
from megarl.types import SyncReport
from megarl.weight_sync.modes import ModeSettings
from megarl.weight_sync.probe import Probe
from tests.reshard.test_sglang_loaders import QWEN3, large
from tests.weight_sync import full_ranks, independent_float8
from tests.weight_sync.full_ranks import Policy
from tests.weight_sync.servers import RealServer

TOKENS = (7, 33, 12, 50, 4, 4, 51, 20, 13)
BOUND = 0.1  # nats, mean: bf16 activations of two engines, equal weights
CASES: dict[str, tuple[ModelShape, LearnerMesh]] = {
    "qwen3": (large(QWEN3), LearnerMesh(tp=2)),
}
EMPTY = ("--load-format", "dummy", "--json-model-override-args", model_overrides((128, 128)))


def test_both_quantizers_make_the_same_bits() -> None:
    weight = torch.randn(200, 300, generator=torch.Generator().manual_seed(3))
    weight[:128, :128] *= 1e-3
    weight[5, 7] = 0.0
    codes, scales, _ = independent_float8.quantized(weight.numpy())
    mine, mine_scales = quantize(weight, BlockScaling(128, 128))
    assert np.array_equal(mine.view(torch.uint8).numpy(), codes)
    assert np.array_equal(mine_scales.numpy(), scales)


def test_independent_quantizer_rounds_ties_to_even() -> None:
    for number, code in ((17.0, 0x58), (19.0, 0x5A), (0.0, 0), (-448.0, 0xFE), (2.0**-10, 0)):
        assert independent_float8.codes_of(np.float32([number]))[0] == code, number


def meant_logprobs(folder: Path) -> tuple[float, ...]:
    """Hugging Face's log-probs of TOKENS[1:], computed in float32."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder / "meant", dtype=torch.float32)
    with torch.no_grad():
        logits = model(torch.tensor([TOKENS])).logits[0]
    scored = torch.log_softmax(logits, -1)[:-1]
    return tuple(scored[range(len(TOKENS) - 1), list(TOKENS[1:])].tolist())


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_float8_servers_hold_and_serve_what_an_independent_quantizer_makes(
    name: str, tmp_path: Path
) -> None:
    shape, mesh = CASES[name]
    folders = {seed: independent_float8.save(tmp_path / str(seed), shape, seed) for seed in (1, 2)}
    probes = {s: Probe(TOKENS, meant_logprobs(folder), BOUND) for s, folder in folders.items()}
    made: dict[str, Any] = {"dtype": "bfloat16"}
    server = RealServer("s", folders[2] / "meant", 2, tmp_path / "s", switches=EMPTY, **made)
    loaded = RealServer("l", folders[1] / "quantized", 2, tmp_path / "l", **made)
    ranks = full_ranks.start(mesh.size)
    version = 0

    def publish(seed: int, settings: ModeSettings, servers: Sequence[RealServer]) -> SyncReport:
        nonlocal version
        version += 1
        policy = Policy(shape, mesh, seed, "bf16", BlockScaling(128, 128))
        settings = dataclasses.replace(settings, bucket_bytes=24 << 10, model=folders[2] / "meant")
        endpoints = [one.endpoint for one in servers]
        answers = ranks.ask(("publish", policy, (settings, version, endpoints, probes[seed], None)))
        report: SyncReport = answers[0]
        assert isinstance(report, SyncReport), answers
        assert [one.error for one in report.servers] == [""] * len(servers)
        assert 0.02 < report.quantization.mean <= report.quantization.largest < 0.04
        return report

    try:
        server.wait()
        loaded.wait()
        wanted = loaded.checksums()
        for settings in (
            ModeSettings("auto"),
            ModeSettings("hf", hf_via="broadcast"),
            ModeSettings("hf", hf_via="request"),
            ModeSettings("disk", disk=tmp_path / "run"),
        ):
            publish(2, ModeSettings("exact"), [server])
            assert server.checksums() != wanted
            found = publish(1, settings, [server]).servers[0]
            print(name, settings.mode, found.probe_max_abs_logprob)
            assert server.checksums() == wanted, settings
        publish(2, ModeSettings("exact"), [server, loaded])  # one that has loaded a checkpoint too
        assert server.checksums() == loaded.checksums() != wanted
    finally:
        ranks.ask(("close", None, ()))
        ranks.kill()
        server.kill()
        loaded.kill()
