"""Small calls to one rollout server: is it ready, what does it serve, abort, flush, give memory.

Owns their paths and which of the two keys opens them. Knows nothing of prompts and routing; calls
that bring weights are the weight sync's.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import aiohttp

from megarl.errors import MALFORMED, RolloutError
from megarl.types import ServerEndpoint

UNSYNCED_LABEL = "default"  # SGLang's own label for the weights that a server was started with
POLL_S = 0.2
PROBE_S = 5.0
HEALTH_S = 30.0  # SGLang gives its scheduler 20 s to answer before it says 503
IDLE_S = 20.0  # for a server to end what it still does; below HEALTH_S, so that it can say no


async def is_ready(http: aiohttp.ClientSession, endpoint: ServerEndpoint) -> bool:
    """Whether the server's HTTP side takes requests. Cheap; the scheduler is not asked."""
    return await _status(http, endpoint.url + "/ready", PROBE_S) == 200


async def is_listening(http: aiohttp.ClientSession, endpoint: ServerEndpoint) -> bool:
    """Whether the server's HTTP side answers at all: a paused server is not ready, and does."""
    return await _status(http, endpoint.url + "/ready", PROBE_S) != 0


async def has_start_weights(http: aiohttp.ClientSession, endpoint: ServerEndpoint) -> bool:
    """Whether the server gives tokens of the weights that it was started with. Raises RolloutError.

    One that another run synced, or left paused, does not.
    """
    label = (await model_info(http, endpoint)).get("weight_version")
    return label == UNSYNCED_LABEL and await is_ready(http, endpoint)


async def is_healthy(http: aiohttp.ClientSession, endpoint: ServerEndpoint) -> bool:
    """Whether the scheduler answers too: it generates one token where idle; takes a second."""
    return await _status(http, endpoint.url + "/health", HEALTH_S) == 200


async def until(
    check: Callable[[aiohttp.ClientSession, ServerEndpoint], Awaitable[bool]],
    http: aiohttp.ClientSession,
    endpoint: ServerEndpoint,
) -> None:
    """Ask `check` again and again until it says yes. The caller sets the deadline."""
    while not await check(http, endpoint):  # another process; there is no event
        await asyncio.sleep(POLL_S)


async def _status(http: aiohttp.ClientSession, url: str, timeout_s: float) -> int:
    try:
        async with http.get(url, timeout=aiohttp.ClientTimeout(total=timeout_s)) as response:
            return response.status
    except (aiohttp.ClientError, ConnectionError, TimeoutError):
        return 0


async def model_info(http: aiohttp.ClientSession, endpoint: ServerEndpoint) -> Mapping[str, Any]:
    """What the server serves: `model_path`, `weight_version` and more. Raises RolloutError."""
    return await _object(http, "GET", endpoint, "/model_info", endpoint.api_key)


async def server_info(http: aiohttp.ClientSession, endpoint: ServerEndpoint) -> Mapping[str, Any]:
    """What the server was started with. Raises RolloutError."""
    return await _object(http, "GET", endpoint, "/server_info", endpoint.api_key)


async def freeze_gc(http: aiohttp.ClientSession, endpoint: ServerEndpoint) -> None:
    """Exempt what is loaded by now from garbage collection, in all of the server's processes.

    A full collection was seen to halt generation for 0.3 s. SGLang does it after its warm-up, but
    without one it asks itself too early. Raises RolloutError.
    """
    await _call(http, "POST", endpoint, "/freeze_gc", endpoint.admin_key)


async def abort(
    http: aiohttp.ClientSession, endpoint: ServerEndpoint, request_ids: Sequence[str]
) -> None:
    """Stop these requests; those that have ended, and a server that is gone, are no error."""
    await asyncio.gather(
        *(
            _call(http, "POST", endpoint, "/abort_request", endpoint.admin_key, {"rid": request_id})
            for request_id in request_ids
        ),
        return_exceptions=True,
    )


async def checksums(
    http: aiohttp.ClientSession, endpoint: ServerEndpoint
) -> list[Mapping[str, str]]:
    """For each rank, SGLang's own checksum of every tensor by its name. Raises RolloutError."""
    path, body = "/weights_checker", {"action": "checksum"}
    reply = await _object(http, "POST", endpoint, path, endpoint.admin_key, body)
    try:
        return [dict(rank["checksums"]) for rank in reply["ranks"]]
    except MALFORMED as error:
        raise RolloutError(
            f"{endpoint.name}: {path} answered without checksums of ranks ({error!r}); is it "
            "SGLang 0.5.23?"
        ) from error


async def spoil_weights(http: aiohttp.ClientSession, endpoint: ServerEndpoint) -> None:
    """Have the server fill its weights with random numbers. Raises RolloutError."""
    path, body = "/weights_checker", {"action": "reset_tensors"}
    await _call(http, "POST", endpoint, path, endpoint.admin_key, body)


async def flush_cache(http: aiohttp.ClientSession, endpoint: ServerEndpoint) -> None:
    """Wait until the server is idle, at most IDLE_S, and empty its prefix cache.

    Raises RolloutError where it stays busy or does not answer.
    """
    await _call(http, "POST", endpoint, f"/flush_cache?timeout={IDLE_S:g}", endpoint.admin_key)


async def release_memory(
    http: aiohttp.ClientSession, endpoint: ServerEndpoint, tags: Sequence[str]
) -> None:
    """Have the server give the device memory of `tags` back. It must be idle, or it ends.

    What the tag "weights" held is lost. Raises RolloutError.
    """
    path = "/release_memory_occupation"
    await _call(http, "POST", endpoint, path, endpoint.admin_key, {"tags": list(tags)})


async def resume_memory(
    http: aiohttp.ClientSession, endpoint: ServerEndpoint, tags: Sequence[str]
) -> None:
    """Have the server take the device memory of `tags` again. All were released, or it ends.

    Raises RolloutError.
    """
    path = "/resume_memory_occupation"
    await _call(http, "POST", endpoint, path, endpoint.admin_key, {"tags": list(tags)})


async def _object(
    http: aiohttp.ClientSession,
    method: str,
    endpoint: ServerEndpoint,
    path: str,
    key: str,
    body: Mapping[str, Any] | None = None,
) -> Mapping[str, Any]:
    """The JSON object that the server answers with."""
    found = await _call(http, method, endpoint, path, key, body)
    if not isinstance(found, dict):
        raise RolloutError(
            f"{endpoint.name}: {path} answered with {type(found).__name__}, not an object; is it "
            "SGLang 0.5.23?"
        )
    return found


async def _call(
    http: aiohttp.ClientSession,
    method: str,
    endpoint: ServerEndpoint,
    path: str,
    key: str,
    body: Mapping[str, Any] | None = None,
) -> Any:
    headers = {"Authorization": f"Bearer {key}"}
    timeout = aiohttp.ClientTimeout(total=HEALTH_S)
    try:
        async with http.request(
            method, endpoint.url + path, headers=headers, json=body, timeout=timeout
        ) as response:
            if response.status != 200:
                raise RolloutError(
                    f"{endpoint.name} refuses {path} with HTTP {response.status}: "
                    f"{(await response.text())[:300]}"
                )
            is_json = response.content_type == "application/json"
            return await response.json() if is_json else await response.text()
    except (ValueError, RecursionError) as error:
        raise RolloutError(
            f"{endpoint.name}: {path} did not answer with what it says it is: {error}; see its log"
        ) from error
    except (aiohttp.ClientError, ConnectionError, TimeoutError) as error:
        raise RolloutError(
            f"{endpoint.name}: {path} did not answer: {type(error).__name__}: {error}; see its log"
        ) from error
