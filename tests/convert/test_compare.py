"""`megarl compare`: what it finds, where, and what it ends with."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from megarl.cli import main
from tests.convert import models
from tests.reshard.megatron_cases import qwen

EXPERT = "model.layers.1.mlp.experts.2.up_proj.weight"
NORM = "model.norm.weight"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    models.write(tmp_path / "a", qwen())
    return tmp_path / "a"


def changed(model: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> Path:
    """A copy of the model whose tensors `change` has changed."""
    other = model.with_name("b")
    shutil.copytree(model, other)
    tensors = load_file(other / "model.safetensors")
    change(tensors)
    save_file(tensors, other / "model.safetensors")
    return other


def compared(left: Path, right: Path, capsys, status: int) -> dict:
    assert main(["compare", str(left), str(right), "--json"]) == status
    return json.loads(capsys.readouterr().out)


def test_equal_checkpoints_are_equal_however_their_files_are_cut(
    model: Path, tmp_path: Path, capsys
) -> None:
    models.write(tmp_path / "b", qwen(), num_files=3)
    found = compared(model, tmp_path / "b", capsys, status=0)
    assert found["equal"]
    assert found["digests"][0] == found["digests"][1] != "0" * 16
    assert (found["differences"], found["only_a"], found["only_b"]) == ([], [], [])


def test_changed_elements_are_named_by_tensor_interval_and_size(model: Path, capsys) -> None:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors[EXPERT][3:5, 7] = tensors[EXPERT][3:5, 7].float().add(0.5).bfloat16()
        tensors[NORM][2] = 2 * tensors[NORM][2]

    other = changed(model, change)
    found = compared(model, other, capsys, status=1)
    ours, theirs = (load_file(f / "model.safetensors") for f in (model, other))
    apart = {n: (ours[n].double() - theirs[n].double()).abs() for n in (EXPERT, NORM)}
    assert found["differences"] == [
        {"name": n, "box": b, "num_elements": int((apart[n] > 0).sum()),
         "largest": float(apart[n].max())}
        for n, b in ((EXPERT, [[3, 5], [7, 8]]), (NORM, [[2, 3]]))
    ]  # fmt: skip
    assert found["digests"][0] != found["digests"][1]
    assert main(["compare", str(model), str(other)]) == 1
    page = capsys.readouterr().out
    assert f"{EXPERT}[3:5, 7]: 2 elements" in page
    assert page.endswith("verdict   different\n")


@pytest.mark.parametrize(
    ("values", "largest"),
    [((0.0, -0.0), 0.0), ((float("nan"), 1.0), None), ((float("inf"), 1.0), None)],
)
def test_bits_decide_and_what_is_no_number_is_infinitely_far(
    values: tuple[float, float], largest: float | None, model: Path, capsys
) -> None:
    left = changed(model, lambda tensors: tensors[NORM].fill_(values[0]))
    right = changed(left.rename(model.with_name("c")), lambda t: t[NORM].fill_(values[1]))
    found = compared(model.with_name("c"), right, capsys, status=1)
    assert found["differences"][0]["largest"] == largest
    assert compared(right, right, capsys, status=0)["equal"]


def test_missing_tensor_other_shape_and_other_type_are_told_apart(model: Path, capsys) -> None:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        del tensors["lm_head.weight"]
        tensors["extra"] = torch.arange(3)
        tensors[EXPERT] = tensors[EXPERT][:-1].clone()
        tensors[NORM] = tensors[NORM].float()

    found = compared(model, changed(model, change), capsys, status=1)
    assert (found["only_a"], found["only_b"]) == (["lm_head.weight"], ["extra"])
    assert found["shapes"] == {EXPERT: [[8, 8], [7, 8]]}
    assert found["types"] == {NORM: ["BF16", "F32"]}
    assert found["differences"] == []  # the norm has the same numbers in the other type


def test_types_that_are_no_weights_are_compared_by_their_bytes(model: Path, capsys) -> None:
    left = changed(model, lambda tensors: tensors.update(buffer=torch.arange(5)))
    right = changed(
        left.rename(model.with_name("c")), lambda tensors: tensors["buffer"][3:].add_(1)
    )
    found = compared(model.with_name("c"), right, capsys, status=1)
    assert [difference["name"] for difference in found["differences"]] == ["buffer"]
    other = changed(
        right.rename(model.with_name("d")), lambda t: t.update(buffer=t["buffer"].int())
    )
    found = compared(model.with_name("d"), other, capsys, status=1)
    assert found["types"] == {"buffer": ["I64", "I32"]}
    assert [(d["name"], d["box"], d["largest"]) for d in found["differences"]] == [
        ("buffer", [[0, 5]], None)
    ]


def test_float8_is_compared_as_the_numbers_that_it_stands_for(tmp_path: Path, capsys) -> None:
    shape = models.FAMILIES["deepseek-v3"]
    stored = models.write(tmp_path / "fp8", shape, fp8_block=(4, 4))
    plain = models.write(tmp_path / "bf16", shape)
    for name in plain:
        if f"{name}_scale_inv" in stored:
            scales = stored[f"{name}_scale_inv"].numpy()
            rows, columns = plain[name].shape
            grid = np.kron(scales, np.ones((4, 4), np.float32))[:rows, :columns]
            plain[name] = torch.from_numpy(stored[name].float().numpy() * grid).bfloat16()
    save_file(plain, tmp_path / "bf16/model.safetensors")
    found = compared(tmp_path / "fp8", tmp_path / "bf16", capsys, status=1)
    assert found["differences"] == []
    assert ["F8_E4M3", "BF16"] in found["types"].values()
    name = "model.layers.2.mlp.experts.7.down_proj.weight"
    plain[name][5, 2] += 1
    save_file(plain, tmp_path / "bf16/model.safetensors")
    found = compared(tmp_path / "fp8", tmp_path / "bf16", capsys, status=1)
    assert [(d["name"], d["box"]) for d in found["differences"]] == [(name, [[5, 6], [2, 3]])]


@pytest.mark.parametrize("arguments", [[], ["."], [".", ".", "."], [".", ".", "--no-such"]])
def test_wrong_arguments_end_with_status_2(arguments: list[str], capsys) -> None:
    if arguments:
        assert main(["compare", *arguments]) == 2
        assert capsys.readouterr().err.startswith("megarl: ")
    assert main(["compare", "--help"]) == 0
    assert capsys.readouterr().out.startswith("megarl compare A B")


def test_checkpoint_that_cannot_be_read_ends_with_status_2_and_one_error(
    model: Path, tmp_path: Path, capsys
) -> None:
    broken = changed(model, lambda tensors: None)
    path = broken / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    for other in (broken, tmp_path / "nothing"):
        assert main(["compare", str(model), str(other)]) == 2
        out, err = capsys.readouterr()
        assert (out, err.count("\n")) == ("", 1)
        assert str(other) in err


@pytest.mark.parametrize("formats", ["alike", "unlike"])
def test_long_comparison_tells_how_far_it_is_and_how_fast(
    formats: str, model: Path, tmp_path: Path, capsys, monkeypatch
) -> None:
    other = model
    if formats == "unlike":
        other = tmp_path / "b"
        assert main(["convert", str(model), str(other)]) == 0
    capsys.readouterr()
    monkeypatch.setattr("megarl.convert.progress.LOGGED_EVERY_S", 0.0)
    assert main(["compare", str(model), str(other)]) == 0
    out, err = capsys.readouterr()
    assert out.endswith("verdict   equal\n")
    assert re.fullmatch(r"100\.0 %  (\S+ \S+) of \1  \S+ \S+/s  0 s left", err.splitlines()[-1])


def test_parts_of_a_tensor_are_compared_one_after_the_other(
    model: Path, tmp_path: Path, capsys, monkeypatch
) -> None:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors[EXPERT][1:7, 3] += 1
        tensors["model.embed_tokens.weight"][-1, -1] += 1

    other = changed(model, change)
    wanted = compared(model, other, capsys, status=1)
    made = tmp_path / "made"
    assert main(["convert", str(other), str(made)]) == 0
    capsys.readouterr()
    monkeypatch.setattr("megarl.convert.compare.PART_BYTES", 64)
    for path in (other, made):
        found = compared(model, path, capsys, status=1)
        assert found["differences"] == wanted["differences"]
        assert found["digests"] == wanted["digests"]


def test_values_are_not_called_equal_where_no_tensor_is_in_both(model: Path, capsys) -> None:
    def rename(tensors: dict[str, torch.Tensor]) -> None:
        for name in list(tensors):
            tensors[f"{name}.other"] = tensors.pop(name)

    assert main(["compare", str(model), str(changed(model, rename))]) == 1
    told = capsys.readouterr().out
    assert "not compared: no tensor is in both in one shape" in told and "all equal" not in told
