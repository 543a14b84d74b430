"""`megarl convert` where files, disks and other processes are not as they should be."""

from __future__ import annotations

import fcntl
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import megarl.convert.convert  # noqa: F401 - once, and not in each child that is forked
from megarl.cli import INTERRUPTED, main
from tests.convert import models
from tests.convert.test_convert import (
    QWEN3,
    SMALL_FILES,
    assert_same,
    converted,
    refusal,
    tensors,
)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    models.write(tmp_path / "a", QWEN3, num_files=3)
    return tmp_path / "a"


def begin(act: Callable[[], object]) -> int:
    """A child that acts, in the form of a command; its process id."""
    child = os.fork()
    if child == 0:
        status = 99
        try:
            devnull = os.open(os.devnull, os.O_WRONLY)
            os.dup2(devnull, 1)
            os.dup2(devnull, 2)
            status = int(act() or 0)
        finally:
            os._exit(status)
    return child


def kill_behind(num_files: int, partial: Path, child: int) -> None:
    """Kill a conversion when it has finished so many files."""
    while len(list(partial.glob(".receipts/*.json"))) < num_files:
        assert os.waitpid(child, os.WNOHANG) == (0, 0), "it has ended before"
        time.sleep(0.001)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)


def kill_at_random(
    arguments: list[str], out: Path, num_kills: int, check: Callable[[], object]
) -> None:
    """Kill so many conversions to `out`, at moments over all of one; `check` what is whole."""
    begun = time.monotonic()
    assert os.waitpid(begin(lambda: main(arguments)), 0)[1] == 0
    span_s = time.monotonic() - begun
    draw, num_killed, num_ended = random.Random(5), 0, 0
    while num_killed < num_kills:
        if out.exists():
            shutil.rmtree(out)
        child = begin(lambda: main(arguments))
        time.sleep(draw.uniform(0, span_s))
        os.kill(child, signal.SIGKILL)
        was_killed = os.WIFSIGNALED(os.waitpid(child, 0)[1])
        num_killed, num_ended = num_killed + was_killed, num_ended + (not was_killed)
        span_s *= 1.1 if was_killed else 0.8  # so that moments lie over the whole conversion
        assert was_killed or out.exists()
        if num_killed % 3 == 2 and not out.exists():  # what several have left, one ends
            assert os.waitpid(begin(lambda: main(arguments)), 0)[1] == 0
        if out.exists():
            check()
            assert not out.with_name(out.name + ".partial").exists()
    assert num_ended < 4 * num_kills


@pytest.mark.parametrize(
    ("to", "num_kills"),
    [
        ("torch_dist", 3),
        pytest.param("torch_dist", 20, marks=pytest.mark.slow),
        pytest.param("hf", 20, marks=pytest.mark.slow),
    ],
)
def test_conversion_killed_at_any_moment_leaves_nothing_and_goes_on(
    to: str, num_kills: int, model: Path, tmp_path: Path
) -> None:
    out = tmp_path / "b"

    def check() -> None:
        assert main(["compare", str(model), str(out)]) == 0
        if to == "hf":
            assert_same(tensors(out), tensors(model))

    arguments = ["convert", str(model), str(out), "--to", to, "--shard-gb", "3e-7"]
    kill_at_random(arguments, out, num_kills, check)


def test_files_that_were_finished_before_a_kill_are_kept(model: Path, tmp_path: Path) -> None:
    out, partial = tmp_path / "b", tmp_path / "b.partial"
    arguments = ["convert", str(model), str(out), "--shard-gb", "3e-7", "--workers", "1"]
    kill_behind(3, partial, begin(lambda: main(arguments)))
    kept = {p.stem: (partial / p.stem).stat().st_ino for p in partial.glob(".receipts/*.json")}
    assert len(kept) >= 3
    assert main(arguments) == 0
    assert {name: (out / name).stat().st_ino for name in kept} == kept


def test_interrupted_conversion_says_that_the_same_command_goes_on(
    model: Path, tmp_path: Path
) -> None:
    out, partial = tmp_path / "b", tmp_path / "b.partial"
    arguments = ["convert", str(model), str(out), "--shard-gb", "3e-7", "--workers", "1"]
    command = [sys.executable, "-m", "megarl", *arguments]
    with subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    ) as child:
        while len(list(partial.glob(".receipts/*.json"))) < 2:
            assert child.poll() is None, "it has ended before"
            time.sleep(0.001)
        child.send_signal(signal.SIGINT)
        told = child.communicate()[1]
    assert child.returncode == INTERRUPTED
    assert f"{partial} is kept: the same command goes on with it\nmegarl: interrupted\n" in told
    assert main(arguments) == 0


