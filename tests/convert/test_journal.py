"""The unfinished folder of a conversion: what of an earlier try counts, and other processes."""

from __future__ import annotations

import fcntl
import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from megarl.cli import main
from tests.convert.test_broken import begin, kill_behind, model
from tests.convert.test_convert import assert_same, refusal, tensors

__all__ = ["model"]  # a fixture


@pytest.mark.parametrize("to", ["hf", "torch_dist"])
@pytest.mark.parametrize(
    "harm",
    [
        lambda path: path.unlink(),
        lambda path: path.write_bytes(path.read_bytes()[:-1]),
        lambda path: (path.parent / f".receipts/{path.name}.json").write_text("[7"),
        lambda path: (path.parent / f".receipts/{path.name}.json").write_text("[]"),
    ],
)
def test_file_of_an_earlier_try_that_is_not_whole_any_more_is_made_again(
    harm: Callable[[Path], object], to: str, model: Path, tmp_path: Path
) -> None:
    out, partial = tmp_path / "b", tmp_path / "b.partial"
    arguments = ["convert", str(model), str(out), "--to", to, "--shard-gb", "3e-7"]
    kill_behind(3, partial, begin(lambda: main([*arguments, "--workers", "1"])))
    harm(partial / min(path.stem for path in partial.glob(".receipts/*.json")))
    assert main(arguments) == 0
    assert main(["compare", str(model), str(out)]) == 0


@pytest.mark.parametrize("target", ["huggingface.HuggingFaceTarget", "torch_dist.TorchDistTarget"])
@pytest.mark.parametrize(
    "change",
    [
        lambda path: os.utime(path),
        lambda path: path.rename(path.with_name("elsewhere")),
        lambda path: path.write_bytes(path.read_bytes() + b"x"),
    ],
)
def test_source_that_changes_while_it_is_converted_makes_no_checkpoint(
    change: Callable[[Path], object], target: str, model: Path, tmp_path: Path, capsys, monkeypatch
) -> None:
    from megarl.convert import huggingface, torch_dist

    module = {"huggingface": huggingface, "torch_dist": torch_dist}[target.partition(".")[0]]
    kind = getattr(module, target.partition(".")[2])
    path = model / "model-00002-of-00003.safetensors"
    whole, finish = path.read_bytes(), kind.finish

    def changed(*arguments: object) -> None:
        change(path)  # as another process may, whenever it likes
        finish(*arguments)

    options = ("--to", "hf") if module is huggingface else ()
    with monkeypatch.context() as patch:
        patch.setattr(kind, "finish", changed)
        told = refusal(capsys, model, tmp_path / "b", *options)
    assert str(model) in told
    path.write_bytes(whole)
    assert main(["convert", str(model), str(tmp_path / "b"), *options]) == 0
    assert main(["compare", str(model), str(tmp_path / "b")]) == 0


def test_conversion_that_has_waited_for_another_one_finds_its_result(
    model: Path, tmp_path: Path
) -> None:
    partial, (gate, opens) = tmp_path / "b.partial", os.pipe()

    def waiting() -> int:
        os.read(gate, 1)
        sys.stderr = (tmp_path / "told").open("w", buffering=1)
        return main(["convert", str(model), str(tmp_path / "b")])

    child = begin(waiting)  # before the folder is open here, or it would have it open too
    partial.mkdir()
    held = os.open(partial, os.O_RDONLY)
    fcntl.flock(held, fcntl.LOCK_EX)
    os.write(opens, b"x")
    while not has_open(child, partial):
        assert os.waitpid(child, os.WNOHANG) == (0, 0), (tmp_path / "told").read_text()
    (partial / "mine").write_text("the other's")
    partial.rename(tmp_path / "b")
    os.close(held)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 2
    assert "b exists already" in (tmp_path / "told").read_text()
    assert not partial.exists()
    assert [path.name for path in (tmp_path / "b").iterdir()] == ["mine"]


def has_open(process: int, path: Path) -> bool:
    """Whether a process has a file or folder open."""
    for entry in Path(f"/proc/{process}/fd").iterdir():
        try:
            if os.readlink(entry) == str(path):
                return True
        except OSError:
            continue
    return False


@pytest.mark.parametrize("name", ["a b", "zwölf", "line\nbreak", "-b", os.fsdecode(b"\xff\xfe")])
def test_any_name_of_a_folder_will_do(name: str, model: Path, tmp_path: Path, capsys) -> None:
    out, back = tmp_path / name, tmp_path / f"{name}.back"
    assert main(["convert", str(model), str(out)]) == 0
    assert main(["convert", str(out), str(back)]) == 0
    assert main(["inspect", str(out)]) == 0
    assert main(["compare", str(back), str(out)]) == 0
    back.rename(tmp_path / "plain")  # safetensors reads no path that is not UTF-8
    assert_same(tensors(tmp_path / "plain"), tensors(model))


def test_folder_in_the_source_or_behind_a_link_may_be_the_result(
    model: Path, tmp_path: Path
) -> None:
    before = {path.name: path.read_bytes() for path in model.iterdir()}
    (tmp_path / "link").symlink_to(model)
    assert main(["convert", str(tmp_path / "link"), str(tmp_path / "link" / "out")]) == 0
    assert main(["compare", str(model / "out"), str(tmp_path / "link")]) == 0
    after = {path.name: path.read_bytes() for path in model.iterdir() if path.is_file()}
    assert after == before


def test_linked_files_of_a_source_are_read_and_stay_what_they_are(
    model: Path, tmp_path: Path
) -> None:
    linked = tmp_path / "linked"
    linked.mkdir()
    for number, path in enumerate(sorted(model.iterdir())):
        if number % 2:
            (linked / path.name).symlink_to(path)
        else:
            os.link(path, linked / path.name)
    assert main(["convert", str(linked), str(tmp_path / "b"), "--to", "hf"]) == 0
    assert_same(tensors(tmp_path / "b"), tensors(model))
    assert not any(path.is_symlink() for path in (tmp_path / "b").iterdir())
