"""The page of `megarl memory`: the plan's numbers, of all stages, from a config.json alone."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from megarl.actor.shape import read_shape
from megarl.cli import main
from megarl.config.layouts import learner_layout
from megarl.config.load import load_layout
from megarl.planning.memory import predict

EXAMPLES = Path(__file__).parents[2] / "examples"
LLAMA = str(EXAMPLES / "reshard" / "llama-3.1-70b.toml")
PPO = str(EXAMPLES / "ppo.toml")


def planned(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, list[dict[str, int]]]:
    assert main(["memory", *arguments, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert isinstance(found, dict)
    return found


def test_memory_tells_of_each_stage_what_the_learner_would(capsys) -> None:
    first, last = planned(capsys, LLAMA)["learner"]
    config = load_layout(LLAMA)
    shape = read_shape(config.actor.model)
    layout = learner_layout(config, shape)
    for found, rank in ((first, 0), (last, 16)):
        plan = predict(config, shape, layout, rank, on_cpu=False)
        assert found["train"] == plan.peaks["train"]
        assert found["optimizer"] == plan.state.optimizer
    assert first["kept"] != last["kept"]


def test_memory_shows_what_recomputation_saves(capsys) -> None:
    full = planned(capsys, LLAMA)["learner"][0]
    none = planned(capsys, LLAMA, "--learner.recompute.granularity", "none")["learner"][0]
    assert none["train"] > full["train"] > full["weights"] + full["gradients"] + full["optimizer"]


def test_memory_has_a_critic_of_its_own_ranks_apart(capsys) -> None:
    own = ["--critic.ranks", "own", "--critic.gpus", "2", "--critic.parallel.pp", "2"]
    found = planned(capsys, PPO, *own)
    assert [len(found[name]) for name in ("learner", "critic")] == [1, 2]
    assert "sync" not in found["critic"][0]
    assert found["learner"][0]["weights"] < planned(capsys, PPO)["learner"][0]["weights"]


def test_memory_page_fits_and_shows_what_is_offloaded_only_where_it_is(capsys) -> None:
    assert main(["memory", LLAMA]) == 0
    out = capsys.readouterr().out
    assert "32 ranks: tp 8 x cp 1 x dp 2 x pp 2; bf16; GPUs" in out
    assert "offloaded" not in out and max(map(len, out.splitlines())) <= 120
    assert main(["memory", LLAMA, "--placement.mode", "colocated"]) == 0
    assert "offloaded" in capsys.readouterr().out


def test_memory_page_names_the_experts_axes(capsys) -> None:
    assert main(["memory", str(EXAMPLES / "reshard" / "kimi-k2.toml")]) == 0
    assert "256 ranks: tp 8 x cp 1 x dp 4 x pp 8; experts ep 32 x etp 1" in capsys.readouterr().out


def test_memory_names_a_layout_that_does_not_divide_the_model(capsys) -> None:
    assert main(["memory", LLAMA, "--learner.parallel.pp", "32"]) == 2
    assert capsys.readouterr().err.startswith("megarl: ")


def test_memory_loads_no_torch_and_no_engine() -> None:
    program = (
        "import sys; from megarl.cli import main; "
        f"assert main(['memory', {LLAMA!r}]) == 0; "
        "loaded = {'torch', 'megatron', 'sglang', 'transformers'} & set(sys.modules); "
        "assert not loaded, loaded"
    )
    subprocess.run([sys.executable, "-c", program], check=True, capture_output=True)


def test_page_on_memory_shows_what_the_command_prints(capsys) -> None:
    page = (Path(__file__).parents[2] / "docs" / "memory.md").read_text(encoding="utf-8")
    shown = page.partition("$ megarl memory examples/reshard/llama-3.1-70b.toml\n")[2]
    assert main(["memory", LLAMA]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith(shown.partition("```")[0].rstrip() + "\n")


@pytest.mark.parametrize(
    ("arguments", "most"),
    [
        ("--learner.recompute.granularity none", "87.1 GB"),
        (
            "--learner.recompute.granularity selective "
            '--learner.recompute.modules=["core_attn","mlp"]',
            "62.6 GB",
        ),
        ("--placement.learner_gpus 64", "48.6 GB"),
        ("--placement.learner_gpus 16", "88.3 GB"),
        ("--learner.parallel.pp 4", "45.5 GB"),
        ("--placement.mode colocated", "55.5 GB"),
    ],
)
def test_table_of_the_page_on_memory_is_what_the_command_says(
    arguments: str, most: str, capsys
) -> None:
    page = (Path(__file__).parents[2] / "docs" / "memory.md").read_text(encoding="utf-8")
    assert f"| {most} |" in page
    assert main(["memory", LLAMA, *arguments.split()]) == 0
    assert f"the most    {most} on a device" in capsys.readouterr().out