def test_another_source_or_other_options_do_not_go_on_with_what_is_there(
    model: Path, tmp_path: Path, capsys
) -> None:
    out, partial = tmp_path / "b", tmp_path / "b.partial"
    arguments = ["convert", str(model), str(out), *SMALL_FILES]
    for change in (lambda: None, lambda: os.utime(model / "model-00001-of-00003.safetensors")):
        kill_behind(1, partial, begin(lambda: main(arguments)))
        change()
    assert main(["convert", str(model), str(out), "--dtype", "fp32", *SMALL_FILES]) == 0
    assert "from an earlier try" not in capsys.readouterr().out


@pytest.mark.parametrize("to", ["torch_dist", "hf"])
def test_full_disk_is_one_error_and_the_next_run_goes_on(
    to: str, model: Path, tmp_path: Path
) -> None:
    out = tmp_path / "b"
    arguments = ["convert", str(model), str(out), "--to", to, "--workers", "2"]

    def with_little_space() -> int:
        sys.stderr = (tmp_path / "told").open("w", buffering=1)
        resource.setrlimit(resource.RLIMIT_FSIZE, (4000, 4000))
        return main(arguments)

    assert os.waitstatus_to_exitcode(os.waitpid(begin(with_little_space), 0)[1]) == 2
    told = (tmp_path / "told").read_text()
    assert told.count("\n") == 1
    assert "cannot be written (File too large)" in told
    assert not out.exists()
    assert main(arguments) == 0
    assert main(["compare", str(model), str(out)]) == 0


@pytest.mark.skipif(os.geteuid() != 0, reason="a small file system is mounted")
@pytest.mark.parametrize("to", ["torch_dist", "hf"])
def test_disk_that_fills_up_is_one_error_and_the_next_run_goes_on(
    to: str, model: Path, tmp_path: Path, capsys, monkeypatch
) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    options = ("-t", "tmpfs", "-o", "size=16k", "tmpfs", str(disk))
    if subprocess.run(["mount", *options], capture_output=True).returncode:
        pytest.skip("no file system may be mounted here")
    try:
        with monkeypatch.context() as patch:  # others fill it while it is written to
            patch.setattr("megarl.convert.convert._check_space", lambda *_: None)
            told = refusal(capsys, model, disk / "b", "--to", to, "--shard-gb", "3e-7")
        assert "No space left on device" in told
        assert "goes on where it stopped" in told
        subprocess.run(["mount", "-o", "remount,size=1m", str(disk)], check=True)
        converted(model, disk / "b", "--to", to, "--shard-gb", "3e-7")
        assert main(["compare", str(model), str(disk / "b")]) == 0
    finally:
        subprocess.run(["umount", str(disk)], check=True)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda folder: flip(folder / "model-00002-of-00003.safetensors"), "is not as"),
        (
            lambda folder: (folder / "SHA256SUMS").write_text("abc  model"),
            "is no line of sha256sum",
        ),
        (lambda folder: (folder / "SHA256SUMS").write_text(""), "has no line for model-00001"),
        (lambda folder: (folder / "SHA256SUMS").unlink(), "SHA256SUMS: cannot be read"),
    ],
)
def test_flipped_byte_of_a_hugging_face_source_is_noticed_by_a_list_of_digests(
    change: Callable[[Path], object], words: str, model: Path, tmp_path: Path, capsys
) -> None:
    files = sorted(model.glob("*.safetensors"))
    listed = subprocess.run(
        ["sha256sum", *(path.name for path in files)],
        cwd=model, check=True, capture_output=True, text=True,
    ).stdout  # fmt: skip
    (model / "SHA256SUMS").write_text(listed)
    options = ("--digests", str(model / "SHA256SUMS"))
    converted(model, tmp_path / "whole", *options)
    capsys.readouterr()
    change(model)
    assert words in refusal(capsys, model, tmp_path / "b", *options)
    assert not (tmp_path / "b.partial").exists()


def test_lack_of_space_is_found_before_anything_is_written(
    model: Path, tmp_path: Path, capsys, monkeypatch
) -> None:
    class Usage:
        free = 1000

    monkeypatch.setattr("megarl.convert.convert.shutil.disk_usage", lambda path: Usage)
    assert "1.00 kB free, and" in refusal(capsys, model, tmp_path / "b")
    assert not (tmp_path / "b.partial").exists()


