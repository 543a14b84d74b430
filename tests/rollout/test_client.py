"""A reply is used whole and checked, or not at all."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from megarl.errors import RolloutError
from megarl.ports import free_port
from megarl.rollout.client import LateError, RolloutClient, Sampling, ServerGoneError
from megarl.types import ServerEndpoint, VersionSpan
from megarl.weight_sync.control import stamp
from tests.rollout.running import Body, FakeServer, Fleet, fake_pool, good_reply, make_config

SAMPLING = Sampling(temperature=1.0, max_new_tokens=8)


async def ask(tmp_path: Path, answer: Any, deadline_s: float = 5.0) -> Any:
    """What the client makes of one answer to a group of two."""
    async with fake_pool(tmp_path, make_config()) as (pool, fleet):
        fleet.answers.append(answer)
        client = RolloutClient()
        try:
            endpoint = pool.endpoints()[0]
            return await client.generate(endpoint, (3, 4), ("a", "b"), SAMPLING, deadline_s)
        finally:
            await client.close()


def replying(change: Callable[[Body], None]) -> Any:
    """An answer whose second sample is changed."""

    async def answer(server: FakeServer, body: Body) -> web.StreamResponse:
        reply = good_reply(server, body)
        change(reply[1])
        text = web.json_response(reply).text
        return web.Response(text=text, content_type="application/json")

    return answer


def meta(**values: Any) -> Callable[[Body], None]:
    return lambda sample: sample["meta_info"].update(values)


async def test_reply_becomes_tokens_with_their_logprobs_and_versions(tmp_path: Path) -> None:
    first, second = await ask(tmp_path, replying(lambda sample: None))
    assert first == second
    assert first.token_ids == (10, 11, 12)
    assert first.logprobs == (-0.5, -0.5, -0.5)
    assert first.version_spans == (VersionSpan(0, 3, 0),)
    assert first.finish_reason == "length"


async def test_label_of_a_publish_is_read_as_its_version_and_kept(tmp_path: Path) -> None:
    label = stamp(12, "9f00")
    spans = meta(weight_versions=[{"version": label, "start": 0, "end": 3}])
    _, second = await ask(tmp_path, replying(spans))
    assert second.version_spans == (VersionSpan(0, 3, 12),)
    assert second.labels == (label,)


BAD = {
    "no log-probs": (meta(output_token_logprobs=None), "3 tokens came with no log-probs"),
    "too few log-probs": (meta(output_token_logprobs=[[-1.0, 10, None]]), "with 1 log-probs"),
    "a log-prob that is not a number": (
        meta(output_token_logprobs=[[-1.0, 10], [math.nan, 11], [-1.0, 12]]),
        "log-prob 1, of token 11, is nan",
    ),
    "a log-prob that is null": (
        meta(output_token_logprobs=[[-1.0, 10], [-1.0, 11], [None, 12]]),
        "log-prob 2, of token 12, is None",
    ),
    "log-probs of other tokens": (
        meta(output_token_logprobs=[[-1.0, 10], [-1.0, 99], [-1.0, 12]]),
        "log-prob 1 belongs to token 99, not 11",
    ),
    "no versions": (meta(weight_versions=None), "do not cover its 3 tokens"),
    "a version that is no number": (
        meta(weight_versions=[{"version": "best", "start": 0, "end": 3}]),
        "name no policy version",
    ),
    "a version gap": (
        meta(
            weight_versions=[
                {"version": "0", "start": 0, "end": 1},
                {"version": "1", "start": 2, "end": 3},
            ]
        ),
        "do not follow each other",
    ),
    "another request's reply": (meta(id="c"), "reply is for 'c'"),
    "no tokens": (lambda sample: sample.update(output_ids=[]), "no token came back"),
}


@pytest.mark.parametrize("case", BAD)
async def test_reply_is_refused_naming_the_sample_where_it_has(case: str, tmp_path: Path) -> None:
    change, found = BAD[case]
    with pytest.raises(RolloutError) as error:
        await ask(tmp_path, replying(change))
    assert found in str(error.value)
    assert "b from server-0" in str(error.value)


async def test_reply_with_too_few_responses_is_refused(tmp_path: Path) -> None:
    async def answer(server: FakeServer, body: Body) -> web.StreamResponse:
        return web.json_response(good_reply(server, body)[:1])

    with pytest.raises(RolloutError, match="asked for 2 responses"):
        await ask(tmp_path, answer)


async def test_refusal_by_the_server_is_an_error_with_its_text(tmp_path: Path) -> None:
    async def answer(server: FakeServer, body: Body) -> web.StreamResponse:
        return web.Response(status=400, text="exceeds the model's maximum context length")

    with pytest.raises(RolloutError, match="HTTP 400.*maximum context length"):
        await ask(tmp_path, answer)


async def test_http_500_and_a_closed_connection_say_that_the_server_is_gone(tmp_path: Path) -> None:
    async def fails(server: FakeServer, body: Body) -> web.StreamResponse:
        return web.Response(status=500, text="scheduler died")

    async def closes(server: FakeServer, body: Body) -> web.StreamResponse:
        server.kill()
        await asyncio.sleep(5)
        raise AssertionError

    with pytest.raises(ServerGoneError, match="HTTP 500: scheduler died"):
        await ask(tmp_path, fails)
    with pytest.raises(ServerGoneError, match="Disconnected|Connection"):
        await ask(tmp_path, closes)


async def test_abort_by_the_server_is_no_response(tmp_path: Path) -> None:
    change = meta(finish_reason={"type": "abort", "message": "weights are being updated"})
    with pytest.raises(ServerGoneError, match="weights are being updated"):
        await ask(tmp_path, replying(change))


async def late(server: FakeServer, body: Body) -> web.StreamResponse:
    await asyncio.sleep(30)
    raise AssertionError


async def test_late_group_is_aborted_on_the_server_and_named(tmp_path: Path) -> None:
    fleet = Fleet()
    server, endpoint = await listening(fleet)
    fleet.answers.append(late)
    client = RolloutClient()
    with pytest.raises(LateError, match="deadline.generate_s=0.2"):
        await client.generate(endpoint, (3, 4), ("a", "b"), SAMPLING, 0.2)
    assert sorted(server.aborted) == ["a", "b"]
    await client.close()
    server.kill()


async def test_cancelled_group_is_aborted_on_the_server(tmp_path: Path) -> None:
    fleet = Fleet()
    server, endpoint = await listening(fleet)
    fleet.answers.append(late)
    client = RolloutClient()
    task = asyncio.create_task(client.generate(endpoint, (3,), ("a", "b"), SAMPLING, 60.0))
    await asyncio.sleep(0.2)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert sorted(server.aborted) == ["a", "b"]
    await client.close()
    server.kill()


async def listening(fleet: Fleet) -> tuple[FakeServer, ServerEndpoint]:
    """One fake server without a pool."""
    keys = {"MEGARL_ROLLOUT_API_KEY": "k", "MEGARL_ROLLOUT_ADMIN_KEY": "a"}
    port = free_port("127.0.0.1", ())
    server = await fleet.spawn(["--port", str(port)], keys, "server-0", Path())
    endpoint = ServerEndpoint("server-0", f"http://127.0.0.1:{port}", 1, 0, "k", "a")
    return server, endpoint
