"""Memory that servers hold, by SGLang's tags: what of it is released, and how it comes and goes.

Owns a ledger of released tags for every server process, and the rule that only an idle server gives
memory back. SGLang 0.5.23 ends its scheduler where a server that is busy is to release, or where a
tag is resumed that was not released; both are errors here, before it is asked. Knows nothing of why
memory is wanted.

On a CPU SGLang does as it is told and frees nothing.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable

import aiohttp

from megarl.errors import RolloutError
from megarl.rollout import calls
from megarl.types import ServerEndpoint

log = logging.getLogger(__name__)

TAGS = frozenset({"weights", "kv_cache", "cuda_graph"})


class TagLedger:
    """Which tags each server process has released. A new incarnation has released none.

    >>> ledger, server = TagLedger(), ServerEndpoint("server-0", "", tp=1, incarnation=0)
    >>> ledger.release(server, {"kv_cache"})
    >>> sorted(ledger.held(server))
    ['cuda_graph', 'weights']
    """

    def __init__(self) -> None:
        self._released: dict[tuple[str, int], frozenset[str]] = {}

    def held(self, server: ServerEndpoint) -> frozenset[str]:
        """The tags whose memory it has."""
        return TAGS - self._of(server)

    def release(self, server: ServerEndpoint, tags: Iterable[str]) -> None:
        """It has released `tags`. Raises RolloutError for an unknown or a released one."""
        wanted = _known(tags)
        self._check(server, wanted & self._of(server), "released already")
        self._released[server.name, server.incarnation] = self._of(server) | wanted

    def resume(self, server: ServerEndpoint, tags: Iterable[str]) -> None:
        """It has `tags` again. Raises RolloutError for an unknown one, or one not released."""
        wanted = _known(tags)
        self._check(server, wanted - self._of(server), "not released")
        self._released[server.name, server.incarnation] = self._of(server) - wanted

    def _of(self, server: ServerEndpoint) -> frozenset[str]:
        return self._released.get((server.name, server.incarnation), frozenset())

    def _check(self, server: ServerEndpoint, wrong: frozenset[str], state: str) -> None:
        if wrong:
            raise RolloutError(
                f"{server.name}, incarnation {server.incarnation}: {', '.join(sorted(wrong))} is "
                f"{state}; SGLang would end its scheduler, so it was not asked"
            )


def _known(tags: Iterable[str]) -> frozenset[str]:
    wanted = frozenset(tags)
    if wanted - TAGS:
        raise RolloutError(f"{sorted(wanted - TAGS)} are no memory tags; use {sorted(TAGS)}")
    return wanted


class Occupation:
    """What living servers hold: those that `endpoints` names, called through the session `http`.

    One that does not do as it is told is ended by `end`, with why: it is started anew like one that
    died, and holds everything then.
    """

    def __init__(
        self,
        endpoints: Callable[[], Iterable[ServerEndpoint]],
        http: Callable[[], aiohttp.ClientSession],
        end: Callable[[ServerEndpoint, str], Awaitable[None]],
    ) -> None:
        self._endpoints, self._http, self._end = endpoints, http, end
        self._ledger = TagLedger()

    async def give(self, keep: frozenset[str]) -> frozenset[str]:
        """Have every living server hold no more than `keep`; returns what was released.

        Each is idle first, and its prefix cache is flushed. One that is not idle in time, or does
        not answer, is ended, and its process is gone when this returns.
        """

        async def release(server: ServerEndpoint, tags: frozenset[str]) -> None:
            self._ledger.release(server, tags)
            await calls.flush_cache(self._http(), server)
            await calls.release_memory(self._http(), server, sorted(tags))

        return await self._each(lambda server: self._ledger.held(server) - keep, release)

    async def take(self, wanted: frozenset[str]) -> frozenset[str]:
        """Have every living server hold `wanted`; returns what was resumed."""

        async def resume(server: ServerEndpoint, tags: frozenset[str]) -> None:
            self._ledger.resume(server, tags)
            await calls.resume_memory(self._http(), server, sorted(tags))

        return await self._each(lambda server: wanted - self._ledger.held(server), resume)

    async def _each(
        self,
        choose: Callable[[ServerEndpoint], frozenset[str]],
        work: Callable[[ServerEndpoint, frozenset[str]], Awaitable[None]],
    ) -> frozenset[str]:
        """`work` on every server that `choose` finds tags for, side by side; the tags."""

        async def one(server: ServerEndpoint, tags: frozenset[str]) -> None:
            try:
                await work(server, tags)
            except RolloutError as error:
                log.warning("server ended server=%s memory=%s", server.name, error)
                await self._end(server, str(error))

        chosen = {server: choose(server) for server in self._endpoints()}
        await asyncio.gather(*(one(server, tags) for server, tags in chosen.items() if tags))
        return frozenset().union(*chosen.values())
