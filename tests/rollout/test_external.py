"""Servers given by URL: checked at start, never ended, and back in routing once synced again."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from megarl.config.schema import Config
from megarl.errors import RolloutError
from megarl.rollout import calls, external
from megarl.rollout import pool as pool_module
from megarl.rollout.client import ServerGoneError
from megarl.rollout.pool import ServerPool
from megarl.types import ServerEndpoint
from tests.config.conftest import MODEL
from tests.rollout.running import FakeServer, Fleet, make_config, verified

KEYS = {"MEGARL_ROLLOUT_API_KEY": "api", "MEGARL_ROLLOUT_ADMIN_KEY": "admin"}
FACTS = {"tp_size": 1, "ep_size": 1, "attn_dp_size": 1, "dtype": "float32"}


class Outside(FakeServer):
    """A server of somebody else's, which says `model` and `facts` of itself."""

    def __init__(self, model: Mapping[str, Any], port: int = 0) -> None:
        super().__init__(Fleet(), "outside", port, KEYS)
        self.model, self.facts = model, dict(FACTS)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def _info(self, request: web.Request) -> web.Response:
        self._check(request, self.api_key)
        return web.json_response(self.model)

    async def _server_info(self, request: web.Request) -> web.Response:
        self._check(request, self.api_key)
        return web.json_response(self.facts)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(MODEL))
    return folder


@pytest.fixture(autouse=True)
def keys(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in KEYS.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(external, "RETRY_S", 0.05)
    monkeypatch.setattr(pool_module, "SUSPECT_S", 0.5)


async def no_spawn(*_: object) -> Any:
    raise AssertionError("nothing is started")


def served(folder: Path) -> dict[str, Any]:
    return {"architectures": MODEL["architectures"], "model_path": str(folder)}


def pool_of(config: Config, folder: Path) -> ServerPool:
    return ServerPool(config, folder, no_spawn, "cpu")


def config_for(model: Path, *urls: str) -> Config:
    deadline = {"server_start_s": 300, "server_answer_s": 0.5, "generate_s": 60, "sync_s": 30}
    return make_config(model, rollout={"urls": list(urls)}, deadline=deadline)


@asynccontextmanager
async def running(model: Path) -> AsyncIterator[tuple[ServerPool, Outside]]:
    """A pool of one external server, verified at version 0."""
    outside = Outside(served(model))
    await outside.listen()
    pool = pool_of(config_for(model, outside.url), model)
    try:
        await pool.start()
        pool.mark_verified(verified(pool.endpoints(), 0))
        yield pool, outside
    finally:
        await pool.aclose()
        outside.kill()


async def acquired(pool: ServerPool, version: int) -> ServerEndpoint:
    async with asyncio.timeout(5), pool.acquire(version) as endpoint:
        return endpoint


async def until(holds: Callable[[], object]) -> None:
    async with asyncio.timeout(5):
        while not holds():
            await asyncio.sleep(0.01)


async def test_external_server_is_used_with_the_keys_of_the_environment(model: Path) -> None:
    async with running(model) as (pool, outside):
        endpoint = await acquired(pool, 0)
        assert (endpoint.url, endpoint.incarnation) == (outside.url, 0)
        assert (endpoint.api_key, endpoint.admin_key) == ("api", "admin")
        assert endpoint.nodes == ()


async def test_external_server_outlives_the_pool(model: Path) -> None:
    async with running(model) as (pool, outside):
        await pool.aclose()
        assert not outside._status.done()


async def test_server_on_another_machine_is_on_a_node_of_its_own(model: Path) -> None:
    (server,) = external.servers(config_for(model, "http://10.0.0.7:30000/"), KEYS)
    assert server.endpoint.nodes == ("10.0.0.7",)
    assert server.endpoint.url == "http://10.0.0.7:30000"


async def test_unreachable_server_is_named_at_start(model: Path) -> None:
    pool = pool_of(config_for(model, "http://127.0.0.1:9"), model)
    with pytest.raises(RolloutError, match=r"127.0.0.1:9 \(rollout.urls\) does not answer within"):
        await pool.start()
    await pool.aclose()


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"model": {"architectures": ["LlamaForCausalLM"], "model_path": "/x"}}, "LlamaForCausal"),
        ({"facts": {**FACTS, "tp_size": 2}}, "has tp_size = 2, and rollout.parallel.tp is 1"),
        ({"facts": {**FACTS, "attn_dp_size": 4}}, "has attn_dp_size = 4"),
        ({"facts": {**FACTS, "dtype": "bfloat16"}}, "learner.precision.params is fp32"),
        ({"api_key": "another"}, "401"),
    ],
)
async def test_wrong_server_is_refused_in_words_at_start(
    model: Path, change: dict[str, Any], text: str
) -> None:
    outside = Outside(served(model))
    for name, value in change.items():
        setattr(outside, name, value)
    await outside.listen()
    pool = pool_of(config_for(model, outside.url), model)
    with pytest.raises(RolloutError, match=text):
        await pool.start()
    await pool.aclose()
    outside.kill()


