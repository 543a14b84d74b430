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
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from megarl.buffer.groupfile import write_group
from megarl.config.schema import Config
from megarl.errors import ConfigError, RolloutError
from megarl.rollout.client import Completion, RolloutClient, Sampling, ServerGoneError
from megarl.rollout.servers import ServerPool
from megarl.types import Group, Prompt, Sample

log = logging.getLogger(__name__)

Decode = Callable[[Sequence[int]], str]

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
    """Collects responses from the pool's servers. An async context manager.

    `stop_token_ids` end every response: the model's end tokens and the tokens of
    `rollout.sampling.stop`. `decode` makes a response's text, without the token that stopped it.
    Raises ConfigError where a group cannot be in flight at once.
    """

    def __init__(
        self,
        config: Config,
        pool: ServerPool,
        run_dir: Path,
        stop_token_ids: Sequence[int],
        decode: Decode,
    ) -> None:
        rollout = config.rollout
        if rollout.samples_per_prompt > rollout.max_inflight_samples:
            raise ConfigError(
                f"rollout.samples_per_prompt={rollout.samples_per_prompt} exceeds "
                f"rollout.max_inflight_samples={rollout.max_inflight_samples}; a group is "
                "generated at once, so raise the latter"
            )
        self._config = config
        self._pool = pool
        self._run_dir = run_dir
        self._stop_token_ids = tuple(stop_token_ids)
        self._decode = decode
        self._client = RolloutClient()
        self._room = _Room(rollout.max_inflight_samples)

    async def __aenter__(self) -> Collector:
        await self._client.__aenter__()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._client.aclose()

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
            await _cancelled(tasks)

    async def evaluate(self, prompts: Sequence[Prompt], version: int) -> list[Sample]:
        """One greedy response per prompt, in the prompts' order; no file is written.

        Their log-probs are at temperature 1. Raises RolloutError.
        """
        return await self._one_each(prompts, version, "eval", temperature=0.0)

    async def probe(self, prompts: Sequence[Prompt], version: int) -> list[Sample]:
        """One sampled response per prompt, in the prompts' order; no file is written.

        For comparing log-probs with the learner's: they are at the sampling temperature.
        """
        temperature = self._config.rollout.sampling.temperature
        return await self._one_each(prompts, version, "probe", temperature)

    async def _one_each(
        self, prompts: Sequence[Prompt], version: int, kind: str, temperature: float
    ) -> list[Sample]:
        sampling = self._sampling(temperature)
        tasks = [
            asyncio.create_task(
                self._samples(
                    _Request(f"{kind}-{group_id(version, position)}", prompt, 1, sampling, version)
                )
            )
            for position, prompt in enumerate(prompts)
        ]
        try:
            return [sample for (sample,) in await asyncio.gather(*tasks)]
        finally:
            await _cancelled(tasks)

    def _sampling(self, temperature: float) -> Sampling:
        max_new_tokens = self._config.rollout.sampling.max_new_tokens
        return Sampling(temperature, max_new_tokens, self._stop_token_ids)

    async def _group(self, request: _Request) -> Group:
        samples = await self._samples(request)
        group = Group(request.group_id, request.prompt, samples)
        folder = self._run_dir / "rollouts" / f"v{request.version:06d}"
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
                    return await self._client.generate(
                        endpoint,
                        request.prompt.prompt_ids,
                        _request_ids(request),
                        request.sampling,
                        self._config.deadline.generate_s,
                    )
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

    def _sample(self, request: _Request, index: int, completion: Completion) -> Sample:
        sample_id = f"{request.group_id}-{index:02d}"
        found = {span.version for span in completion.version_spans}
        if found != {request.version}:
            raise RolloutError(
                f"{sample_id}: sampled from policy versions {sorted(found)}, not from "
                f"{request.version}; it is not used. A server was synced while it generated"
            )
        sample = Sample(
            sample_id=sample_id,
            group_id=request.group_id,
            prompt_id=request.prompt.prompt_id,
            prompt_ids=request.prompt.prompt_ids,
            finish_reason=completion.finish_reason,
            text=self._text(completion),
        )
        return sample.extended(completion.token_ids, completion.logprobs, request.version)

    def _text(self, completion: Completion) -> str:
        has_stop = completion.finish_reason == "stop"
        return self._decode(completion.token_ids[:-1] if has_stop else completion.token_ids)


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


async def _cancelled(tasks: Sequence[asyncio.Task[object]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
