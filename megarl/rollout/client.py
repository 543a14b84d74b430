"""One request to one rollout server: prompt ids in, G responses with their log-probs and versions
out.

Owns the wire form of SGLang's `/generate` and the checks of its replies. Knows nothing of groups'
files, routing or restarts: `ServerGoneError` says that the server, not the request, is at fault.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import aiohttp

from megarl.actor.config_fields import is_finite, is_integer, shown
from megarl.errors import MALFORMED, MegarlError, RolloutError
from megarl.rollout import calls
from megarl.types import FinishReason, ServerEndpoint, VersionSpan

log = logging.getLogger(__name__)

NO_VERSION = -1  # the weights that a server was started with; no sync has reached it
MAX_INT32 = 2**31 - 1  # what a group file has for a token and for a version
ABORT_S = 5.0  # how long an abort of cancelled requests may hold up their cancellation


class ServerGoneError(MegarlError):
    """The server closed the connection, refused it, or failed by itself: ask another one."""


class LateError(ServerGoneError):
    """The responses did not end in time: the server is too slow for the deadline, or hangs."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """How responses are sampled. `temperature` 0 is greedy, whose log-probs are at temperature 1.

    `stop_token_ids` end a response, and are its last token where they do.
    """

    temperature: float
    max_new_tokens: int
    stop_token_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Completion:
    """One response, T tokens. `logprobs` [T], in nats, are those of the sampling pass itself.

    `labels` are what the server calls the weights of each of `version_spans`.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish_reason: FinishReason
    version_spans: tuple[VersionSpan, ...]
    labels: tuple[str, ...]


class RolloutClient:
    """Speaks with rollout servers, any number of requests at a time. Close it in the end."""

    def __init__(self) -> None:
        self._http = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0),  # the collector bounds the samples in flight
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=10.0),
        )

    async def close(self) -> None:
        """Close all connections."""
        await self._http.close()

    async def generate(
        self,
        endpoint: ServerEndpoint,
        prompt_ids: Sequence[int],
        request_ids: Sequence[str],
        sampling: Sampling,
        deadline_s: float,
    ) -> tuple[Completion, ...]:
        """One response to the prompt for each of `request_ids`, in their order.

        Late or cancelled, the requests are aborted on the server. Raises ServerGoneError where
        another server should be asked, its LateError where the deadline passed, and RolloutError
        where the request or the reply is wrong.
        """
        body = {
            "input_ids": [list(prompt_ids)] * len(request_ids),
            "rid": list(request_ids),
            "return_logprob": True,
            "sampling_params": {
                "temperature": sampling.temperature,
                "max_new_tokens": sampling.max_new_tokens,
                "stop_token_ids": list(sampling.stop_token_ids),
                "top_p": 1.0,
                "top_k": -1,
                "min_p": 0.0,
                "repetition_penalty": 1.0,
            },
        }
        try:
            async with asyncio.timeout(deadline_s):
                reply = await self._post(endpoint, "/generate", body)
        except TimeoutError:
            await self._abort(endpoint, request_ids)
            raise LateError(
                f"{endpoint.name}: {request_ids[0]} and {len(request_ids) - 1} more of its group "
                f"did not end within deadline.generate_s={deadline_s:g}; they are aborted. Raise "
                "it, or lower rollout.sampling.max_new_tokens or rollout.max_inflight_samples"
            ) from None
        except asyncio.CancelledError:
            await self._abort(endpoint, request_ids)
            raise
        return parse_reply(reply, request_ids, endpoint.name)

    async def _post(self, endpoint: ServerEndpoint, path: str, body: Mapping[str, Any]) -> Any:
        headers = {"Authorization": f"Bearer {endpoint.api_key}"}
        try:
            async with self._http.post(endpoint.url + path, json=body, headers=headers) as response:
                text = await response.text()
                if response.status >= 500:
                    raise ServerGoneError(f"{endpoint.name}: HTTP {response.status}: {text[:300]}")
                if response.status != 200:
                    raise RolloutError(
                        f"{endpoint.name} refuses {path} with HTTP {response.status}: {text[:500]}"
                    )
                return await response.json(content_type=None)
        except (aiohttp.ClientError, ConnectionError) as error:
            raise ServerGoneError(f"{endpoint.name}: {type(error).__name__}: {error}") from error
        except (ValueError, RecursionError) as error:
            raise RolloutError(
                f"{endpoint.name}: {path} did not answer with JSON: {error}"
            ) from error

    async def _abort(self, endpoint: ServerEndpoint, request_ids: Sequence[str]) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(ABORT_S):
                await asyncio.shield(calls.abort(self._http, endpoint, request_ids))


