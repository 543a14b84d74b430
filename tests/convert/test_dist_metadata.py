"""Lists of Megatron's files that a stranger wrote: none runs code, none names files elsewhere."""

from __future__ import annotations

import io
import os
import pickle
import random
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megarl.cli import main
from megarl.convert.dist_files import DistCheckpoint
from megarl.errors import CheckpointError
from tests.convert import models
from tests.convert.test_convert import QWEN3, converted, refusal


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("made")
    models.write(folder / "a", QWEN3)
    return converted(folder / "a", folder / "b")


@pytest.fixture
def copy(made: Path, tmp_path: Path) -> Path:
    shutil.copytree(made, tmp_path / "b")
    return tmp_path / "b"


class Runs:
    """Pickled, it is a call of `os.system`."""

    def __init__(self, command: str) -> None:
        self.command = command

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (self.command,)


def by_a_dotted_name(command: str) -> bytes:
    """A call of `system` by way of a module that the list may name."""
    return (
        b"\x80\x04ctorch.distributed.checkpoint.metadata\nos.system\n"
        + pickle.dumps((command,), 0).removesuffix(b".")
        + b"R."
    )


@pytest.mark.parametrize(
    "hostile",
    [
        lambda before, command: pickle.dumps(Runs(command)),
        lambda before, command: by_a_dotted_name(command),
        lambda before, command: beside(before, Runs(command)),
        lambda before, command: beside(before, lambda: Runs(command), name="storage_meta"),
    ],
)
@pytest.mark.parametrize("command", ["inspect", "compare", "convert"])
def test_list_that_names_code_is_refused_and_runs_none(
    command: str, hostile: Callable[[bytes, str], bytes], copy: Path, tmp_path: Path, capsys
) -> None:
    mark = tmp_path / "mark"
    listed = copy / ".metadata"
    listed.write_bytes(hostile(listed.read_bytes(), f"touch {mark}"))
    arguments = [str(copy)] if command == "inspect" else [str(copy), str(tmp_path / "c")]
    if command == "compare":
        arguments[1] = str(copy)
    assert main([command, *arguments]) == 2
    told = capsys.readouterr().err
    assert told.count("\n") == 1
    assert "system is no part of a list of tensors" in told
    assert not mark.exists()


def beside(before: bytes, what: Any, name: str = "planner_data") -> bytes:
    """A list with something more in it."""
    found = pickle.loads(before)
    setattr(found, name, what() if callable(what) else what)
    return pickle.dumps(found)


class MCoreMetadata:
    """In the place of Megatron's class of that name, which its older releases wrote."""

    def __init__(self) -> None:
        self.formulation = "fully_sharded_model_space"


def test_what_older_releases_of_megatron_put_beside_the_list_is_passed_over(copy: Path) -> None:
    listed = copy / ".metadata"
    found = pickle.loads(listed.read_bytes())
    found.mcore_data = {"a key": MCoreMetadata()}
    ours = f"c{__name__}\n".encode()
    theirs = b"cmegatron.core.dist_checkpointing.strategies.torch\n"
    written = pickle.dumps(found, 2)
    assert ours in written
    listed.write_bytes(written.replace(ours, theirs))
    assert main(["inspect", str(copy)]) == 0


def rewritten(folder: Path, change: Callable[[Any], object]) -> None:
    """Change the list of a checkpoint."""
    path = folder / ".metadata"
    found = pickle.loads(path.read_bytes())
    change(found)
    path.write_bytes(pickle.dumps(found))


@pytest.mark.parametrize("name", ["../outside", "/etc/passwd", "..", "sub/__0_0.distcp", "", 7])
def test_list_that_names_a_file_elsewhere_is_refused(
    name: object, copy: Path, tmp_path: Path, capsys
) -> None:
    (tmp_path / "outside").write_bytes((copy / "__0_0.distcp").read_bytes())

    def move(found: Any) -> None:
        index = next(iter(found.storage_data))
        found.storage_data[index].relative_path = name

    rewritten(copy, move)
    told = refusal(capsys, copy, tmp_path / "c")
    assert ".metadata cannot be read" in told


@pytest.mark.parametrize("sizes", [(-1, 4), (2.0, 4), (True, 4), ("8", 4), None])
def test_list_with_impossible_sizes_is_refused(
    sizes: Any, copy: Path, tmp_path: Path, capsys
) -> None:
    def resize(found: Any) -> None:
        facts = found.state_dict_metadata["embedding.word_embeddings.weight"]
        facts.chunks[0] = replace(facts.chunks[0], sizes=sizes)

    rewritten(copy, resize)
    assert ".metadata cannot be read" in refusal(capsys, copy, tmp_path / "c")


@pytest.mark.parametrize("file", [".metadata", "__0_0.distcp"])
def test_changed_bytes_anywhere_are_an_error_in_words_or_change_nothing(
    file: str, copy: Path
) -> None:
    path, draw = copy / file, random.Random(7)
    whole = path.read_bytes()
    first = DistCheckpoint(copy).chunks
    num_refused = 0
    for _ in range(300):
        data = bytearray(whole)
        for _ in range(draw.choice((1, 1, 4))):
            data[draw.randrange(len(data))] = draw.randrange(256)
        path.write_bytes(data[: draw.choice((len(data), len(data), draw.randrange(len(data))))])
        try:
            found = DistCheckpoint(copy)
            for chunk in found.chunks if file == ".metadata" else first:
                found.stored(chunk)
                found.num_bytes(chunk)
            found.common()
            for key in found.objects:
                found.raw(key)
        except CheckpointError:
            num_refused += 1
    assert num_refused > 100


def test_list_is_read_as_torch_reads_it(copy: Path) -> None:
    ours = DistCheckpoint(copy)
    theirs = pickle.load(io.BytesIO((copy / ".metadata").read_bytes()))
    assert {chunk.key for chunk in ours.chunks} | set(ours.objects) == set(
        theirs.state_dict_metadata
    )
    assert sum(ours.num_bytes(chunk) for chunk in ours.chunks) == sum(
        facts.size.numel() * facts.properties.dtype.itemsize
        for facts in theirs.state_dict_metadata.values()
        if hasattr(facts, "size")
    )