def test_folder_that_cannot_be_written_to_is_named(model: Path, capsys) -> None:
    told = refusal(capsys, model, Path("/sys/no-such"))  # where nobody may make a folder
    assert told.startswith("megarl: /sys")


@pytest.mark.parametrize("name", ["b", "b.partial"])
def test_what_has_the_name_of_the_result_is_not_touched(
    name: str, model: Path, tmp_path: Path, capsys
) -> None:
    (tmp_path / name).mkdir()
    (tmp_path / name / "mine").write_text("mine")
    assert main(["convert", str(model), str(tmp_path / "b")]) == 2
    told = capsys.readouterr().err
    assert str(tmp_path / name) in told
    assert (tmp_path / name / "mine").read_text() == "mine"


def test_two_conversions_do_not_write_one_folder(
    model: Path, tmp_path: Path, capsys, monkeypatch
) -> None:
    monkeypatch.setattr("megarl.convert.journal.LOCK_S", 0.1)
    partial = tmp_path / "b.partial"
    partial.mkdir()
    held = os.open(partial, os.O_RDONLY)
    fcntl.flock(held, fcntl.LOCK_EX)
    assert "another conversion is writing" in refusal(capsys, model, tmp_path / "b")
    os.close(held)
    converted(model, tmp_path / "b")


def test_worker_that_dies_is_an_error(model: Path, tmp_path: Path, capsys, monkeypatch) -> None:
    def die(*_: object) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    monkeypatch.setattr("megarl.convert.torch_dist.TorchDistTarget.write", die)
    assert "a worker of the conversion died" in refusal(capsys, model, tmp_path / "b")


def test_flipped_byte_of_a_megatron_checkpoint_is_noticed(
    model: Path, tmp_path: Path, capsys
) -> None:
    made = converted(model, tmp_path / "b")
    path = made / "__0_0.distcp"
    data = bytearray(path.read_bytes())
    wanted = tensors(model)["model.embed_tokens.weight"]
    at = data.index(wanted.view(torch.uint8).numpy().tobytes())
    data[at + 5] ^= 16
    path.write_bytes(data)
    capsys.readouterr()
    told = refusal(capsys, made, tmp_path / "c")
    assert "embedding.word_embeddings.weight" in told
    assert "not as they were saved" in told


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda f: (f / "model-00002-of-00003.safetensors").unlink(), "is missing"),
        (lambda f: cut(f / "model-00002-of-00003.safetensors"), "is truncated"),
        (lambda f: edit(f, intermediate_size=24), "config.json makes it"),
        (lambda f: edit(f, num_hidden_layers=3), "are in none of its files"),
        (lambda f: edit(f, hidden_act="gelu"), "hidden_act is 'gelu'"),
        (lambda f: (f / "config.json").unlink(), "no config.json"),
    ],
)
def test_broken_source_is_one_clear_error(
    change: Callable[[Path], object], words: str, model: Path, tmp_path: Path, capsys
) -> None:
    change(model)
    assert words in refusal(capsys, model, tmp_path / "b")
    assert not (tmp_path / "b.partial").exists()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda f: (f / "__0_0.distcp").unlink(), "__0_0.distcp is missing"),
        (lambda f: cut(f / "__0_0.distcp"), "__0_0.distcp is truncated"),
        (lambda f: cut(f / ".metadata"), ".metadata cannot be read"),
        (lambda f: (f / "metadata.json").unlink(), "its save has not ended"),
        (lambda f: edit(f, intermediate_size=24), "do not belong together"),
        (lambda f: (f / "config.json").unlink(), "--model"),
    ],
)
def test_broken_megatron_source_is_one_clear_error(
    change: Callable[[Path], object], words: str, model: Path, tmp_path: Path, capsys
) -> None:
    made = converted(model, tmp_path / "b")
    capsys.readouterr()
    change(made)
    assert words in refusal(capsys, made, tmp_path / "c")


def test_result_is_what_it_was_made_of_and_says_how(model: Path, tmp_path: Path) -> None:
    made = converted(model, tmp_path / "b", "--to", "hf")
    assert_same(tensors(made), tensors(model))
    record = json.loads((made / "conversion.json").read_text())
    assert record["finished"] is True
    assert record["facts"]["source"] == str(model)


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-9] ^= 4
    path.write_bytes(data)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-10])


def edit(folder: Path, **changes: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
