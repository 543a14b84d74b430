"""The one-file loop is the oracle of the real one: same loss, same gradients, and it runs."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch

from tests.learner.parity import TEMPERATURE, WEIGHTS, Oracle

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture(scope="module")
def minimal() -> ModuleType:
    """examples/minimal_loop.py as a module."""
    spec = importlib.util.spec_from_file_location("minimal_loop", EXAMPLES / "minimal_loop.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["minimal_loop"] = module
    spec.loader.exec_module(module)
    return module


def test_loss_and_gradients_on_the_recorded_batch_are_those_the_learner_is_tested_against(
    minimal: ModuleType, tmp_path: Path
) -> None:
    oracle = Oracle("qwen3", tmp_path)
    model = oracle.model
    model.zero_grad()
    longest = max(len(sample.response_ids) for sample, _ in oracle.samples)

    def padded(values: list[float]) -> torch.Tensor:
        return torch.tensor([*values, *[0.0] * (longest - len(values))])

    logp, old, reference, mask = [], [], [], []
    for sample, _ in oracle.samples:
        tokens = torch.tensor([[*sample.prompt_ids, *sample.response_ids]])
        num_response = len(sample.response_ids)
        row = minimal.token_logprobs(model, tokens, num_response, TEMPERATURE)[0]
        logp.append(torch.nn.functional.pad(row, (0, longest - num_response)))
        old.append(padded(list(sample.behavior_logprobs)))
        reference.append(padded([0.9 * value for value in sample.behavior_logprobs]))
        mask.append(padded([float(trains) for trains in sample.loss_mask]).bool())
    advantage = torch.tensor([ref.advantage for _, ref in oracle.samples])
    loss = minimal.policy_loss(
        torch.stack(logp),
        torch.stack(old),
        advantage,
        torch.stack(mask),
        WEIGHTS["clip_low"],
        WEIGHTS["clip_high"],
        torch.stack(reference),
        WEIGHTS["kl_coef"],
    )
    loss.backward()
    found = {name: p.grad.numpy().copy() for name, p in model.named_parameters()}

    expected_loss = oracle.loss(WEIGHTS["kl_coef"], 0.0)
    assert loss.item() == pytest.approx(expected_loss.item(), rel=1e-6)
    model.zero_grad()
    expected_loss.backward()
    for name, parameter in model.named_parameters():
        difference = np.linalg.norm(found[name] - parameter.grad.numpy())
        assert difference <= 1e-5 * np.linalg.norm(parameter.grad.numpy()), name


def test_two_steps_run_and_name_their_rewards() -> None:
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / "minimal_loop.py"), "--steps", "2"],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    lines = done.stdout.splitlines()
    assert [line.split("  ")[0] for line in lines] == ["step 1/2", "step 2/2"]
    assert 0.1 < float(lines[0].split()[-1]) < 0.7


def test_all_components_and_stages_are_named_in_order() -> None:
    text = (EXAMPLES / "minimal_loop.py").read_text()
    loop = text[text.index("def main()") :]
    stages = ["# a prompts", "# b rollout", "# c reward", "# d advantage", "# e buffer"]
    places = [loop.index(stage) for stage in [*stages, "# f learn", "# g weight sync"]]
    assert places == sorted(places)
    for number in range(1, 7):
        assert f"omponent {number}" in text
    assert len(text.splitlines()) <= 165
