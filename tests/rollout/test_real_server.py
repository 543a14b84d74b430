"""A real SGLang server with a random model: what it samples is what Hugging Face computes.

One server for the whole module, started anew by the pool where a test has killed its scheduler.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import psutil
import pytest
import pytest_asyncio
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from megarl.config.schema import Config
from megarl.errors import RolloutError
from megarl.rollout import calls
from megarl.rollout.client import RolloutClient, Sampling, ServerGoneError
from megarl.rollout.collect import Collector
from megarl.rollout.occupation import TAGS
from megarl.rollout.pool import ServerPool
from megarl.types import Group, Sample, ServerEndpoint
from tests.rollout.running import (
    NumberVocabulary,
    RealHandle,
    make_config,
    make_prompts,
    spawn,
    verified,
)

pytestmark = pytest.mark.asyncio(loop_scope="module")

VOCAB = 96
START_S = 300.0
CLOSE = 1e-4  # nats; fp32 on both sides, 1.4e-6 to 6.7e-6 was seen
Model = Qwen3ForCausalLM


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, Model]]:
    """A tiny random Qwen3 and its folder. Weights are large, so that choices are not all alike."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=512,
        tie_word_embeddings=False,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )
    network = Qwen3ForCausalLM(config).eval()
    for parameter in network.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.15)
    folder = tmp_path_factory.mktemp("model")
    network.save_pretrained(folder)
    yield folder, network


@dataclass
class Running:
    """The started pool with its first process, and what a test needs to collect."""

    config: Config
    pool: ServerPool
    run_dir: Path
    handles: list[RealHandle]
    network: Model
    is_synced: bool = False

    def collector(self, **sampling: Any) -> Collector:
        """A collector like the run's, sampling as said."""
        rollout = self.config.rollout
        asked = rollout.sampling.model_copy(update=sampling)
        changed = rollout.model_copy(update={"sampling": asked})
        config = self.config.model_copy(update={"rollout": changed})
        return Collector(config, self.pool, self.run_dir, NumberVocabulary())


async def set_version(endpoint: ServerEndpoint, version: int) -> None:
    """What the weight sync does last."""
    body = {"new_version": str(version), "abort_all_requests": False}
    await post(endpoint, "/update_weight_version", body)


async def post(endpoint: ServerEndpoint, route: str, body: dict[str, object]) -> None:
    """A call that the admin key opens."""
    headers = {"Authorization": f"Bearer {endpoint.admin_key}"}
    url = endpoint.url + route
    async with (
        aiohttp.ClientSession() as http,
        http.post(url, json=body, headers=headers) as response,
    ):
        assert response.status == 200, await response.text()


@contextlib.asynccontextmanager
async def started(
    model: tuple[Path, Model], tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Running]:
    folder, network = model
    handles: list[RealHandle] = []

    async def recorded(*args: Any) -> RealHandle:
        handles.append(await spawn(*args))
        return handles[-1]

    config = make_config(folder, rollout={"sampling": {"max_new_tokens": 24}})
    run_dir = tmp_path_factory.mktemp("run")
    pool = ServerPool(config, run_dir, recorded, "cpu")
    try:
        await pool.start()
        yield Running(config, pool, run_dir, handles, network)
    finally:
        await pool.aclose()
    assert not [p for p in psutil.pids() if p == handles[-1].pid]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def running(
    model: tuple[Path, Model], tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Running]:
    async with started(model, tmp_path_factory) as made:
        yield made


async def endpoint_of(pool: ServerPool) -> ServerEndpoint:
    """The server's, once it is there."""
    async with asyncio.timeout(START_S):
        while not pool.endpoints():
            await asyncio.sleep(0.05)
    return pool.endpoints()[0]


@pytest_asyncio.fixture(loop_scope="module")
async def fresh(
    running: Running, model: tuple[Path, Model], tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Running]:
    """With a server that has never been synced: another one, where that of all has been."""
    if not running.is_synced:
        running.is_synced = True  # the test does it
        yield running
        return
    async with started(model, tmp_path_factory) as made:
        yield made


@pytest_asyncio.fixture(loop_scope="module")
async def synced(running: Running) -> Running:
    """With a server that may be routed to."""
    endpoint = await endpoint_of(running.pool)
    await set_version(endpoint, 0)
    running.pool.mark_verified(verified([endpoint], 0))
    running.is_synced = True
    return running


