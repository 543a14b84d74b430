"""Real Megatron-Core: what it saves is read and converted, and what is converted it loads."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from megarl.cli import main
from megarl.convert.dist_files import DistCheckpoint
from megarl.convert.stored import whole_bits
from megarl.errors import CheckpointError, LayoutError
from megarl.reshard.dist_checkpoint import dist_checkpoint_layout
from megarl.reshard.files import STORED, map_tensors
from megarl.reshard.proof import prove_layout
from tests.convert import models
from tests.convert.megatron_ranks import CASES, FOUR, TWO, Case
from tests.megatron_engine import Engine
from tests.reshard.models import random_weights

TENSORS = "model.safetensors"


def with_megatron(engine: Engine, folder: Path, num_ranks: int) -> Path:
    """Checkpoints of all cases; Megatron has loaded those that megarl made, and saved its own."""
    for number, case in enumerate(CASES[num_ranks]):
        source = folder / f"hf-{number}"
        models.write(source, case.shape, values=random_weights(case.shape))
        assert main(["convert", str(source), str(folder / f"made-{number}")]) == 0
    engine.run("tests.convert.megatron_ranks", folder, ranks=num_ranks)
    return folder


@pytest.fixture(scope="module")
def two(megatron_engine: Engine, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With two ranks. Megatron has loaded what megarl made: its program ends with 0."""
    return with_megatron(megatron_engine, tmp_path_factory.mktemp("two"), 2)


@pytest.fixture(scope="module")
def four(megatron_engine: Engine, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With four ranks, as `two`."""
    return with_megatron(megatron_engine, tmp_path_factory.mktemp("four"), 4)


def assert_converts_back(folder: Path, number: int, case: Case, out: Path) -> None:
    """What Megatron saved is the Hugging Face checkpoint that its weights came from."""
    source, saved = folder / f"hf-{number}", folder / f"saved-{number}"
    arguments = [str(saved), str(out), "--model", str(source)]
    assert main(["convert", *arguments]) == 0
    wanted = models.stored(case.shape, random_weights(case.shape), "BF16")
    found = map_tensors(out / TENSORS)
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        bits = tensor.view(torch.int16) if tensor.dtype == torch.bfloat16 else tensor
        assert (found[name].view(bits.numpy().dtype) == bits.numpy()).all(), name
    assert (out / "config.json").read_text() == (source / "config.json").read_text()
    assert (out / "tokenizer.json").is_file()
    assert main(["compare", str(source), str(saved), "--model", str(source)]) == 0


@pytest.mark.parametrize("number", range(len(TWO)))
def test_checkpoint_of_megatron_on_two_ranks_becomes_the_hugging_face_one(
    two: Path, tmp_path: Path, number: int
) -> None:
    assert_converts_back(two, number, TWO[number], tmp_path / "out")


@pytest.mark.slow
@pytest.mark.parametrize("number", range(len(FOUR)))
def test_checkpoint_of_megatron_on_four_ranks_becomes_the_hugging_face_one(
    four: Path, tmp_path: Path, number: int
) -> None:
    assert_converts_back(four, number, FOUR[number], tmp_path / "out")


@pytest.mark.parametrize("number", range(len(TWO)))
def test_chunks_of_a_real_checkpoint_are_read_as_torch_reads_them(two: Path, number: int) -> None:
    checkpoint = DistCheckpoint(two / f"saved-{number}")
    has_optimizer = any(chunk.key.startswith("optimizer.") for chunk in checkpoint.chunks)
    assert has_optimizer is not bool(TWO[number].metadata)
    prove_layout(dist_checkpoint_layout(TWO[number].shape, checkpoint.chunks))
    for chunk in checkpoint.chunks:
        wanted = checkpoint.read(chunk)
        found = whole_bits(checkpoint.stored(chunk), STORED[checkpoint.dtype(chunk)])
        bits = wanted.view(torch.int16) if wanted.dtype == torch.bfloat16 else wanted
        assert (found.view(bits.numpy().dtype) == bits.numpy()).all(), chunk


def test_inspect_tells_of_the_optimizer_and_of_the_version(two: Path, capsys) -> None:
    arguments = [str(two / "saved-0"), "--model", str(two / "hf-0")]
    assert main(["inspect", *arguments]) == 0
    lines = dict(line.split(None, 1) for line in capsys.readouterr().out.splitlines())
    assert lines["version"] == "7"
    assert lines["besides"].startswith("optimizer")


def test_real_checkpoint_of_another_model_is_refused(two: Path) -> None:
    chunks = DistCheckpoint(two / "saved-0").chunks
    for change, words in (
        (
            {"intermediate_size": 24},
            r"linear_fc1.weight at .* of shape \[32, 8\], .* has \[48, 8\]",
        ),
        ({"num_layers": 3}, r"decoder.layers.2.*: 0 of its .* elements"),
        ({"vocab_size": 300}, "256 rows for a vocabulary of 300"),
        ({"qkv_bias": False}, "linear_qkv.bias is no tensor of the model"),
    ):
        with pytest.raises(LayoutError, match=words):
            dist_checkpoint_layout(replace(TWO[0].shape, **change), chunks)  # type: ignore[arg-type]


def test_truncated_file_of_a_real_checkpoint_is_named(two: Path, tmp_path: Path) -> None:
    saved = two / "saved-0"
    for path in saved.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes()[: None if path.name[0] == "." else 99])
    with pytest.raises(CheckpointError, match=r"distcp is truncated: it has 99 bytes"):
        DistCheckpoint(tmp_path)
    with pytest.raises(CheckpointError, match="metadata"):
        DistCheckpoint(tmp_path / "nothing")
