"""Stage b: prompts in, finished groups out, each as it ends.

Owns the bound on samples in flight, the retry of groups whose server died, the check of policy
versions and the group files. Knows nothing of rewards, advantages or how a server is started.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from megarl import run_paths
from megarl.buffer.groupfile import write_group
from megarl.config.schema import Config
from megarl.errors import RolloutError
from megarl.rollout.client import (
    NO_VERSION,
    Completion,
    LateError,
    RolloutClient,
    Sampling,
    ServerGoneError,
)
from megarl.rollout.pool import ServerPool
from megarl.rollout.tasks import all_or_none, cancelled
from megarl.types import Group, Prompt, Sample, ServerEndpoint

log = logging.getLogger(__name__)


class Vocabulary(Protocol):
    """What responses need of the model's tokenizer."""

    @property
    def eos_ids(self) -> tuple[int, ...]:
        """The model's own end tokens."""

    def stop_id(self, text: str) -> int:
        """The one token that is this text. Raises ConfigError where there is none."""

    def decode(self, ids: Sequence[int]) -> str:
        """Text of token ids, without special tokens."""


TRIES_PER_INCARNATION = 3  # of one group on one server process that fails it and yet lives
RETRY_S = 0.5


@dataclass(frozen=True, slots=True)
class _Request:
    """What is asked for one prompt: `num_samples` responses under `group_id` at `version`."""

    group_id: str
    prompt: Prompt
    num_samples: int
    sampling: Sampling
    version: int


class Collector:
    """Collects responses from the pool's servers. Made inside a running event loop; closed at the
    end.

    A response ends with one of the model's end tokens or of the tokens of `rollout.sampling.stop`,
    which its text is without. Raises ConfigError where a stop text is not one token.
    """

    def __init__(
        self,
        config: Config,
        pool: ServerPool,
        run_dir: Path,
        vocabulary: Vocabulary,
    ) -> None:
        rollout = config.rollout
        assert rollout.samples_per_prompt <= rollout.max_inflight_samples  # by config/check.py
        self._config = config
        self._pool = pool
        self._run_dir = run_dir
        self._vocabulary = vocabulary
        stops = (vocabulary.stop_id(text) for text in rollout.sampling.stop)
        self._stop_token_ids = (*vocabulary.eos_ids, *stops)
        self._client = RolloutClient()
        self._room = _Room(rollout.max_inflight_samples)

    async def close(self) -> None:
        """Close all connections."""
        await self._client.close()

    async def collect(self, prompts: Sequence[Prompt], version: int) -> AsyncIterator[Group]:
        """One group of `samples_per_prompt` responses per prompt, yielded as each ends.

        Every group comes once, written to its file, all its tokens sampled at `version`. Where the
        iteration is left or fails, what still runs is aborted on the servers. Raises RolloutError.
        """
        count = self._config.rollout.samples_per_prompt
        sampling = self._sampling(self._config.rollout.sampling.temperature)
        tasks = [
            asyncio.create_task(
                self._group(_Request(group_id(version, position), prompt, count, sampling, version))
            )
            for position, prompt in enumerate(prompts)
        ]
        try:
            for ended in asyncio.as_completed(tasks):
                yield await ended
        finally:
            await cancelled(tasks)

    async def evaluate(self, prompts: Sequence[Prompt], version: int) -> list[Sample]:
        """One greedy response per prompt, in the prompts' order; no file is written.

        Their log-probs are at temperature 1. Raises RolloutError.
        """
        sampling = self._sampling(temperature=0.0)
        requests = (
            _Request(f"eval-{group_id(version, position)}", prompt, 1, sampling, version)
            for position, prompt in enumerate(prompts)
        )
        return await all_or_none([self._one(request) for request in requests])

    async def probe(
        self, server: ServerEndpoint, prompts: Sequence[Prompt], max_new_tokens: int
    ) -> list[Sample]:
        """One response per prompt, sampled by this very server, routable or not; no file is
        written.

        For comparing log-probs with the learner's. Raises RolloutError; nothing is tried again.
        """
        temperature = self._config.rollout.sampling.temperature
        sampling = Sampling(temperature, max_new_tokens, self._stop_token_ids)
        requests = (
            _Request(f"probe-{position:04d}", prompt, 1, sampling, NO_VERSION)
            for position, prompt in enumerate(prompts)
        )
        return await all_or_none([self._one(request, server) for request in requests])

    async def _one(self, request: _Request, server: ServerEndpoint | None = None) -> Sample:
        if server is None:
            return (await self._samples(request))[0]
        async with self._room.taken(1):
            try:
                completions = await self._ask(server, request)
            except ServerGoneError as error:
                raise RolloutError(f"{request.group_id}: {error}; see its log") from error
        return self._sample(request, 0, completions[0])

    def _sampling(self, temperature: float) -> Sampling:
        max_new_tokens = self._config.rollout.sampling.max_new_tokens
        return Sampling(temperature, max_new_tokens, self._stop_token_ids)

    async def _group(self, request: _Request) -> Group:
        samples = await self._samples(request)
        group = Group(request.group_id, request.prompt, samples)
        folder = run_paths.version_folder(self._run_dir, request.version)
        path = await asyncio.to_thread(write_group, folder, group)
        return Group(group.group_id, group.prompt, group.samples, path)

    async def _samples(self, request: _Request) -> tuple[Sample, ...]:
        """The samples of one group, from the first server that answers whole."""
        async with self._room.taken(request.num_samples):
            completions = await self._completions(request)
        return tuple(
            self._sample(request, index, completion) for index, completion in enumerate(completions)
        )

    async def _completions(self, request: _Request) -> tuple[Completion, ...]:
        failures: Counter[tuple[str, int]] = Counter()
        while True:
            async with self._pool.acquire(request.version, request.num_samples) as endpoint:
                try:
                    return _at_version(await self._ask(endpoint, request), request)
                except LateError as error:
                    await self._late(endpoint, error)
                except ServerGoneError as error:
                    log.warning("group issued again group=%s why=%s", request.group_id, error)
                    key = (endpoint.name, endpoint.incarnation)
                    failures[key] += 1
                    if failures[key] == TRIES_PER_INCARNATION:
                        raise RolloutError(
                            f"{request.group_id}: {endpoint.name} failed it "
                            f"{TRIES_PER_INCARNATION} times and yet runs: {error}; see its log"
                        ) from error
                    self._pool.report_trouble(endpoint, error)
            await asyncio.sleep(RETRY_S)

    async def _late(self, endpoint: ServerEndpoint, error: LateError) -> None:
        """After a late group: an error where its server works, a restart where that hangs.

        A server that a sync holds, or has left paused, is neither: the group is issued again.
        """
        answers = await self._pool.answers(endpoint)
        if not self._pool.is_routable(endpoint):
            log.warning("group held by a paused server server=%s why=%s", endpoint.name, error)
        elif answers:
            raise RolloutError(str(error)) from error
        else:
            log.warning("server hangs, restarted server=%s why=%s", endpoint.name, error)
            self._pool.restart(endpoint.name, endpoint.incarnation)

    async def _ask(self, server: ServerEndpoint, request: _Request) -> tuple[Completion, ...]:
        """The completions from this server, all of whose tokens are of versions that it proved."""
        ids = _request_ids(request)
        completions = await self._client.generate(
            server,
            request.prompt.prompt_ids,
            ids,
            request.sampling,
            self._config.deadline.generate_s,
        )
        await self._pool.settled(server)  # a response can end before the report of the sync is in
        self._pool.versions.check(server, completions, ids)
        return completions

    def _sample(self, request: _Request, index: int, completion: Completion) -> Sample:
        sample = Sample(
            sample_id=f"{request.group_id}-{index:02d}",
            group_id=request.group_id,
            prompt_id=request.prompt.prompt_id,
            prompt_ids=request.prompt.prompt_ids,
            finish_reason=completion.finish_reason,
            text=self._text(completion),
        )
        for span in completion.version_spans:
            part = slice(span.start, span.end)
            sample = sample.extended(
                completion.token_ids[part], completion.logprobs[part], span.version
            )
        return sample

    def _text(self, completion: Completion) -> str:
        has_stop = completion.finish_reason == "stop"
        return self._vocabulary.decode(
            completion.token_ids[:-1] if has_stop else completion.token_ids
        )


