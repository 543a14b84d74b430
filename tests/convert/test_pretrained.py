"""A real pretrained model there and back: bits, and the logits of transformers on the result."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from megarl.cli import main
from megarl.reshard.mesh import LearnerMesh
from tests.convert.logits import Asked, assert_logits_agree
from tests.convert.test_convert import assert_same, tensors
from tests.megatron_engine import Engine

SMOLLM2 = Path(__file__).parents[2] / ".cache/smollm2"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not (SMOLLM2 / "model.safetensors").is_file(), reason="`make smollm2` fetches the model"
    ),
]


def test_smollm2_is_the_same_after_both_ways(tmp_path: Path) -> None:
    made, back = tmp_path / "made", tmp_path / "back"
    assert main(["convert", str(SMOLLM2), str(made), "--shard-gb", "0.2"]) == 0
    assert main(["convert", str(made), str(back), "--shard-gb", "0.1"]) == 0
    assert len(list(back.glob("*.safetensors"))) > 2
    assert_same(tensors(back), tensors(SMOLLM2))
    assert main(["compare", str(SMOLLM2), str(made)]) == 0
    tokens = torch.arange(100, 132)[None]
    logits = []
    for folder in (SMOLLM2, back):
        model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
        with torch.no_grad():
            logits.append(model(tokens).logits)
    assert torch.equal(logits[0], logits[1])


def test_logits_of_smollm2_in_megatron_are_those_of_transformers(
    megatron_engine: Engine, tmp_path: Path
) -> None:
    made, asked = tmp_path / "made", tmp_path / "asked"
    assert main(["convert", str(SMOLLM2), str(made)]) == 0
    asked.mkdir()
    assert_logits_agree(megatron_engine, asked, [Asked(SMOLLM2, made, LearnerMesh(pp=2))])
