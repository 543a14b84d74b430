"""Servers that run already, given by their URLs: what they must be, and how they come back.

Owns the checks before a server is used. Knows nothing of processes, routing or weights: such a
server is neither started nor ended here.
"""

from __future__ import annotations

import asyncio
import math
import os
from collections.abc import Container, Mapping
from dataclasses import dataclass, replace
from typing import Any
from urllib.parse import urlsplit

import aiohttp

from megarl.actor.shape import read_shape
from megarl.config.schema import Config
from megarl.config.served import served_block, served_dtype
from megarl.errors import ModelError, RolloutError
from megarl.nodes import ADMIN_KEY_VARIABLE, API_KEY_VARIABLE
from megarl.rollout import calls
from megarl.rollout.command import DTYPES
from megarl.rollout.server import Server
from megarl.types import ServerEndpoint, is_loopback

RETRY_S = 2.0


def servers(config: Config, environ: Mapping[str, str]) -> list[Server]:
    """The servers of `rollout.urls`, with the keys that the environment has for them.

    One whose URL is this machine's own is on the learner's node, another on a node of its own.
    """
    parallel, found = config.rollout.parallel, []
    for index, url in enumerate(config.rollout.urls):
        host = urlsplit(url).hostname or ""
        endpoint = ServerEndpoint(
            f"server-{index}",
            url.rstrip("/"),
            parallel.tp,
            0,
            environ.get(API_KEY_VARIABLE, ""),
            environ.get(ADMIN_KEY_VARIABLE, ""),
            nodes=() if is_loopback(url) else (host,) * parallel.tp,
            ep=parallel.ep,
            attention_dp=parallel.attention_dp,
        )
        found.append(Server(index, host, endpoint))
    return found


class ExternalHandle:
    """Stands for the process of a server that is not ours: it "ends" when it is given up."""

    pid = 0

    def __init__(self) -> None:
        self._given_up = asyncio.Event()

    async def wait(self) -> int:
        """0, once the server is given up."""
        await self._given_up.wait()
        return 0

    def kill(self) -> None:
        """Give it up; nothing is done to the server."""
        self._given_up.set()


@dataclass(frozen=True, slots=True)
class Connector:
    """Brings servers up that run already: waits until they answer, and sees what they are."""

    config: Config
    http: aiohttp.ClientSession
    max_restarts: float = math.inf  # it may come and go as it likes

    async def bring_up(self, server: Server, incarnation: int, taken: Container[int]) -> None:
        """Wait until the server answers: at first for a while, later for as long as it takes.

        A paused server answers; that its scheduler does is seen from its facts. Raises RolloutError
        where it does not answer, or is not the one that the settings describe.
        """
        server.become("starting")
        server.endpoint = replace(server.endpoint, incarnation=incarnation)
        server.handle = ExternalHandle()
        if incarnation:
            await asyncio.sleep(RETRY_S)  # it may be given up again and again
        where = f"{server.name}, {server.endpoint.url} (rollout.urls)"
        limit_s = self.config.deadline.server_answer_s
        try:
            async with asyncio.timeout(None if incarnation else limit_s):
                await calls.until(calls.is_listening, self.http, server.endpoint)
        except TimeoutError:
            raise RolloutError(
                f"{where} does not answer within deadline.server_answer_s = {limit_s:g}; start "
                "it, or correct the URL"
            ) from None
        try:
            model = await calls.model_info(self.http, server.endpoint)
            facts = await calls.server_info(self.http, server.endpoint)
            found = problems(self.config, model, facts)
        except RolloutError as error:
            found = [f"answers, but not as a server of SGLang should: {error}"]
        if found:
            raise RolloutError(f"{where} {'; and '.join(found)}")


def problems(config: Config, model: Mapping[str, Any], facts: Mapping[str, Any]) -> list[str]:
    """What keeps a server that says this of itself from serving the policy."""
    found = []
    shape = read_shape(config.actor.model)
    architectures = model.get("architectures")
    served = [str(name) for name in architectures] if isinstance(architectures, list) else []
    folder = str(model.get("model_path"))
    if shape.architecture not in served:
        found.append(
            f"serves {', '.join(served) or 'no known architecture'} ({folder}), and actor.model is "
            f"{shape.architecture}; start it with {config.actor.model}"
        )
    elif os.path.isdir(folder):  # where it is another machine's, the architecture must do
        try:
            other = read_shape(folder)
        except ModelError as error:
            found.append(f"serves a model that cannot be read here: {error}")
        else:
            if other not in (shape, replace(shape, fp8_block=served_block(config))):
                found.append(
                    f"serves {folder}, which is of another shape than actor.model = "
                    f"{config.actor.model}; start it with that"
                )
    parallel, dtype = config.rollout.parallel, DTYPES[served_dtype(config)]
    copies, block = parallel.attention_dp, served_block(config)
    setting = "learner.precision.params" if block is None else "rollout.precision.weights"
    arguments = (
        ("tp_size", "rollout.parallel.tp", parallel.tp, (parallel.tp,)),
        ("ep_size", "rollout.parallel.ep", parallel.ep, (parallel.ep,)),
        ("attn_dp_size", "rollout.parallel.attention_dp", copies, (copies,)),
        ("dtype", setting, served_dtype(config), (dtype, "auto")),
    )
    for argument, setting, value, wanted in arguments:
        if facts.get(argument) not in wanted:
            found.append(
                f"has {argument} = {facts.get(argument)}, and {setting} is {value}; make them equal"
            )
    if config.weight_sync.pause == "in_place" and not facts.get("disable_radix_cache"):
        found.append(
            "keeps a prefix cache, which weight_sync.pause = in_place would leave with keys and "
            "values of old weights; start it with --disable-radix-cache --disable-overlap-schedule"
        )
    return found