@torch.no_grad()
def expected_logprobs(network: Model, sample: Sample, temperature: float) -> torch.Tensor:
    """Log-probs of the response's tokens by a plain Hugging Face forward."""
    ids = torch.tensor([sample.prompt_ids + sample.response_ids])
    logprobs = torch.log_softmax(network(ids).logits[0].float() / temperature, dim=-1)
    first = len(sample.prompt_ids) - 1
    picked = logprobs[first:-1].gather(1, ids[0, first + 1 :, None])
    return picked[:, 0]


def worst_difference(network: Model, samples: list[Sample], temperature: float) -> float:
    return max(
        float((expected_logprobs(network, s, temperature) - torch.tensor(s.behavior_logprobs))
              .abs().max())
        for s in samples
    )  # fmt: skip


async def collected(collector: Collector, count: int, version: int) -> list[Group]:
    try:
        return [group async for group in collector.collect(make_prompts(count), version)]
    finally:
        await collector.close()


async def test_unsynced_server_is_not_routable_but_can_be_probed(fresh: Running) -> None:
    endpoint = fresh.pool.endpoints()[0]
    collector = fresh.collector()
    samples = await collector.probe(endpoint, make_prompts(3), max_new_tokens=6)
    await collector.close()
    assert [s.oldest_version for s in samples] == [-1] * 3
    assert worst_difference(fresh.network, samples, 1.0) < CLOSE
    fresh.pool.mark_verified(verified([endpoint], 0))  # though its label is still the first one
    with pytest.raises(RolloutError, match="weights it was started with, which that"):
        await collected(fresh.collector(), 1, version=0)
    await set_version(endpoint, 0)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
async def test_behavior_logprobs_are_those_of_the_scaled_logits(
    synced: Running, temperature: float
) -> None:
    groups = await collected(synced.collector(temperature=temperature), 6, version=0)
    samples = [sample for group in groups for sample in group.samples]
    assert len(samples) == 6 * 4
    assert len({s.response_ids for s in groups[0].samples}) > 1
    assert worst_difference(synced.network, samples, temperature) < CLOSE
    if temperature != 1.0:
        assert worst_difference(synced.network, samples, 1.0) > 0.1


async def test_greedy_evaluation_is_that_of_hugging_face(synced: Running) -> None:
    collector = synced.collector()
    prompts = make_prompts(6)
    samples = await collector.evaluate(prompts, 0)
    await collector.close()
    for prompt, sample in zip(prompts, samples, strict=True):
        expected = synced.network.generate(
            torch.tensor([prompt.prompt_ids]), do_sample=False, max_new_tokens=24
        )[0, len(prompt.prompt_ids) :]
        assert list(sample.response_ids) == expected.tolist()


async def test_response_ends_with_the_first_stop_token_and_its_text_is_without(
    synced: Running,
) -> None:
    stops = [str(token) for token in range(40, 60)]
    groups = await collected(synced.collector(stop=stops), 4, version=0)
    samples = [sample for group in groups for sample in group.samples]
    ended = [s for s in samples if s.finish_reason == "stop"]
    assert ended
    for sample in samples:
        hits = [i for i, t in enumerate(sample.response_ids) if t == 2 or 40 <= t < 60]
        is_stop = sample.finish_reason == "stop"
        assert hits == ([len(sample.response_ids) - 1] if is_stop else [])
        assert len(sample.text.split()) == len(sample.response_ids) - is_stop


async def test_each_key_opens_its_own_calls_and_neither_shows_in_the_process_list(
    synced: Running,
) -> None:
    endpoint = synced.pool.endpoints()[0]
    async with aiohttp.ClientSession() as http:
        await calls.freeze_gc(http, endpoint)
        swapped = ServerEndpoint(
            "server-0", endpoint.url, 1, 0, endpoint.admin_key, endpoint.api_key
        )
        with pytest.raises(RolloutError, match="HTTP 401"):
            await calls.freeze_gc(http, swapped)
        with pytest.raises(RolloutError, match="HTTP 401"):
            await calls.model_info(http, swapped)
    main = psutil.Process(synced.handles[-1].pid)
    for process in [main, *main.children(recursive=True)]:
        assert endpoint.api_key not in " ".join(process.cmdline())