async def test_model_of_another_shape_is_refused_where_its_folder_can_be_read(
    model: Path, tmp_path: Path
) -> None:
    other = tmp_path / "other"
    other.mkdir()
    (other / "config.json").write_text(json.dumps({**MODEL, "num_hidden_layers": 5}))
    config = config_for(model, "http://10.0.0.7:30000")
    (found,) = external.problems(config, served(other), FACTS)
    assert "of another shape" in found
    assert external.problems(config, served(model), FACTS) == []
    assert external.problems(config, {**served(model), "model_path": "/elsewhere"}, FACTS) == []


async def test_server_with_a_prefix_cache_is_refused_where_pauses_keep_it(model: Path) -> None:
    config = make_config(
        model, rollout={"urls": ["http://10.0.0.7:1"]}, weight_sync={"pause": "in_place"}
    )
    (found,) = external.problems(config, served(model), FACTS)
    assert "--disable-radix-cache" in found
    assert external.problems(config, served(model), {**FACTS, "disable_radix_cache": True}) == []


async def test_dead_server_leaves_routing_and_rejoins_when_it_answers_and_is_synced(
    model: Path,
) -> None:
    async with running(model) as (pool, outside):
        joined: list[ServerEndpoint] = []

        async def hook(endpoint: ServerEndpoint) -> None:
            joined.append(endpoint)
            pool.mark_verified(verified([endpoint], 0))

        pool.on_restart = hook
        first = await acquired(pool, 0)
        outside.kill()
        await asyncio.gather(*outside._stops)
        pool.report_trouble(first, ServerGoneError("connection refused"))
        await until(lambda: not pool.endpoints())
        await asyncio.sleep(0.3)  # it stays away for as long as it likes
        assert not joined
        again = Outside(served(model), outside.port)
        await again.listen()
        second = await acquired(pool, 0)
        assert (second.url, second.incarnation) == (first.url, 1)
        assert joined == [second]
        again.kill()


async def test_server_that_refused_and_is_paused_is_synced_again(model: Path) -> None:
    async with running(model) as (pool, outside):

        async def hook(endpoint: ServerEndpoint) -> None:
            pool.mark_verified(verified([endpoint], 1))

        pool.on_restart = hook
        outside.is_healthy = False  # as a paused server says
        pool.restart("server-0")
        assert (await acquired(pool, 1)).incarnation == 1


@pytest.mark.parametrize(
    ("label", "is_ready", "found"),
    [("default", True, True), ("default", False, False), ("3", True, False)],
    ids=["as started", "left paused", "synced by another run"],
)
async def test_server_has_its_start_weights_where_nobody_has_synced_it(
    model: Path, label: str, is_ready: bool, found: bool
) -> None:
    async with running(model) as (pool, outside):
        outside.model = {**outside.model, "weight_version": label}
        outside.is_healthy = is_ready
        assert await calls.has_start_weights(pool.http, pool.endpoints()[0]) is found


async def test_server_that_comes_back_as_another_is_left_out(model: Path) -> None:
    async with running(model) as (pool, outside):
        outside.kill()
        await asyncio.gather(*outside._stops)
        again = Outside(served(model), outside.port)
        again.facts["tp_size"] = 2
        await again.listen()
        pool.restart("server-0")
        await asyncio.sleep(0.3)
        assert pool.endpoints() == []
        again.facts["tp_size"] = 1
        await until(pool.endpoints)
        again.kill()
