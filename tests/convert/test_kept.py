"""From torch_dist to torch_dist: the optimizer goes along, or is refused or left out."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint

from megarl.cli import main
from megarl.convert.dist_files import COMMON, DistCheckpoint
from megarl.convert.kept import VOCABULARY
from megarl.convert.stored import BAND_BYTES, _buffer
from tests.convert import models
from tests.convert.state_ranks import CASES
from tests.convert.test_broken import kill_at_random
from tests.convert.test_convert import converted, refusal
from tests.megatron_engine import Engine
from tests.reshard.models import random_weights


@pytest.fixture(scope="module")
def saved(megatron_engine: Engine, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the checkpoints of all cases, saved by real learners, and their models."""
    folder = tmp_path_factory.mktemp("saved")
    megatron_engine.run("tests.convert.state_ranks", "save", folder, ranks=2)
    for number, case in enumerate(CASES):
        models.write(folder / f"hf-{number}", case.shape, values=random_weights(case.shape))
    return folder


def made(saved: Path, number: int, out: Path, *options: str) -> Path:
    model = ("--model", str(saved / f"hf-{number}"))
    source = str(saved / f"saved-{number}")
    assert main(["convert", source, str(out), "--to", "torch_dist", *model, *options]) == 0
    return out


def values(folder: Path, prefix: str) -> dict[str, torch.Tensor]:
    """Whole tensors of a checkpoint by key, put together by torch's own reading."""
    stored = DistCheckpoint(folder)
    found: dict[str, torch.Tensor] = {}
    for chunk in stored.chunks:
        if chunk.key.startswith(prefix):
            part = stored.read(chunk)
            whole = found.setdefault(chunk.key, torch.full(chunk.shape, -1, dtype=part.dtype))
            at = tuple(slice(o, o + s) for o, s in zip(chunk.offsets, chunk.sizes, strict=True))
            whole[at] = part
    return found


def test_training_goes_on_in_another_layout_as_from_the_checkpoint_itself(
    megatron_engine: Engine, saved: Path
) -> None:
    for number in range(len(CASES)):
        made(saved, number, saved / f"made-{number}", "--shard-gb", "3e-6")
    megatron_engine.run("tests.convert.state_ranks", "go_on", saved, ranks=2)


@pytest.mark.parametrize("number", range(len(CASES)))
def test_optimizer_is_kept_bit_for_bit_and_a_cast_is_of_the_weights_alone(
    saved: Path, tmp_path: Path, number: int
) -> None:
    out = made(saved, number, tmp_path / "out", "--dtype", "fp32", "--shard-gb", "2e-6")
    before, after = (values(folder, "optimizer.") for folder in (saved / f"saved-{number}", out))
    assert before.keys() == after.keys()
    for key, tensor in before.items():
        found = after[key]
        rows = min(len(tensor), len(found))  # of vocabularies, whose padding layouts choose
        assert tensor.dtype == found.dtype == torch.float32
        assert torch.equal(found[:rows], tensor[:rows]), key
        assert not found[rows:].any(), key
    weights = values(out, "decoder.")
    assert {tensor.dtype for tensor in weights.values()} == {torch.float32}
    source, made_of_it = DistCheckpoint(saved / f"saved-{number}"), DistCheckpoint(out)
    assert made_of_it.common()["common"]["version"] == 7
    assert set(source.objects) <= set(made_of_it.objects)
    kept = [key for key in source.objects if "_extra_state" not in key]
    assert any(key.startswith("rng/") for key in kept)
    for key in kept:
        assert made_of_it.raw(key) == source.raw(key), key


def test_optimizer_is_left_out_where_that_is_asked(saved: Path, tmp_path: Path, capsys) -> None:
    out = made(saved, 0, tmp_path / "out", "--no-optimizer")
    assert not values(out, "optimizer.")
    assert "common" not in DistCheckpoint(out).common()
    capsys.readouterr()
    assert main(["inspect", str(out)]) == 0
    assert "no optimizer" in capsys.readouterr().out


@pytest.mark.slow
def test_optimizer_survives_kills_of_its_conversion(saved: Path, tmp_path: Path) -> None:
    out, wanted = tmp_path / "out", values(saved / "saved-1", "")

    def check() -> None:
        found = values(out, "")
        assert found.keys() == wanted.keys()
        for key, tensor in found.items():
            assert torch.equal(tensor, wanted[key][: len(tensor)]), key

    arguments = ["convert", str(saved / "saved-1"), str(out), "--to", "torch_dist"]
    options = ["--model", str(saved / "hf-1"), "--shard-gb", "2e-6"]
    kill_at_random([*arguments, *options], out, 20, check)


