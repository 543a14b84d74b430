"""What `megarl inspect` says of whole and of broken checkpoints."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megarl.cli import main
from tests.convert import models
from tests.convert.models import FAMILIES
from tests.reshard.models import tiny_shape


def inspected(folder: Path, capsys, status: int = 0) -> dict:
    assert main(["inspect", str(folder), "--json"]) == status
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("family", FAMILIES)
def test_figures_are_those_of_the_tensors_that_were_written(
    family: str, tmp_path: Path, capsys
) -> None:
    shape = FAMILIES[family]
    tensors = models.write(tmp_path / "m", shape, num_files=3)
    found = inspected(tmp_path / "m", capsys)
    assert found["architecture"] == shape.architecture
    assert (found["num_tensors"], found["problem"]) == (len(tensors), "")
    assert found["num_parameters"] == sum(tensor.numel() for tensor in tensors.values())
    assert found["weight_bytes"] == sum(tensor.nbytes for tensor in tensors.values())
    assert sorted(found["files"]) == [f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)]


def test_float8_is_counted_without_its_scales(tmp_path: Path, capsys) -> None:
    shape = FAMILIES["deepseek-v3"]
    tensors = models.write(tmp_path / "m", shape, fp8_block=(4, 4))
    found = inspected(tmp_path / "m", capsys)
    weights = {n: t for n, t in tensors.items() if not n.endswith("_scale_inv")}
    assert found["num_parameters"] == sum(tensor.numel() for tensor in weights.values())
    assert set(found["dtypes"]) == {"F8_E4M3", "BF16", "F32"}


def test_page_names_model_types_and_files(tmp_path: Path, capsys) -> None:
    models.write(tmp_path / "m", tiny_shape("Qwen3ForCausalLM"))
    assert main(["inspect", str(tmp_path / "m")]) == 0
    lines = dict(line.split(None, 1) for line in capsys.readouterr().out.splitlines())
    assert lines["model"] == "Qwen3ForCausalLM"
    assert lines["weights"].endswith("kB BF16")
    assert lines["files"].endswith(": model.safetensors")


def test_model_of_no_known_family_is_counted_and_said_to_be_unknown(tmp_path: Path, capsys) -> None:
    tensors = models.write(tmp_path / "m", tiny_shape("Qwen3ForCausalLM"))
    config = json.loads((tmp_path / "m/config.json").read_text())
    config["architectures"] = ["MambaForCausalLM"]
    (tmp_path / "m/config.json").write_text(json.dumps(config))
    found = inspected(tmp_path / "m", capsys, status=1)
    assert found["num_tensors"] == len(tensors)
    assert "MambaForCausalLM is not supported" in found["problem"]


@pytest.mark.parametrize(
    ("change", "status", "words"),
    [
        (lambda f: (f / "model-00002-of-00003.safetensors").unlink(), 2, "is missing"),
        (lambda f: cut(f / "model-00002-of-00003.safetensors"), 2, "is truncated"),
        (lambda f: widen(f / "config.json"), 1, "config.json makes it"),
        (lambda f: (f / "config.json").unlink(), 1, "no config.json"),
        (lambda f: [p.unlink() for p in f.glob("*.safetensors*")], 2, "no checkpoint that is read"),
    ],
)
def test_broken_checkpoint_is_one_clear_error(
    change, status: int, words: str, tmp_path: Path, capsys
) -> None:
    models.write(tmp_path / "m", tiny_shape("Qwen3ForCausalLM"), num_files=3)
    change(tmp_path / "m")
    assert main(["inspect", str(tmp_path / "m")]) == status
    out, err = capsys.readouterr()
    told = err if status == 2 else out
    assert words in told
    assert "Traceback" not in told
    assert status != 2 or err.count("\n") == 1


def test_name_that_is_no_text_is_a_broken_header(tmp_path: Path, capsys) -> None:
    entry = {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}
    header = json.dumps({"half a pair \ud800": entry}).encode()
    data = len(header).to_bytes(8, "little") + header + bytes(4)
    (tmp_path / "model.safetensors").write_bytes(data)
    assert main(["inspect", str(tmp_path)]) == 2
    assert "broken safetensors header" in capsys.readouterr().err


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-10])


def widen(path: Path) -> None:
    path.write_text(path.read_text().replace('"intermediate_size": 16', '"intermediate_size": 24'))
