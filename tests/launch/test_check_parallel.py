"""`megarl check parallel`: layouts that agree, layouts that do not, and who is to blame."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from megarl.actor.shape import read_shape
from megarl.config.load import load_layout
from megarl.errors import DataError, LaunchError
from megarl.launch.check_parallel import Sizes, configured_sizes, run_check_parallel, trials
from megarl.launch.few_layers import layers_kept, write_few_layers
from megarl.reshard.files import map_tensors, read_header
from tests.learner import random_model, recorded

ROOT = Path(__file__).parents[2]
WRONG = str(Path(__file__).with_name("wrong_layout.py"))


@pytest.fixture(scope="module")
def toml(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Settings of a learner of a dense model of two layers."""
    folder = tmp_path_factory.mktemp("checked")
    random_model.write(folder / "model")
    path = folder / "run.toml"
    path.write_text('[actor]\nmodel = "model"\n[launch]\ndevice = "cpu"\n')
    return path


def settings(**sizes: int) -> list[str]:
    """Of the learner's layout."""
    gpus = sizes.pop("gpus", 0)
    given = [word for name, n in sizes.items() for word in (f"--learner.parallel.{name}", str(n))]
    return [*given, "--placement.learner_gpus", str(gpus)]


def test_layouts_with_one_axis_off_keep_the_others_and_what_experts_need() -> None:
    sizes = Sizes(tp=2, pp=2, vpp=2, cp=2, ep=4)
    assert trials(sizes, has_experts=True) == {
        "vpp": Sizes(tp=2, pp=2, cp=2, ep=4),
        "cp": Sizes(tp=2, pp=2, vpp=2, ep=4, dp=2),
        "ep": Sizes(tp=2, pp=2, vpp=2, cp=2),
        "pp": Sizes(tp=2, cp=2, ep=4),
        "tp": Sizes(pp=2, vpp=2, cp=2, ep=4, dp=2),
    }
    assert trials(Sizes(tp=2), has_experts=False) == {
        "sequence_parallel": Sizes(tp=2, sequence_parallel=False)
    }


def test_replicas_are_cut_to_two_or_what_experts_need(toml: Path) -> None:
    config = load_layout(toml, settings(tp=2, gpus=16))
    assert configured_sizes(config) == Sizes(tp=2, dp=2)
    config = load_layout(toml, settings(ep=4, gpus=8))
    assert configured_sizes(config) == Sizes(ep=4, dp=4)


def test_few_layers_are_those_of_the_model_bit_for_bit(toml: Path, tmp_path: Path) -> None:
    model = toml.parent / "model"
    write_few_layers(model, tmp_path / "few", layers=1, seed=None)
    shape = read_shape(tmp_path / "few")
    assert (shape.num_layers, shape.hidden_size) == (1, 32)
    found = map_tensors(tmp_path / "few" / "model.safetensors")
    whole = map_tensors(model / "model.safetensors")
    assert 0 < len(found) < len(whole)
    assert all((found[name] == whole[name]).all() for name in found)


def test_random_layers_need_only_a_config(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(random_model.CONFIG))
    shape = read_shape(tmp_path / "model")
    layers = layers_kept(shape, chunks=4)
    write_few_layers(tmp_path / "model", tmp_path / "few", layers, seed=3)
    assert read_shape(tmp_path / "few").num_layers == layers == 4
    header = read_header(tmp_path / "few" / "model.safetensors")
    assert {stored.dtype for stored in header.values()} == {"F32"}


def test_folder_without_samples_and_a_machine_without_gpus_are_told(
    toml: Path, tmp_path: Path
) -> None:
    with pytest.raises(DataError, match="has no samples with loss tokens"):
        run_check_parallel(load_layout(toml, settings(tp=2)), batch=tmp_path)
    with pytest.raises(LaunchError, match="2 ranks, and this machine 0 GPUs"):
        run_check_parallel(load_layout(toml, [*settings(tp=2), "--launch.device", "cuda"]))


def test_one_rank_needs_no_comparison(toml: Path) -> None:
    status, text = run_check_parallel(load_layout(toml, settings()))
    assert status == 0
    assert "there is nothing to compare" in text


@pytest.mark.slow
def test_command_finds_a_layout_right_on_recorded_samples(toml: Path, tmp_path: Path) -> None:
    recorded.record(tmp_path / "rollouts" / "v000000", 300, lambda sample: [-1.0] * 99)
    sizes = settings(tp=2, cp=2)
    done = subprocess.run(
        [
            *(sys.executable, "-m", "megarl", "check", "parallel", str(toml), *sizes),
            *("--batch", str(tmp_path)),
        ],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
        timeout=300,
    )
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 of 2 layers, its own weights, fp32; 7 samples of" in done.stdout
    assert done.stdout.endswith("parallel: the layout computes what one rank does\n")


@pytest.mark.slow
def test_layout_of_a_critic_with_ranks_of_its_own_is_checked_too(toml: Path) -> None:
    critic = ("--advantage.estimator", "gae", "--critic.ranks", "own", "--critic.parallel.pp", "2")
    status, text = run_check_parallel(load_layout(toml, critic))
    assert status == 0, text
    mine, theirs = text.split("critic.parallel\n")
    assert mine.startswith("learner.parallel\n") and "one rank already" in mine
    assert "configured: pp=2 (2 ranks)" in theirs
    assert theirs.endswith("parallel: the layout computes what one rank does\n")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("broken", "sizes", "words"),
    [
        ("cp", {"tp": 2, "cp": 2}, "cp (context parallelism)"),
        ("vpp", {"pp": 2, "vpp": 2}, "vpp (virtual pipeline parallelism) disagrees"),
    ],
)
def test_axis_that_is_broken_is_named(
    toml: Path, broken: str, sizes: dict[str, int], words: str
) -> None:
    status, text = run_check_parallel(load_layout(toml, settings(**sizes)), None, (WRONG, broken))
    print(text)
    assert status == 1
    assert text.splitlines()[-1].startswith(f"wrong: {words}")


def test_model_that_memory_has_no_room_for_is_refused_before_anything_is_written(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    model = ROOT / "examples" / "reshard" / "llama-3.1-405b.toml"
    monkeypatch.setattr("megarl.launch.check_parallel.available_bytes", lambda: 60 * 10**9)
    with pytest.raises(LaunchError, match=r"16 layers at full width.* 442 GB .* 60.0 GB of memory"):
        run_check_parallel(load_layout(model, ["--launch.device", "cpu"]))
    assert list(tmp_path.iterdir()) == []