def test_optimizer_in_buckets_is_refused_with_the_way_around_and_its_weights_convert(
    saved: Path, tmp_path: Path, capsys
) -> None:
    source, model = saved / "buckets", saved / "hf-0"
    options = ("--to", "torch_dist", "--model", str(model))
    told = refusal(capsys, source, tmp_path / "b", *options)
    assert "optimizer.distributed.dp_group_idx_0" in told
    assert "--dist-ckpt-optim-fully-reshardable" in told
    assert "--no-optimizer" in told
    converted(source, tmp_path / "c", *options, "--no-optimizer")
    assert main(["compare", str(tmp_path / "c"), str(source), "--model", str(model)]) == 0


def saved_by_torch(folder: Path, tensors: dict[str, object], saved: Path) -> Path:
    """A checkpoint of case 1 with such tensors, each whole."""
    torch.distributed.checkpoint.save(tensors, checkpoint_id=folder, no_dist=True)
    shutil.copyfile(saved / "saved-1/metadata.json", folder / "metadata.json")
    shutil.copyfile(saved / "hf-1/config.json", folder / "config.json")
    return folder


def test_rows_of_padding_that_the_source_has_not_are_zeros(saved: Path, tmp_path: Path) -> None:
    rows = 104  # a vocabulary of 100, padded to a multiple of 8
    whole = values(saved / "saved-1", "")
    cut = {
        key: tensor[:rows].clone() if key.endswith(VOCABULARY) else tensor
        for key, tensor in whole.items()
    }
    source = saved_by_torch(tmp_path / "a", {**cut, COMMON: "an object"}, saved)
    _buffer(BAND_BYTES, "part").fill(255)  # what was there before is nothing that padding may have
    found = values(converted(source, tmp_path / "b", "--to", "torch_dist"), "optimizer.")
    padded = [key for key, tensor in found.items() if len(tensor) == 128]
    assert len(padded) == 6  # embedding and head: main weights and two moments
    for key, tensor in found.items():
        assert torch.equal(tensor[: len(cut[key])], cut[key]), key
        assert not tensor[len(cut[key]) :].any(), key


def test_optimizer_beside_a_common_state_of_the_older_form_is_refused(
    saved: Path, tmp_path: Path, capsys
) -> None:
    source = saved_by_torch(tmp_path / "a", dict(values(saved / "saved-1", "")), saved)
    told = refusal(capsys, source, tmp_path / "b", "--to", "torch_dist")
    assert "before 0.19" in told
    assert "--no-optimizer" in told


@pytest.mark.parametrize(
    ("key", "words"),
    [
        ("optimizer.state.exp_avg.decoder.other.weight", "other.weight is none"),
        ("optimizer.state.exp_avg.decoder.final_layernorm.weight", "of shape [1, 8]"),
    ],
)
def test_optimizer_of_other_tensors_than_the_model_has_is_refused(
    key: str, words: str, saved: Path, tmp_path: Path, capsys
) -> None:
    source = saved / "saved-1"
    tensors = {k: t for k, t in values(source, "").items() if k != key}
    out = saved_by_torch(tmp_path / "a", {**tensors, key: torch.ones(1, 8)}, saved)
    told = refusal(capsys, out, tmp_path / "b", "--to", "torch_dist")
    assert key in told
    assert words in told
    assert "--no-optimizer" in told
    converted(out, tmp_path / "c", "--to", "torch_dist", "--no-optimizer")


def test_state_that_is_no_float_is_refused_and_extra_states_are_left_out(
    saved: Path, tmp_path: Path, capsys
) -> None:
    whole = {**values(saved / "saved-1", ""), COMMON: "an object"}
    norm = "decoder.final_layernorm.weight"
    step, extra = f"optimizer.state.step.{norm}", "decoder.layers.mlp._extra_state/shard_0_1"
    counts = torch.ones(whole[norm].shape, dtype=torch.int64)
    counted = saved_by_torch(tmp_path / "a", {**whole, step: counts}, saved)
    told = refusal(capsys, counted, tmp_path / "b", "--to", "torch_dist")
    assert f"{step} is stored as int64; give --no-optimizer" in told
    more = {extra: "of an engine", "rng/x": "kept"}
    source = saved_by_torch(tmp_path / "c", {**whole, **more}, saved)
    found = DistCheckpoint(converted(source, tmp_path / "d", "--to", "torch_dist")).objects
    assert "rng/x" in found and extra not in found
