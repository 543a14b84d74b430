"""A Hugging Face checkpoint to write: safetensors files, quantized where that is wanted."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from io import FileIO
from pathlib import Path

import numpy as np

from megarl import float8
from megarl.actor.parameters import SCALE_SUFFIX, BlockTable, Parameter, block_table
from megarl.actor.shape import ModelShape
from megarl.config.model_folder import copy_beside, write_config
from megarl.convert.formats import BACKEND, RECORD
from megarl.convert.numbers import Bits, bits_of, tensor_of
from megarl.convert.stored import Stored, parts
from megarl.convert.target import TargetFile, Tell, Tensors
from megarl.errors import CheckpointError
from megarl.float8 import BlockScaling
from megarl.reshard.files import FLOAT8, STORED, layout_of_headers
from megarl.reshard.shard_files import TensorToStore, shard_files, write_index

NAMES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}


class HuggingFaceTarget:
    """The model `shape` in files of at most `shard_bytes`.

    `dtypes` are of what is assembled, by parameter: those of type float8 and their scales are
    stored as they come. With `quantize` the quantized ones are made float8 in such blocks here.
    `model` is the folder that config.json and the tokenizer come from.
    """

    def __init__(
        self,
        shape: ModelShape,
        dtypes: Mapping[str, str],
        model: Path,
        shard_bytes: int,
        quantize: BlockScaling | None = None,
    ) -> None:
        self._shape, self._model, self._quantize = shape, model, quantize
        table = block_table(shape, shape.fp8_block)
        self._policy = policy_dtype(table, dtypes)
        assembled: dict[str, TensorToStore] = {}
        stored: dict[str, TensorToStore] = {}
        for name, parameter in _by_expert(table.parameters):
            shape_here = parameter.shape[1:] if parameter.stacked else parameter.shape
            tensor = TensorToStore(dtypes[parameter.name], shape_here)
            assembled[name] = tensor
            stored |= self._stored(name, tensor, parameter)
        self._files = shard_files(stored, shard_bytes)
        self.files = tuple(
            TargetFile(f.name, {n: assembled[n] for n in f.tensors if n in assembled}, f.num_bytes)
            for f in self._files
        )
        headers = {
            Path(file.name): {
                name: replace(file.tensors[name], dtype=tensor.dtype)
                for name, tensor in target.tensors.items()
            }
            for file, target in zip(self._files, self.files, strict=True)
        }
        self.layout = layout_of_headers(headers, table)

    def _stored(
        self, name: str, tensor: TensorToStore, parameter: Parameter
    ) -> dict[str, TensorToStore]:
        if self._quantize is None or not parameter.quantized:
            return {name: tensor}
        blocks = float8.num_blocks(tensor.shape, self._quantize)
        return {
            name: replace(tensor, dtype=FLOAT8),
            name + SCALE_SUFFIX: TensorToStore("F32", blocks),
        }

    def kept(self, number: int) -> Tensors:
        """See `Target`: there is none."""
        raise AssertionError(number)

    def write(self, folder: Path, number: int, tensors: Tensors, tell: Tell) -> None:
        """Write one file; see `Target`."""
        file = self._files[number]
        with (folder / file.name).open("wb", buffering=0) as opened:
            _put(opened, 0, file.header)
            tell(len(file.header))
            opened.truncate(file.num_bytes)
            for name, tensor in tensors:
                assembled = self.files[number].tensors[name].dtype
                at = {name: file.tensors[name].start}
                rows: Iterable[dict[str, Bits]]
                if file.tensors[name].dtype == assembled:
                    rows = ({name: part} for part in parts(tensor, STORED[assembled]))
                else:
                    at[name + SCALE_SUFFIX] = file.tensors[name + SCALE_SUFFIX].start
                    rows = self._quantized(name, tensor, assembled)
                for made in rows:
                    for stored, bits in made.items():
                        _put(opened, at[stored], bits.data.cast("B"))
                        at[stored] += bits.nbytes
                        tell(bits.nbytes)
            os.fsync(opened.fileno())

    def _quantized(self, name: str, tensor: Stored, assembled: str) -> Iterator[dict[str, Bits]]:
        """Of whole blocks of rows after each other: float8 and scales, by their names."""
        scaling = self._quantize
        assert scaling is not None
        for part in parts(tensor, STORED[assembled], unit=scaling.rows):
            try:
                codes, scales = float8.quantize(tensor_of(part, assembled), scaling)
            except FloatingPointError as error:
                raise CheckpointError(f"{name}: {error}; it cannot be made float8") from error
            yield {
                name: np.ascontiguousarray(bits_of(codes, FLOAT8)),
                name + SCALE_SUFFIX: np.ascontiguousarray(bits_of(scales, "F32")),
            }

    def finish(self, folder: Path, receipts: Sequence[None]) -> None:
        """Write the index, config.json and the tokenizer; see `Target`."""
        block = self._shape.fp8_block
        if self._quantize is not None:
            block = (self._quantize.rows, self._quantize.columns)
        write_index(self._files, folder)
        copy_beside(self._model, folder, (RECORD, BACKEND))
        num_mtp_layers = self._shape.num_mtp_layers
        write_config(self._model, folder, NAMES[self._policy], num_mtp_layers, block)


def _put(file: FileIO, at: int, data: bytes | memoryview) -> None:
    """Write all of it from byte `at` of the file on."""
    done = 0
    while done < len(data):
        done += os.pwrite(file.fileno(), memoryview(data)[done:], at + done)


def _by_expert(parameters: Iterable[Parameter]) -> Iterator[tuple[str, Parameter]]:
    """The tensors in order: all of an expert's together, as Megatron has its gate and up in one."""
    for is_stacked, group in itertools.groupby(parameters, lambda p: p.stacked):
        together = list(group)
        if is_stacked:
            for names in zip(*(p.stored_names() for p in together), strict=True):
                yield from zip(names, together, strict=True)
        else:
            yield from ((p.name, p) for p in together)


def policy_dtype(table: BlockTable, dtypes: Mapping[str, str]) -> str:
    """The type of most parameters that are of the policy's, whose name config.json has."""
    kinds = [dtypes[p.name] for p in table.parameters if p.precision == "policy"]
    return max(NAMES, key=kinds.count)
