"""Tensors in a request pass SGLang's strict unpickler, also from beside megatron.core."""

from __future__ import annotations

import ast
import base64
import importlib.util
import io
import pickle
import pickletools
from pathlib import Path

import pytest
import torch

from megarl.actor.parameters import block_table
from megarl.weight_sync.formats import WireFormat
from megarl.weight_sync.full import cut_buckets
from megarl.weight_sync.stock_routes import encode_bucket
from tests.reshard.models import tiny_shape

LOADER = ("torch.storage", "_load_from_bytes")
BUCKET = cut_buckets(
    tiny_shape("DeepseekV3ForCausalLM"),
    block_table(tiny_shape("DeepseekV3ForCausalLM")),
    WireFormat(torch.bfloat16, {}),
    1 << 20,
)[0]


def allowed_globals() -> set[tuple[str, str]]:
    """SGLang's list, read out of its source: importing it would take ten seconds."""
    spec = importlib.util.find_spec("sglang")
    assert spec is not None and spec.origin is not None
    source = Path(spec.origin).parent / "srt" / "utils" / "common.py"
    for node in ast.walk(ast.parse(source.read_text())):
        if isinstance(node, ast.ClassDef) and node.name == "SafeUnpickler":
            (assigned,) = [part for part in node.body if isinstance(part, ast.Assign)]
            return set(ast.literal_eval(assigned.value))
    raise AssertionError("SGLang has no SafeUnpickler any more")


class Strict(pickle.Unpickler):
    """What SGLang 0.5.23 does with a payload."""

    def find_class(self, module: str, name: str) -> object:
        if (module, name) == LOADER:
            return lambda data: torch.load(io.BytesIO(data), weights_only=True)
        assert (module, name) in allowed_globals(), f"{module}.{name} is not on SGLang's list"
        return super().find_class(module, name)


def test_payload_brings_every_tensor_though_the_storage_loader_was_replaced(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def replaced(data: bytes) -> None:
        """What `import megatron.core` puts in the place of torch's storage loader."""

    replaced.__module__ = "megatron.core.safe_globals"
    monkeypatch.setattr(torch.storage, "_load_from_bytes", replaced)
    data = torch.randint(0, 255, (BUCKET.num_bytes,), dtype=torch.uint8)
    found = Strict(io.BytesIO(base64.b64decode(encode_bucket(BUCKET, data)))).load()
    assert torch.equal(found["flattened_tensor"], data)
    assert {tensor.dtype for tensor in BUCKET.tensors} == {torch.float32, torch.bfloat16}
    for meta, tensor in zip(found["metadata"], BUCKET.tensors, strict=True):
        assert (meta.name, meta.shape, meta.dtype) == (tensor.name, tensor.shape, tensor.dtype)
        assert meta.end_idx - meta.start_idx == meta.numel == tensor.num_bytes
        assert meta.start_idx % tensor.dtype.itemsize == 0


def test_payload_names_nothing_of_this_process_but_torch() -> None:
    data = torch.zeros(BUCKET.num_bytes, dtype=torch.uint8)
    raw = base64.b64decode(encode_bucket(BUCKET, data))
    named = {arg for op, arg, _ in pickletools.genops(raw) if op.name == "GLOBAL"}
    assert {name.split()[0].split(".")[0] for name in named} <= {"torch", "types", "collections"}