class _Room:
    """Room for a number of samples, given in the order in which it is asked for."""

    def __init__(self, num_samples: int) -> None:
        self._num_free = num_samples
        self._turn = asyncio.Lock()
        self._freed = asyncio.Condition()

    @contextlib.asynccontextmanager
    async def taken(self, num_samples: int) -> AsyncIterator[None]:
        """Room for that many samples inside; waits until there is."""
        async with self._turn, self._freed:  # the turn: a large group is not overtaken for ever
            await self._freed.wait_for(lambda: self._num_free >= num_samples)
            self._num_free -= num_samples
        try:
            yield
        finally:
            self._num_free += num_samples
            async with self._freed:
                self._freed.notify_all()


def group_id(version: int, position: int) -> str:
    """The id of the group of the prompt at `position` of the rollout batch of `version`.

    >>> group_id(3, 12)
    'v000003-0012'
    """
    return f"v{version:06d}-{position:04d}"


def _request_ids(request: _Request) -> list[str]:
    """New ids for each try: a server refuses one that it is still working on."""
    unique = uuid.uuid4().hex[:8]
    return [f"{request.group_id}-{index:02d}.{unique}" for index in range(request.num_samples)]


def _at_version(completions: tuple[Completion, ...], request: _Request) -> tuple[Completion, ...]:
    """The completions, all of whose tokens come from the version that was asked for."""
    for index, completion in enumerate(completions):
        found = {span.version for span in completion.version_spans}
        if found != {request.version}:
            raise RolloutError(
                f"{request.group_id}-{index:02d}: sampled from policy versions {sorted(found)}, "
                f"not from {request.version}; it is not used. Was a server synced meanwhile?"
            )
    return completions