def parse_reply(reply: Any, request_ids: Sequence[str], server: str) -> tuple[Completion, ...]:
    """The completions in a reply of `/generate`, checked.

    Raises RolloutError naming the sample where log-probs are missing, do not match the tokens or
    are not finite, or where versions do not cover the tokens; ServerGoneError where the server
    aborted by itself.
    """
    if not isinstance(reply, list) or len(reply) != len(request_ids):
        found = len(reply) if isinstance(reply, list) else type(reply).__name__
        raise RolloutError(
            f"{server}: asked for {len(request_ids)} responses ({request_ids[0]}...), got {found}; "
            "is it SGLang 0.5.23?"
        )
    return tuple(
        _completion(item, request_id, server)
        for item, request_id in zip(reply, request_ids, strict=True)
    )


def _completion(item: Any, request_id: str, server: str) -> Completion:
    def wrong(found: str) -> RolloutError:
        return RolloutError(
            f"{request_id} from {server}: {found}; the sample cannot be trained on. "
            "Is it SGLang 0.5.23? See its log"
        )

    try:
        meta = item["meta_info"]
        reason, token_ids = meta["finish_reason"]["type"], tuple(item["output_ids"])
        pairs = meta.get("output_token_logprobs")
        spans = meta.get("weight_versions") or ()
    except MALFORMED as error:
        raise wrong(f"reply without {error}") from error
    if reason == "abort":
        raise ServerGoneError(
            f"{server} aborted {request_id}: {meta['finish_reason'].get('message')}"
        )
    if reason not in ("stop", "length"):
        raise wrong(f"it ended with {shown(reason)}")
    if meta.get("id") != request_id:
        raise wrong(f"reply is for {shown(meta.get('id'))}")
    if not token_ids:
        raise wrong("no token came back")
    if not all(is_integer(token) and 0 <= token <= MAX_INT32 for token in token_ids):
        raise wrong(f"its tokens are {shown(token_ids)}")
    if not isinstance(pairs, list) or len(pairs) != len(token_ids):
        found = len(pairs) if isinstance(pairs, list) else "no"
        raise wrong(f"{len(token_ids)} tokens came with {found} log-probs")
    logprobs: list[float] = []
    for index, pair in enumerate(pairs):
        if not isinstance(pair, list) or len(pair) < 2:
            raise wrong(f"log-prob {index} is {shown(pair)}")
        logprob, paired_id, token_id = pair[0], pair[1], token_ids[index]
        if paired_id != token_id:
            raise wrong(f"log-prob {index} belongs to token {shown(paired_id)}, not {token_id}")
        if not is_finite(logprob):
            raise wrong(f"log-prob {index}, of token {token_id}, is {shown(logprob)}")
        logprobs.append(float(logprob))
    return Completion(
        token_ids=token_ids,
        logprobs=tuple(logprobs),
        finish_reason=cast(FinishReason, reason),
        version_spans=_spans(spans, len(token_ids), wrong),
        labels=tuple(str(span["version"]) for span in spans),
    )


def _version(label: Any) -> int:
    """The policy version in a label, VERSION.ATTEMPT. Raises ValueError where there is none."""
    if label == calls.UNSYNCED_LABEL:
        return NO_VERSION
    version = int(str(label).partition(".")[0])
    if not 0 <= version <= MAX_INT32:
        raise ValueError(label)
    return version


def _spans(spans: Any, num_tokens: int, wrong: Any) -> tuple[VersionSpan, ...]:
    """SGLang's version labels as spans that cover all tokens in order."""
    try:
        found = tuple(
            VersionSpan(int(span["start"]), int(span["end"]), _version(span["version"]))
            for span in spans
        )
    except MALFORMED as error:
        raise wrong(
            f"its weight versions are {shown(spans)}, which name no policy version"
        ) from error
    end = 0
    for span in found:
        if span.start != end or span.end <= span.start:
            raise wrong(f"its version spans {shown(spans)} do not follow each other")
        end = span.end
    if end != num_tokens:
        raise wrong(f"its version spans {shown(spans)} do not cover its {num_tokens} tokens")
    return found
