"""A model with the first few layers of another, as a checkpoint of its own, for a quick check.

Owns which layers those are, and the writing of their tensors: copies of the model's, or random
ones. Imports no torch.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np

from megarl.actor.parameters import Parameter, block_table
from megarl.actor.shape import ModelShape, read_shape
from megarl.reshard.files import SINGLE, StoredTensor, map_tensors, read_headers

RANDOM_SCALE = 0.02  # of Hugging Face's models before training, initializer_range
_WIDTH = 4  # bytes of a random number, float32


def layers_kept(shape: ModelShape, chunks: int) -> int:
    """How many of the first layers a check needs: one of each kind, and as many for each of the
    `chunks` of the pipeline. It may be more than the model has, where weights are random.
    """
    kinds = shape.layer_kinds
    needed = max(kinds.index(kind) for kind in set(kinds)) + 1
    return math.ceil(needed / chunks) * chunks


def write_few_layers(model: Path, folder: Path, layers: int, seed: int | None) -> None:
    """Write the first `layers` layers of the checkpoint `model`, with its ends, to `folder`.

    With a `seed`, weights are random float32 and the model needs no more than its config.json.
    Raises ModelError where the model is not whole.
    """
    config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    config["num_hidden_layers"] = layers
    if "num_nextn_predict_layers" in config:
        config["num_nextn_predict_layers"] = 0
    if isinstance(config.get("layer_types"), list):
        config["layer_types"] = config["layer_types"][:layers]
    if isinstance(config.get("mlp_only_layers"), list):
        config["mlp_only_layers"] = [n for n in config["mlp_only_layers"] if n < layers]
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    parameters = block_table(read_shape(folder)).parameters
    tensors = _random(parameters, seed) if seed is not None else _copied(model, parameters)
    _write(folder / SINGLE, tensors)


Tensors = Mapping[str, tuple[StoredTensor, Path | np.random.Generator]]


def _copied(model: Path, parameters: tuple[Parameter, ...]) -> Tensors:
    wanted = {name for parameter in parameters for name in parameter.stored_names()}
    return {
        name: (stored, path)
        for path, header in read_headers(model).items()
        for name, stored in header.items()
        if name in wanted
    }


def _random(parameters: tuple[Parameter, ...], seed: int) -> Tensors:
    draw, found = np.random.default_rng(seed), {}
    for parameter in parameters:
        shape = parameter.shape[1:] if parameter.stacked else parameter.shape
        for name in parameter.stored_names():
            found[name] = (StoredTensor("F32", shape, 0, math.prod(shape) * _WIDTH), draw)
    return found


def _write(path: Path, tensors: Tensors) -> None:
    """A safetensors file, tensor after tensor, so that one is in memory at a time."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, (stored, _) in tensors.items():
        size = stored.end - stored.start
        header[name] = {
            "dtype": stored.dtype,
            "shape": list(stored.shape),
            "data_offsets": [at, at + size],
        }
        at += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for data in _data(tensors):
            file.write(data)


def _data(tensors: Tensors) -> Iterator[memoryview]:
    for name, (stored, source) in tensors.items():
        if isinstance(source, Path):
            yield np.ascontiguousarray(map_tensors(source, {name: stored})[name]).data.cast("B")
            continue
        center = 1.0 if "norm" in name else 0.0
        drawn = source.standard_normal(stored.shape, np.float32) * np.float32(RANDOM_SCALE)
        yield np.ascontiguousarray(drawn + np.float32(center)).data.cast("B")
