"""The layout of a server on a CPU that pads, against the checksums of such a server."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from megarl.reshard.mesh import ServerMesh
from megarl.reshard.sglang import sglang_layout
from tests.reshard.models import tiny_shape
from tests.reshard.sglang_checkpoints import held_by, save_checkpoint
from tests.weight_sync.servers import RealServer

# One KV head for two ranks, and an intermediate size that is no multiple of 2 x 32.
SHAPE = tiny_shape(
    "Qwen3ForCausalLM", hidden_size=64, head_dim=16, num_kv_heads=1, intermediate_size=80
)
TP = 2


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealServer]:
    folder = tmp_path_factory.mktemp("padded")
    save_checkpoint(folder / "model", SHAPE)
    running = RealServer("padded", folder / "model", TP, folder / "server.log")
    try:
        running.wait()
        yield running
    finally:
        running.kill()


def test_server_on_a_cpu_holds_what_its_layout_says(server: RealServer, tmp_path: Path) -> None:
    tensors = save_checkpoint(tmp_path / "same", SHAPE)
    layout = sglang_layout(SHAPE, ServerMesh(TP, cpu=True))
    found = server.checksums()
    assert len(found) == TP
    for rank, theirs in enumerate(found):
        held = held_by(layout, rank, tensors)
        ours = {n: hashlib.sha256(a.tobytes()).hexdigest()[:16] for n, a in held.items()}
        assert ours == theirs
