"""A checkpoint of a learner with routed experts continues in other layouts, experts among them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest

from tests.learner import recorded
from tests.learner.parity import Case, Oracle

ROOT = Path(__file__).parents[2]
LEARNERS = ((1, {"tp": 2, "ep": 2}), (2, {"ep": 2}), (2, {}), (1, {"pp": 2}))  # (dp, sizes)
NO_EXPERTS = (1, {"pp": 2, "pipeline_layout": "Et|tttL"})  # on the first stage
IN_FAMILY = {
    "qwen3-moe": LEARNERS,
    "deepseek-v3": (NO_EXPERTS, *LEARNERS[1:]),
    "glm4-moe": (*LEARNERS[:-1], NO_EXPERTS),
}

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where one torchrun has written the answers of all learners of all families."""
    made = tmp_path_factory.mktemp("experts")
    cases = []
    for family in IN_FAMILY:
        samples = Oracle(family, made / f"{family}-model").samples
        refs = [ref for _, ref in samples]
        cases.append(
            {
                "name": family,
                "configs": [
                    Case(family, dp, sizes).config(made / f"{family}-model").model_dump()
                    for dp, sizes in IN_FAMILY[family]
                ],
                "plans": {dp: asdict(recorded.plan(refs, dp)) for dp in (1, 2)},
                "sequences": [(s.prompt_ids, s.response_ids) for s, _ in samples],
            }
        )
    (made / "cases.json").write_text(json.dumps(cases))
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    program = ["-m", "tests.learner.expert_checkpoint_ranks", str(made / "cases.json")]
    done = subprocess.run(
        [sys.executable, *torchrun, *program],
        capture_output=True,
        text=True,
        check=False,
        timeout=400,
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr[-20000:]
    return made


@pytest.mark.parametrize("family", IN_FAMILY)
@pytest.mark.parametrize("number", range(1, len(LEARNERS)))
def test_learner_of_another_layout_continues_as_the_one_that_saved(
    folder: Path, family: str, number: int
) -> None:
    saved, *loaded = json.loads((folder / f"{family}.json").read_text())
    found = loaded[number - 1]
    assert found["version"] == 2
    for mine, theirs in zip(found["logprobs"], saved["logprobs"], strict=True):
        assert mine == pytest.approx(theirs, abs=2e-5)
    for mine, theirs in zip(found["steps"], saved["steps"], strict=True):
        assert mine == pytest.approx(theirs, rel=2e-3, abs=1e-6)
