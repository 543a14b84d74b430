"""The payload passes SGLang's strict unpickler, also from a process that imported megatron.core."""

from __future__ import annotations

import base64
import pickle
import pickletools

import pytest
import torch

from megarl.errors import WeightSyncError
from megarl.reshard.mesh import LearnerMesh, ServerMesh
from megarl.reshard.pipeline import Pipeline
from megarl.weight_sync.control import ControlMessage, SourceSpec, decode, encode
from megarl.weight_sync.transport.shared import ArenaRef
from tests.weight_sync.tiny import SHAPE

PIPELINE = Pipeline.from_layout("Et|tL", 2)
MESSAGE = ControlMessage(
    version=3,
    attempt="ab",
    run_id="r",
    server="server0",
    incarnation=1,
    tp_rank=1,
    source=SourceSpec(SHAPE, LearnerMesh(tp=2, pp=2), 64, ("local", "per_expert"), PIPELINE),
    mesh=ServerMesh(2, cpu=True, ep=2, attention_dp=2),
    dtype="fp32",
    plan_digest="0" * 64,
    arenas={1: ArenaRef("megarl_r_g0_r1", 10, "n", "host")},
    store=("127.0.0.1", 4242),
    token="t",
)


def test_message_is_the_same_after_json() -> None:
    assert ControlMessage.from_json(MESSAGE.to_json()) == MESSAGE
    assert MESSAGE.ack_key == "sync/3.ab/server0.1/1"


def test_payload_names_only_one_global_and_holds_a_tensor(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def replaced(data: bytes) -> None:
        """What `import megatron.core` puts in the place of torch's storage loader."""

    replaced.__module__ = "megatron.core.safe_globals"
    monkeypatch.setattr(torch.storage, "_load_from_bytes", replaced)
    data = base64.b64decode(encode(MESSAGE))
    strings = [arg for _, arg, _ in pickletools.genops(data) if isinstance(arg, str)]
    assert strings[1:] == ["torch", "ByteTensor"]
    named = pickle.loads(data)
    assert isinstance(named[0][1], torch.Tensor)
    assert decode(named) == MESSAGE


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"source": 3}', "null"])
def test_text_that_is_no_message_is_refused_in_words(text: str) -> None:
    with pytest.raises(WeightSyncError, match="no control message"):
        ControlMessage.from_json(text)
