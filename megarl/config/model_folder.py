"""What lies beside the weights of a Hugging Face folder: its config.json, tokenizer and the like.

Owns which files go along with weights that are written anew, and what changes in config.json.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from megarl.config.served import quantization_config
from megarl.reshard.blocks import ScaleBlock
from megarl.reshard.files import INDEX

CONFIG = "config.json"
COPIED = (".json", ".txt", ".model", ".jinja", ".tiktoken")  # of the model's folder, but the index


def copy_beside(model: Path, folder: Path, left_out: tuple[str, ...] = ()) -> None:
    """Copy what is not weights from one folder to another. Raises OSError."""
    for path in sorted(model.iterdir()):
        wanted = path.suffix in COPIED and path.name not in (INDEX, *left_out)
        if wanted and path.is_file():
            shutil.copyfile(path, folder / path.name)


def write_config(
    model: Path, folder: Path, dtype: str, num_mtp_layers: int, fp8_block: ScaleBlock | None
) -> None:
    """Write the config.json of the model in folder `model`, as it is with other weights.

    `dtype` is as torch spells it; `fp8_block` is of float8 weights. Raises OSError.
    """
    text = (model / CONFIG).read_text(encoding="utf-8")
    config = json.loads(text)
    before = json.loads(text)
    config.pop("quantization_config", None)
    if fp8_block is not None:
        config["quantization_config"] = quantization_config(fp8_block)
        old = before.get("quantization_config")
        if isinstance(old, dict) and old.get("weight_block_size") == list(fp8_block):
            config["quantization_config"] = old
    if "num_nextn_predict_layers" in config:
        config["num_nextn_predict_layers"] = num_mtp_layers
    for name in ("dtype", "torch_dtype"):
        if name in config:
            config[name] = dtype
    if config != before:
        text = json.dumps(config, indent=2)
    (folder / CONFIG).write_text(text, encoding="utf-8")
