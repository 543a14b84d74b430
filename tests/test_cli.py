"""The command line: its commands, its errors and its exit status."""

from __future__ import annotations

import json
import subprocess
import sys
import types
from pathlib import Path

import pytest

import megarl
from megarl.cli import main
from megarl.errors import LearnerError, MegarlError

EXAMPLES = Path(__file__).parent.parent / "examples"
EXAMPLE = str(EXAMPLES / "quickstart.toml")
LLAMA = str(EXAMPLES / "reshard" / "llama-3.1-405b.toml")


@pytest.fixture
def run_training(monkeypatch):
    """Stands in for the run; the test sets what it does."""
    module = types.ModuleType("megarl.launch.run")
    module.calls = []
    module.status = 0

    def run_training(config: object, run_dir: Path) -> int:
        module.calls.append((config, run_dir))
        return module.status

    module.run_training = run_training
    monkeypatch.setitem(sys.modules, "megarl.launch.run", module)
    return module


def test_version_is_printed(capsys) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"megarl {megarl.__version__}\n"


def test_module_runs_as_the_command() -> None:
    answer = subprocess.run([sys.executable, "-m", "megarl", "--version"], capture_output=True)
    assert (answer.returncode, answer.stdout.split()[0]) == (0, b"megarl")


def test_the_quickstart_example_can_run(capsys) -> None:
    assert main(["config", EXAMPLE]) == 0
    assert 'name = "quickstart"' in capsys.readouterr().out


def test_train_hands_settings_and_run_folder_to_the_launcher(
    run_training, monkeypatch, tmp_path
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["train", EXAMPLE, "--run.seed", "3"]) == 0
    [(config, run_dir)] = run_training.calls
    assert (config.run.seed, run_dir) == (3, tmp_path / "runs" / "quickstart")


@pytest.mark.parametrize(
    "arguments",
    [
        ["train"],
        ["train", "--run.seed", "1"],
        ["config"],
        ["trian", EXAMPLE],
        ["train", "no-such-file.toml"],
        ["train", EXAMPLE, "--no.such", "1"],
        ["train", EXAMPLE, "--actor.model", "no-such-folder"],
        ["train", EXAMPLE, "--learner.parallel.tp", "3"],
        ["train", EXAMPLE, "--prompts.template", "chat"],
        ["help", "no.such.setting"],
        ["memory", "no-such-file.toml"],
        ["memory", EXAMPLE, "--actor.model", "no-such-folder"],
        ["memory", EXAMPLE, "--learner.parallel.tp", "3"],
        ["reshard", "explain"],
        ["reshard", "show", EXAMPLE],
        ["reshard", "explain", "no-such-file.toml"],
        ["reshard", "explain", EXAMPLE, "--no.such", "1"],
        ["reshard", "explain", EXAMPLE, "--learner.parallel.tp", "3"],
        ["reshard", "explain", EXAMPLE, "--actor.model", "no-such-folder"],
        ["reshard", "explain", EXAMPLE, "--rollout.engine_args.mem_fraction", "0.5"],
        ["reshard", "explain", EXAMPLE, "--learner.transformer_config.add_bias_linear", "true"],
        ["reshard", "explain", EXAMPLE, "--fabric", "token-ring"],
        ["reshard", "explain", EXAMPLE, "--gpus-per-node", "0"],
        ["reshard", "explain", EXAMPLE, "--json", "--tensor"],
        ["reshard", "explain", EXAMPLE, "--tensor", "model.layers.0.self_attn.q_porj.weight"],
    ],
)
def test_wrong_input_ends_with_status_2_and_one_error(arguments, run_training, capsys) -> None:
    assert main(arguments) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n"), run_training.calls) == ("", 1, [])
    assert err.startswith("megarl: ")


