"""`megarl convert` between formats and types of numbers, without an engine: bits and errors."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from megarl.cli import main
from megarl.convert.convert import MEASURED_BYTES_PER_S
from megarl.convert.dist_files import DistCheckpoint
from megarl.float8 import BlockScaling, dequantize, quantize
from megarl.reshard.files import INDEX
from megarl.reshard.page import bytes_text
from tests.convert import models
from tests.convert.models import FAMILIES
from tests.reshard.models import tiny_shape

QWEN3 = tiny_shape("Qwen3ForCausalLM")
SMALL_FILES = ("--shard-gb", "2e-6")


def converted(source: Path, out: Path, *options: str) -> Path:
    assert main(["convert", str(source), str(out), *options]) == 0
    return out


def refusal(capsys, source: Path, out: Path, *options: str) -> str:
    """The one line of an error."""
    assert main(["convert", str(source), str(out), *options]) == 2
    told = capsys.readouterr()
    assert (told.out, told.err.count("\n")) == ("", 1)
    assert not out.exists()
    return told.err


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of a Hugging Face folder, by safetensors itself."""
    files = sorted(folder.glob("*.safetensors"))
    return {name: tensor for file in files for name, tensor in load_file(file).items()}


def assert_same(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert found[name].dtype == tensor.dtype, name
        assert torch.equal(found[name].view(torch.uint8), tensor.view(torch.uint8)), name


@pytest.mark.parametrize("dtype", ["BF16", "F32"])
@pytest.mark.parametrize("family", FAMILIES)
def test_hugging_face_to_megarl_and_back_is_bit_exact(
    family: str, dtype: str, tmp_path: Path
) -> None:
    stored = models.write(tmp_path / "a", FAMILIES[family], dtype, num_files=3)
    made = converted(tmp_path / "a", tmp_path / "b", *SMALL_FILES)
    assert len(list(made.glob("*.distcp"))) > 1
    back = converted(made, tmp_path / "c", *SMALL_FILES)
    assert_same(tensors(back), stored)
    assert json.loads((back / INDEX).read_text())["weight_map"].keys() == stored.keys()
    for name in ("config.json", "tokenizer.json"):
        assert (back / name).read_bytes() == (tmp_path / "a" / name).read_bytes()
    assert main(["compare", str(tmp_path / "a"), str(made)]) == 0


@pytest.mark.parametrize(
    ("family", "fp8_block", "options"),
    [
        ("llama", None, ("--dtype", "fp32")),
        ("qwen3-moe", None, ()),
        ("deepseek-v3", (4, 6), ()),
        ("glm4-moe", None, ("--dtype", "fp8")),
    ],
)
def test_tensors_that_are_read_in_many_parts_are_as_those_read_in_one(
    family: str,
    fp8_block: tuple[int, int] | None,
    options: tuple[str, ...],
    tmp_path: Path,
    monkeypatch,
) -> None:
    models.write(tmp_path / "a", FAMILIES[family], fp8_block=fp8_block, num_files=2)

    def all_ways(folder: Path) -> list[dict[str, torch.Tensor]]:
        made = converted(tmp_path / "a", folder / "hf", "--to", "hf", *options)
        megatron = converted(tmp_path / "a", folder / "megatron")
        return [tensors(made), tensors(converted(megatron, folder / "back"))]

    (tmp_path / "one").mkdir()
    (tmp_path / "many").mkdir()
    wanted = all_ways(tmp_path / "one")
    for name, value in (("BAND_BYTES", 48), ("SHORT_BYTES", 20), ("MOST_BETWEEN", 3)):
        monkeypatch.setattr(f"megarl.convert.stored.{name}", value)
    for found, reference in zip(all_ways(tmp_path / "many"), wanted, strict=True):
        assert_same(found, reference)


@pytest.mark.parametrize(("before", "after"), [("F32", "bf16"), ("BF16", "fp32"), ("F32", "fp16")])
def test_cast_rounds_as_torch_does_and_config_names_the_type(
    before: str, after: str, tmp_path: Path
) -> None:
    stored = models.write(tmp_path / "a", FAMILIES["glm4-moe"], before)
    for to in ("hf", "torch_dist"):
        made = converted(tmp_path / "a", tmp_path / to, "--to", to, "--dtype", after)
        back = made if to == "hf" else converted(made, tmp_path / "back")
        wanted = {"bf16": torch.bfloat16, "fp32": torch.float32, "fp16": torch.float16}[after]
        assert_same(
            tensors(back),
            {n: t if "e_score" in n else t.to(wanted) for n, t in stored.items()},
        )
        config = json.loads((back / "config.json").read_text())
        assert config["torch_dtype"] == str(wanted).removeprefix("torch.")


@pytest.mark.parametrize("before", ["F32", "BF16"])
def test_float8_is_made_by_the_shared_rule(before: str, tmp_path: Path) -> None:
    shape = FAMILIES["deepseek-v3"]
    stored = models.write(tmp_path / "a", shape, before)
    made = converted(tmp_path / "a", tmp_path / "b", "--to", "hf", "--dtype", "fp8", *SMALL_FILES)
    found = tensors(made)
    quantized = [name for name in stored if f"{name}_scale_inv" in found]
    assert len(quantized) > 60
    for name in quantized:
        codes, scales = quantize(stored[name], BlockScaling())
        assert torch.equal(found[name].view(torch.uint8), codes.view(torch.uint8)), name
        assert torch.equal(found[f"{name}_scale_inv"], scales), name
    others = {n: t if "e_score" in n else t.bfloat16() for n, t in stored.items()}
    for name in stored.keys() - set(quantized):
        assert torch.equal(found[name], others[name]), name
    config = json.loads((made / "config.json").read_text())
    assert config["quantization_config"]["weight_block_size"] == [128, 128]
    assert main(["inspect", str(made)]) == 0


def test_float8_is_kept_bit_for_bit_between_hugging_face_folders(tmp_path: Path) -> None:
    stored = models.write(tmp_path / "a", FAMILIES["glm4-moe"], fp8_block=(4, 4), num_files=2)
    made = converted(tmp_path / "a", tmp_path / "b", "--to", "hf", *SMALL_FILES)
    assert_same(tensors(made), stored)
    assert (made / "config.json").read_text() == (tmp_path / "a/config.json").read_text()


@pytest.mark.parametrize(("option", "dtype"), [("bf16", "BF16"), ("fp32", "F32"), ("", "BF16")])
@pytest.mark.parametrize("to", ["hf", "torch_dist"])
def test_float8_is_read_as_the_numbers_that_it_stands_for(
    to: str, option: str, dtype: str, tmp_path: Path
) -> None:
    if to == "hf" and not option:
        return  # it stays float8
    stored = models.write(tmp_path / "a", FAMILIES["deepseek-v3"], fp8_block=(4, 6))
    options = ("--dtype", option) if option else ()
    made = converted(tmp_path / "a", tmp_path / "b", "--to", to, *options)
    back = made if to == "hf" else converted(made, tmp_path / "c")
    found, wanted = tensors(back), models.TORCH[dtype]
    assert found.keys() == {name for name in stored if not name.endswith("_scale_inv")}
    for name, tensor in found.items():
        scales = stored.get(f"{name}_scale_inv")
        if scales is None:
            reference = stored[name] if "e_score" in name else stored[name].to(wanted)
        else:
            reference = dequantize(stored[name], scales, BlockScaling(4, 6), wanted)
        assert torch.equal(tensor, reference), name
    assert "quantization_config" not in json.loads((back / "config.json").read_text())


def test_layers_for_multi_token_prediction_that_are_not_there_are_not_promised(
    tmp_path: Path,
) -> None:
    stored = models.write(tmp_path / "a", replace(FAMILIES["glm4-moe"], num_mtp_layers=0))
    config = json.loads((tmp_path / "a/config.json").read_text())
    (tmp_path / "a/config.json").write_text(json.dumps(config | {"num_nextn_predict_layers": 1}))
    back = converted(converted(tmp_path / "a", tmp_path / "b"), tmp_path / "c")
    assert_same(tensors(back), stored)
    assert json.loads((back / "config.json").read_text())["num_nextn_predict_layers"] == 0


def test_dry_run_tells_of_files_and_bytes_and_writes_nothing(tmp_path: Path, capsys) -> None:
    models.write(tmp_path / "a", QWEN3)
    arguments = ["convert", str(tmp_path / "a"), str(tmp_path / "b"), "--to", "hf", *SMALL_FILES]
    assert main([*arguments, "--dry-run"]) == 0
    told = capsys.readouterr().out
    assert [path.name for path in tmp_path.iterdir()] == ["a"]
    made = converted(tmp_path / "a", tmp_path / "b", "--to", "hf", *SMALL_FILES)
    for path in made.glob("*.safetensors"):
        assert f"  {path.name}  " in told
    assert f"{len(list(made.glob('*.safetensors')))} files" in told


def test_rows_that_pad_a_vocabulary_are_zeros(tmp_path: Path) -> None:
    shape = tiny_shape("Qwen3ForCausalLM", intermediate_size=128)  # larger than the head, before it
    stored = models.write(tmp_path / "a", shape)
    made = DistCheckpoint(converted(tmp_path / "a", tmp_path / "b"))
    for key, name in (
        ("embedding.word_embeddings.weight", "model.embed_tokens.weight"),
        ("output_layer.weight", "lm_head.weight"),
    ):
        (found,) = (made.read(chunk) for chunk in made.chunks if chunk.key == key)
        assert len(found) == 128
        assert torch.equal(found[: len(stored[name])], stored[name])
        assert not found[len(stored[name]) :].view(torch.int16).any()


@pytest.mark.parametrize("options", [(), ("--to", "hf"), ("--to", "hf", "--dtype", "fp8")])
def test_long_conversion_tells_how_far_it_is_how_fast_and_how_much_is_left(
    options: tuple[str, ...], tmp_path: Path, capsys, monkeypatch
) -> None:
    models.write(tmp_path / "a", FAMILIES["glm4-moe"])
    monkeypatch.setattr("megarl.convert.progress.LOGGED_EVERY_S", 0.0)
    converted(tmp_path / "a", tmp_path / "b", *options, *SMALL_FILES)
    out, err = capsys.readouterr()
    first, *_, last = err.splitlines()
    assert re.fullmatch(r" *\d\S* %  \S+ \S+ of \S+ \S+  \S+ \S+/s  \d+ s left", first)
    whole = re.fullmatch(r"100\.0 %  (\S+ \S+) of \1  \S+ \S+/s  0 s left", last)
    assert whole
    assert f", {whole[1]}, in " in out


@pytest.mark.parametrize(
    ("stored_as", "number", "dtype", "words"),
    [
        ("BF16", 70000.0, "fp16", "too large for float16; use bf16 or fp32"),
        ("F32", -65520.0, "fp16", "too large for float16; use bf16 or fp32"),
        ("F32", 3.4e38, "bf16", "too large for bfloat16; use fp32"),
    ],
)
def test_number_too_large_for_a_type_is_named(
    stored_as: str, number: float, dtype: str, words: str, tmp_path: Path, capsys
) -> None:
    stored = models.write(tmp_path / "a", QWEN3, stored_as)
    stored["model.norm.weight"][3] = number
    save_file(stored, tmp_path / "a/model.safetensors")
    told = refusal(capsys, tmp_path / "a", tmp_path / "b", "--dtype", dtype)
    assert "model.norm.weight" in told
    assert words in told


@pytest.mark.parametrize(
    ("scale", "dtype", "words"),
    [(200.0, "fp16", "too large for float16"), (7.59e35, "bf16", "too large for bfloat16")],
)
def test_float8_that_stands_for_a_number_too_large_for_a_type_is_named(
    scale: float, dtype: str, words: str, tmp_path: Path, capsys
) -> None:
    stored = models.write(tmp_path / "a", FAMILIES["deepseek-v3"], fp8_block=(4, 4))
    name = "model.layers.0.mlp.down_proj.weight"
    stored[f"{name}_scale_inv"][1, 0] = scale  # the largest code of each block is 448
    save_file(stored, tmp_path / "a/model.safetensors")
    options = ("--to", "hf", "--dtype", dtype)
    told = refusal(capsys, tmp_path / "a", tmp_path / "b", *options)
    assert name in told
    assert words in told
    converted(tmp_path / "a", tmp_path / "c", "--to", "hf", "--dtype", "fp32")
    status = main(["compare", str(tmp_path / "a"), str(tmp_path / "c")])
    assert status == (2 if dtype == "bf16" else 1)  # float8 is compared in bfloat16


def test_infinity_is_kept_by_a_cast(tmp_path: Path) -> None:
    stored = models.write(tmp_path / "a", QWEN3, "F32")
    stored["model.norm.weight"][3] = -float("inf")
    save_file(stored, tmp_path / "a/model.safetensors")
    for dtype in ("fp16", "bf16"):
        out = converted(tmp_path / "a", tmp_path / dtype, "--to", "hf", "--dtype", dtype)
        assert float(tensors(out)["model.norm.weight"][3]) == -float("inf")


def test_not_a_number_cannot_be_float8_and_passes_otherwise(tmp_path: Path, capsys) -> None:
    stored = models.write(tmp_path / "a", QWEN3)
    name = "model.layers.1.mlp.down_proj.weight"
    stored[name][0, 0] = float("nan")
    save_file(stored, tmp_path / "a/model.safetensors")
    options = ("--to", "hf", "--dtype", "fp8")
    assert name in refusal(capsys, tmp_path / "a", tmp_path / "b", *options)
    back = converted(converted(tmp_path / "a", tmp_path / "c"), tmp_path / "d")
    assert bool(tensors(back)[name][0, 0].isnan())


def test_types_that_megatron_has_in_one_tensor_must_be_one(tmp_path: Path, capsys) -> None:
    stored = models.write(tmp_path / "a", QWEN3)
    name = "model.layers.0.self_attn.k_proj.weight"
    stored[name] = stored[name].float()
    save_file(stored, tmp_path / "a/model.safetensors")
    told = refusal(capsys, tmp_path / "a", tmp_path / "b")
    assert name in told
    assert "--dtype" in told
    converted(tmp_path / "a", tmp_path / "c", "--dtype", "bf16")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--dtype", "fp8"), "no float8 in torch_dist"),
        (("--dtype", "int4"), "use one of bf16"),
        (("--to", "gguf"), "use one of hf, torch_dist"),
        (("--workers", "0"), "from 1 up"),
        (("--shard-gb", "x"), "--shard-gb 'x'"),
        (("--no-such",), "no option"),
    ],
)
def test_wrong_option_is_one_clear_error(
    options: tuple[str, ...], words: str, tmp_path: Path, capsys
) -> None:
    models.write(tmp_path / "a", QWEN3)
    assert words in refusal(capsys, tmp_path / "a", tmp_path / "b", *options)


