"""Whatever a server answers: completions that can be trained on, or an error that names it."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from hypothesis import given
from hypothesis import strategies as st

from megarl.errors import MegarlError, RolloutError
from megarl.rollout import calls
from megarl.rollout.client import parse_reply
from megarl.rollout.external import problems
from megarl.types import ServerEndpoint
from tests.config.conftest import MODEL
from tests.hostile import SEEDED, deep, hurt
from tests.rollout.running import make_config

REPLY = [
    {
        "output_ids": [10, 11, 12],
        "meta_info": {
            "id": rid,
            "finish_reason": {"type": "stop", "matched": 12},
            "output_token_logprobs": [[-0.5, n, None] for n in (10, 11, 12)],
            "weight_versions": [
                {"version": "0.a", "start": 0, "end": 1},
                {"version": "1.b", "start": 1, "end": 3},
            ],
        },
    }
    for rid in ("a", "b")
]


@SEEDED
@given(hurt(REPLY))
def test_any_reply_is_refused_by_its_server_or_can_be_trained_on(reply: Any) -> None:
    try:
        found = parse_reply(reply, ("a", "b"), "server-7")
    except MegarlError as error:
        assert "server-7" in str(error)
        assert len(str(error)) < 5000
        return
    for completion in found:
        tokens = np.asarray(completion.token_ids, np.int32)
        assert len(tokens) == len(completion.logprobs) == completion.version_spans[-1].end
        assert all(map(math.isfinite, completion.logprobs))
        assert np.asarray([span.version for span in completion.version_spans], np.int32).size


FACTS = {"tp_size": 1, "ep_size": 1, "attn_dp_size": 1, "dtype": "float32"}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    (folder / "config.json").write_text(json.dumps(MODEL))
    return folder


@SEEDED
@given(st.data())
def test_whatever_a_server_says_of_itself_is_what_is_wanted_or_a_problem_in_words(
    model: Path, data: st.DataObject
) -> None:
    served = {"architectures": MODEL["architectures"], "model_path": str(model)}
    info, facts = data.draw(hurt([served, FACTS]).filter(is_pair))
    found = problems(make_config(model), info, facts)
    assert all(isinstance(problem, str) and len(problem) < 5000 for problem in found)


def is_pair(value: Any) -> bool:
    """Two objects: what is none is refused before (`rollout.calls`)."""
    return isinstance(value, list) and len(value) == 2 and all(isinstance(v, dict) for v in value)


@pytest.mark.parametrize("text", ["[]", "3", "null", "<html>", '"', deep(), b"\xff\xfe", "NaN"])
async def test_answer_that_is_no_object_names_server_and_route(text: str | bytes) -> None:
    async def answer(_: web.Request) -> web.Response:
        body = text if isinstance(text, bytes) else text.encode()
        return web.Response(body=body, content_type="application/json", charset="utf-8")

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", answer)
    async with TestServer(app) as server, aiohttp.ClientSession() as http:
        endpoint = ServerEndpoint("server-7", str(server.make_url("")).rstrip("/"), 1, 0)
        for call in (calls.model_info, calls.server_info, calls.checksums):
            with pytest.raises(RolloutError, match="server-7: /"):
                await call(http, endpoint)