def test_several_violations_are_listed_one_a_line(capsys) -> None:
    assert main(["config", EXAMPLE, "--no.such", "1", "--run.seed", "x"]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "megarl: 2 things keep this from running:"
    assert [line[:4] for line in lines[1:]] == ["  - "] * 2


def test_train_ends_with_the_status_of_the_run(run_training) -> None:
    run_training.status = 143
    assert main(["train", EXAMPLE]) == 143


def test_unknown_engine_argument_is_listed_with_the_other_violations(capsys) -> None:
    arguments = ["--rollout.engine_args.mem_fraction", "0.5", "--learner.parallel.tp", "3"]
    assert main(["config", EXAMPLE, *arguments]) == 2
    err = capsys.readouterr().err
    assert "rollout.engine_args.mem_fraction" in err
    assert "learner.parallel.tp = 3" in err


def test_failed_run_ends_with_the_status_of_its_error(run_training, capsys) -> None:
    def fail(config: object, run_dir: Path) -> None:
        raise LearnerError("learner rank 1 on host a died from SIGKILL in phase step")

    run_training.run_training = fail
    assert main(["train", EXAMPLE]) == LearnerError.exit_status == 1
    assert capsys.readouterr().err == (
        "megarl: learner rank 1 on host a died from SIGKILL in phase step\n"
    )


def test_interrupted_run_ends_with_status_130(run_training, capsys) -> None:
    def interrupt(config: object, run_dir: Path) -> None:
        raise KeyboardInterrupt

    run_training.run_training = interrupt
    assert main(["train", EXAMPLE]) == 130


def test_a_bug_keeps_its_traceback(run_training) -> None:
    def stumble(config: object, run_dir: Path) -> None:
        raise ZeroDivisionError

    assert not issubclass(ZeroDivisionError, MegarlError)
    run_training.run_training = stumble
    with pytest.raises(ZeroDivisionError):
        main(["train", EXAMPLE])


def test_help_describes_one_setting_with_its_default(capsys) -> None:
    assert main(["help", "loop.max_staleness"]) == 0
    out = capsys.readouterr().out
    assert "--loop.max_staleness  `0`; default 0" in out
    assert "0 is strictly synchronous" in out


def test_help_of_a_group_lists_the_groups_inside_it(capsys) -> None:
    assert main(["help", "learner"]) == 0
    out = capsys.readouterr().out
    assert "--learner.epochs_per_rollout" in out
    assert "--learner.optimizer.lr" in out


@pytest.mark.parametrize("arguments", [["train", "--help"], ["config", EXAMPLE, "-h"], ["help"]])
def test_help_lists_every_setting(arguments, capsys) -> None:
    from megarl.config.settings import all_settings

    assert main(arguments) == 0
    out = capsys.readouterr().out
    assert [name for name in all_settings() if f"--{name} " not in out] == []


def test_output_into_a_closed_pipe_is_no_error() -> None:
    command = f"{sys.executable} -m megarl help | head -1"
    answer = subprocess.run(["bash", "-c", f"set -o pipefail; {command}"], capture_output=True)
    assert (answer.returncode, answer.stderr) == (0, b"")


def test_reshard_explain_prints_layouts_bytes_and_seconds(capsys) -> None:
    assert main(["reshard", "explain", LLAMA, "--fabric=h200"]) == 0
    out = capsys.readouterr().out
    words = " ".join(out.split())
    assert "512 ranks: tp 8 x cp 1 x dp 4 x pp 16; bf16" in words
    assert "256 ranks: 16 servers of 16: tp 16; bf16" in words
    assert "learner on nodes 0..63, servers on nodes 64..95" in words
    assert "moved / minimum 1.0000" in words
    assert "h200 (DGX H200" in words
    assert max(len(line) for line in out.splitlines()) <= 110


def test_reshard_explain_shows_one_tensor(capsys) -> None:
    name = "model.layers.0.self_attn.k_proj.weight"
    assert main(["reshard", "explain", LLAMA, "--tensor", name]) == 0
    out = capsys.readouterr().out
    assert "[128:256]   @2048  1..25 by 8" in out
    assert "fanout   @1024 -> @1024" in out


def test_reshard_explain_gives_one_json_object(capsys) -> None:
    arguments = [f"--tensor={name}" for name in ("model.norm.weight",)]
    assert main(["reshard", "explain", LLAMA, "--json", *arguments, "--gpus-per-node", "16"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["learner"]["num_ranks"] == 512
    assert found["servers"] | {"layout": ""} == {
        "layout": "",
        "num_ranks": 256,
        "servers": 16,
        "tp": 16,
        "ep": 1,
        "pp": 1,
        "attention_dp": 1,
    }
    assert found["placement"]["gpus_per_node"] == 16
    assert len(found["placement"]["learner_nodes"]) == 32
    assert found["tensor"]["shape"] == [16384]


def test_reshard_explain_names_a_size_that_does_not_divide(capsys) -> None:
    assert main(["reshard", "explain", LLAMA, "--learner.parallel.last_stage_layers", "8"]) == 2
    assert "the 111 layers left do not split" in capsys.readouterr().err


def test_reshard_explain_lists_all_violations(capsys) -> None:
    wrong = ["--rollout.parallel.ep", "3", "--learner.parallel.cp", "3"]
    assert main(["reshard", "explain", LLAMA, *wrong]) == 2
    assert "2 things keep this from running" in capsys.readouterr().err


def test_reshard_explain_loads_no_torch_and_no_engine() -> None:
    program = (
        "import sys; from megarl.cli import main; "
        f"assert main(['reshard', 'explain', {LLAMA!r}]) == 0; "
        "loaded = {'torch', 'megatron', 'sglang', 'transformers'} & set(sys.modules); "
        "assert not loaded, loaded"
    )
    subprocess.run([sys.executable, "-c", program], check=True, capture_output=True)


@pytest.mark.parametrize("arguments", [[], ["--help"], ["explain", "-h"]])
def test_help_of_reshard_names_its_options(arguments, capsys) -> None:
    assert main(["reshard", *arguments]) == 0
    out = capsys.readouterr().out
    assert [name for name in ("--tensor", "--fabric", "--json") if name not in out] == []


@pytest.mark.parametrize("number", ["9" * 5000, "\u0663", "99999999", "1_0", "-1"])
def test_gpus_per_node_is_a_number_of_a_machine(number: str, capsys) -> None:
    assert main(["reshard", "explain", LLAMA, "--gpus-per-node", number]) == 2
    err = capsys.readouterr().err
    assert "expected a number from 1 to" in err and len(err) < 300


@pytest.mark.parametrize("arguments", ["help", "--version", f"config {EXAMPLE}"])
def test_output_into_a_full_disk_is_one_line_and_status_1(arguments: str) -> None:
    command = f"{sys.executable} -m megarl {arguments} > /dev/full"
    answer = subprocess.run(["bash", "-c", command], capture_output=True, text=True)
    assert answer.returncode == 1
    assert (
        answer.stderr == "megarl: stdout: No space left on device; write to a place that has room\n"
    )


def test_missing_package_is_named_with_what_installs_it(monkeypatch, capsys) -> None:
    monkeypatch.setitem(sys.modules, "megarl.launch.run", None)  # as where none of its own is there
    with pytest.raises(ModuleNotFoundError):  # our own module: a bug, which keeps its traceback
        main(["train", EXAMPLE])
    monkeypatch.delitem(sys.modules, "megarl.launch.run")
    monkeypatch.delitem(sys.modules, "megarl.learner.client", raising=False)
    monkeypatch.delitem(sys.modules, "megarl.controller.colocated", raising=False)
    monkeypatch.setitem(sys.modules, "aiohttp", None)
    assert main(["train", EXAMPLE]) == 1
    assert "megarl: the package aiohttp is not installed here; `make venv`" in (
        capsys.readouterr().err
    )


@pytest.mark.parametrize("command", ["train", "config", "check", "memory", "reshard"])
def test_help_of_a_command_is_its_own(capsys, command: str) -> None:
    assert main([command, "--help"]) == 0
    shown = capsys.readouterr().out
    assert main(["help", command]) == 0
    assert capsys.readouterr().out == shown


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("def score(response, answer): return 1.0", "cannot be called with (response, answer,"),
        ("import not_there", "importing {file} failed at line 1: ModuleNotFoundError"),
        ("def other(): pass", "has functions ['other'], no 'score'"),
    ],
)
def test_config_loads_a_reward_function_as_a_run_does(
    tmp_path: Path, capsys, code: str, words: str
) -> None:
    file = tmp_path / "mine.py"
    file.write_text(code)
    reward = ["--reward.kind", "function", "--reward.function", f"{file}:score"]
    assert main(["config", EXAMPLE, *reward]) == 2
    assert words.format(file=file) in capsys.readouterr().err


def test_what_a_reward_function_prints_is_not_among_the_settings(tmp_path: Path, capsys) -> None:
    file = tmp_path / "mine.py"
    file.write_text("print('hello')\ndef score(response, answer, facts): return 1.0")
    reward = ["--reward.kind", "function", "--reward.function", f"{file}:score"]
    assert main(["config", EXAMPLE, *reward]) == 0
    shown = capsys.readouterr()
    assert "hello" not in shown.out and "hello" in shown.err
    assert main(["config", EXAMPLE, *reward[:3], f"{tmp_path}/none.py:score"]) == 2
    assert capsys.readouterr().err.count("none.py") == 1