LLAMA_70B = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 128_256,
    "hidden_size": 8192,
    "intermediate_size": 28_672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500_000.0,
    "max_position_embeddings": 8192,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}


@pytest.mark.parametrize(
    ("model", "size", "hours"),
    [
        ("70b", "141 GB", 141.1e9 / MEASURED_BYTES_PER_S / 3600),  # 70.55 B parameters of bf16
        pytest.param(
            "kimi-k2", "2.05 TB", 2053e9 / MEASURED_BYTES_PER_S / 3600, marks=pytest.mark.slow
        ),
    ],
)
def test_dry_run_of_a_config_alone_stands_for_its_model(
    model: str, size: str, hours: float, tmp_path: Path, capsys
) -> None:
    folder = Path(__file__).parents[2] / "examples/reshard" / model
    if model == "70b":
        folder = tmp_path / "a"
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(LLAMA_70B))
    out = tmp_path / "b"
    assert main(["convert", str(folder), str(out), "--dry-run", "--shard-gb", "10"]) == 0
    told = capsys.readouterr().out
    count = int(re.search(r"^(\d+) files, (.*):$", told, re.MULTILINE)[1])  # type: ignore[index]
    assert f"{count} files, {size}:\n" in told
    files = re.findall(r"  __(\d+)_0.distcp  (\S+) GB", told)
    assert int(files[-1][0]) == count - 1
    assert all(float(gigabytes) <= 10.0 for _, gigabytes in files)
    amount, unit = re.search(r"about (\S+) (min|h) at ", told).groups()  # type: ignore[union-attr]
    assert float(amount) / (60 if unit == "min" else 1) == pytest.approx(hours, rel=0.05)
    assert f"at {bytes_text(MEASURED_BYTES_PER_S)}/s, the rate that was measured" in told
    assert not out.exists()
    assert "no checkpoint that is read" in refusal(capsys, folder, out)