async def test_aborted_requests_end_before_their_last_token(synced: Running) -> None:
    endpoint = synced.pool.endpoints()[0]
    client = RolloutClient()
    sampling = Sampling(1.0, 480)
    ids = tuple("abcdefgh")  # so many that an abort overtakes them on a busy machine too
    task = asyncio.create_task(client.generate(endpoint, (5, 6), ids, sampling, 60))
    async with aiohttp.ClientSession() as http:
        while not task.done():  # an abort that comes before its request is ignored
            await calls.abort(http, endpoint, ids)
            await asyncio.wait({task}, timeout=0.05)
    with pytest.raises(ServerGoneError, match="aborted [a-h]"):
        await task
    await client.close()


async def test_prompt_too_long_for_the_model_is_an_error_with_the_engines_text(
    synced: Running,
) -> None:
    with pytest.raises(RolloutError, match="maximum context length of 512"):
        await collected(synced.collector(max_new_tokens=600), 1, version=0)


async def test_paused_server_takes_no_core_and_goes_on_when_it_is_resumed(synced: Running) -> None:
    endpoint = synced.pool.endpoints()[0]
    await post(endpoint, "/pause_generation", {"mode": "retract"})
    sampled = asyncio.create_task(collected(synced.collector(), 1, version=0))
    scheduler = psutil.Process(scheduler_pid(synced.handles[-1].pid))
    await asyncio.sleep(0.5)  # for what the pause and the requests themselves take
    before = sum(scheduler.cpu_times()[:2])
    await asyncio.sleep(2.0)
    assert sum(scheduler.cpu_times()[:2]) - before < 0.2  # processor time: SGLang's loop takes 2 s
    assert not sampled.done()
    await post(endpoint, "/continue_generation", {})
    (group,) = await sampled
    assert len(group.samples) == 4


async def test_memory_is_released_when_the_server_is_idle_and_samples_are_right_after_it(
    synced: Running,
) -> None:
    occupation, num_handles = synced.pool.occupation, len(synced.handles)
    sampling = synced.collector(max_new_tokens=120)
    generating = asyncio.create_task(collected(sampling, 2, version=0))  # all it may have at once
    while synced.pool._servers[0].num_inflight < 8:
        await asyncio.sleep(0.01)
    await asyncio.sleep(0.1)
    assert await occupation.give(keep=frozenset({"weights"})) == TAGS - {"weights"}
    groups = await generating  # it waited for them; SGLang would have ended
    assert [len(group.samples) for group in groups] == [4, 4]
    assert len(synced.handles) == num_handles
    assert await occupation.give(keep=frozenset()) == {"weights"}
    assert await occupation.take(frozenset({"weights"})) == {"weights"}
    assert await occupation.take(TAGS) == TAGS - {"weights"}
    groups = await collected(synced.collector(), 4, version=0)
    samples = [sample for group in groups for sample in group.samples]
    assert worst_difference(synced.network, samples, 1.0) < CLOSE


async def test_killed_scheduler_is_replaced_and_every_group_comes_once(synced: Running) -> None:
    pool, rejoined = synced.pool, []
    before, killed = pool.endpoints()[0].incarnation, synced.handles[-1].pid

    async def publish(endpoint: ServerEndpoint) -> None:
        rejoined.append(endpoint)
        await set_version(endpoint, 0)
        pool.mark_verified(verified([endpoint], 0))

    pool.on_restart = publish
    collector = synced.collector(max_new_tokens=60)
    groups: list[Group] = []
    async for group in collector.collect(make_prompts(10), 0):
        groups.append(group)
        if len(groups) == 2:
            os.kill(scheduler_pid(killed), signal.SIGKILL)
    await collector.close()
    assert sorted(g.group_id for g in groups) == [f"v000000-{i:04d}" for i in range(10)]
    assert [endpoint.incarnation for endpoint in rejoined] == [before + 1]
    samples = [sample for group in groups for sample in group.samples]
    assert worst_difference(synced.network, samples, 1.0) < CLOSE
    assert not psutil.pid_exists(killed)


@pytest.mark.slow
async def test_scheduler_ends_where_a_tag_is_resumed_that_was_not_released(
    synced: Running,
) -> None:
    """The engine's own way, which the ledger of tags keeps us from."""
    endpoint = synced.pool.endpoints()[0]
    async with aiohttp.ClientSession() as http:
        with pytest.raises(RolloutError):
            await calls.resume_memory(http, endpoint, ["kv_cache"])
    async with asyncio.timeout(30):
        await synced.handles[-1].wait()


def scheduler_pid(server_pid: int) -> int:
    children = psutil.Process(server_pid).children(recursive=True)
    return next(p.pid for p in children if "scheduler" in " ".join(p.cmdline()))
