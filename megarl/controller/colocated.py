"""The colocated cycle: learner and servers share GPUs in time; what each has there, stage by stage.

Owns the stages and the order: give before take, so that no two stages are ever on the devices
together. How the learner's state and a server's memory move is theirs; when they do is the loop's.

    generating -> learning -> syncing -> generating ...      saving: from generating and back
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass

from megarl.config.parallel import PlacementConfig
from megarl.config.schema import Config
from megarl.config.served import served_block
from megarl.controller.memory import MIB, MemoryLedger
from megarl.controller.turn import Figures, StageName, Turn
from megarl.errors import WeightSyncError
from megarl.learner.client import LearnerClient
from megarl.learner.verbs import PARTS
from megarl.observe.metrics import MetricsLog
from megarl.rollout.occupation import TAGS
from megarl.rollout.pool import ServerPool


@dataclass(frozen=True, slots=True)
class Stage:
    """What is on the devices: parts of the learner's state, and memory of servers by its tags."""

    learner: frozenset[str]
    servers: frozenset[str]


def stages(placement: PlacementConfig) -> Mapping[StageName, Stage]:
    """Every stage of a cycle.

    >>> stage = stages(PlacementConfig())["syncing"]
    >>> sorted(stage.learner), sorted(stage.servers)
    (['weights'], ['weights'])
    """
    all_parts, weights = frozenset(PARTS), frozenset({"weights"})
    none: frozenset[str] = frozenset()
    return {
        "starting": Stage(all_parts, weights),
        "generating": Stage(none if placement.offload_learner_weights else weights, TAGS),
        "learning": Stage(all_parts, none if placement.release_server_weights else weights),
        "syncing": Stage(weights, weights),
        "saving": Stage(frozenset({"weights", "optimizer"}), weights),
    }


def kept_at_start(config: Config, is_resumed: bool) -> frozenset[str]:
    """What servers hold while the learner starts beside them.

    Their weights only where parity at start is to compare what they loaded themselves.
    """
    if config.parity.enabled and not is_resumed and served_block(config) is None:
        return stages(config.placement)["starting"].servers
    return frozenset()


class ColocatedTurn(Turn):
    """Whose turn it is where both sides share devices. At first the stage is "starting".

    Servers that fail to give or take memory are ended and start anew when it is theirs again. An
    error of the learner is raised: it may be between two stages, and the run ends.
    """

    def __init__(
        self, config: Config, learner: LearnerClient, servers: ServerPool, metrics: MetricsLog
    ) -> None:
        self._learner, self._servers, self._metrics = learner, servers, metrics
        self._stages = stages(config.placement)
        self._ledger = MemoryLedger(config.placement.memory_tolerance_mib * MIB)
        self._lock = asyncio.Lock()
        self._stage: StageName = "starting"

    async def to(self, stage: StageName) -> Figures:
        """See Turn. Raises DeviceMemoryError where memory did not return since the first cycle."""
        async with self._lock:
            return await self._move(stage)

    @asynccontextmanager
    async def visit(self, stage: StageName) -> AsyncIterator[None]:
        """See Turn."""
        async with self._lock, self._visit(stage):
            yield

    @asynccontextmanager
    async def rejoining(self) -> AsyncIterator[bool]:
        """See Turn. Servers that generate are not stopped for one that has started anew."""
        async with self._lock:
            if self._stage != "generating":
                yield False
            elif "weights" in self._stages["generating"].learner:
                yield True
            elif self._servers.num_routable:
                yield False
            else:
                async with self._visit("syncing"):
                    yield True

    @asynccontextmanager
    async def _visit(self, stage: StageName) -> AsyncIterator[None]:
        """A sync that failed is no reason to stay: the run may go on with other servers."""
        before = self._stage
        await self._move(stage)
        try:
            yield
        except WeightSyncError:
            await self._move(before)
            raise
        await self._move(before)

    async def _move(self, name: StageName) -> Figures:
        start_s, left, stage = time.perf_counter(), self._stage, self._stages[name]
        here, occupation = self._stages[left].learner, self._servers.occupation
        leaving, coming = here - stage.learner, stage.learner - here
        figures = _named(left, await self._measure())
        if name != "generating":
            await self._servers.hold_starts()
        gave = await _both(self._offload(leaving), occupation.give(stage.servers))
        if name == "learning":
            floor = await self._measure()
            self._ledger.check(floor, self._processes())
            figures |= _named("floor", floor)
        took = await _both(self._onload(coming), occupation.take(stage.servers))
        self._stage = name
        if name == "generating":
            await self._servers.allow_starts()
        self._metrics.event(
            "turn",
            stage=name,
            learner_gave=_words(leaving),
            servers_gave=_words(gave),
            learner_took=_words(coming),
            servers_took=_words(took),
        )
        return {**figures, f"time/to_{name}_s": time.perf_counter() - start_s}

    async def _offload(self, parts: frozenset[str]) -> None:
        if parts:
            await self._learner.offload(sorted(parts))

    async def _onload(self, parts: frozenset[str]) -> None:
        if parts:
            await self._learner.onload(sorted(parts))

    async def _measure(self) -> dict[str, int]:
        rss_bytes = await asyncio.to_thread(lambda: self._servers.rss_bytes)
        return {**await self._learner.memory(), "servers_rss_bytes": rss_bytes}

    def _processes(self) -> tuple[tuple[str, int], ...]:
        return tuple((e.name, e.incarnation) for e in self._servers.endpoints())


async def _both(learner: Awaitable[None], servers: Awaitable[frozenset[str]]) -> frozenset[str]:
    """Both sides at once; what the servers say."""
    return (await asyncio.gather(learner, servers))[1]


def _named(stage: str, values: Mapping[str, int]) -> Figures:
    return {f"memory/{stage}_{name}": value for name, value in values.items()}


def _words(names: frozenset[str]) -> str:
    return " ".join(sorted(names))


def make_turn(
    config: Config, learner: LearnerClient, servers: ServerPool, metrics: MetricsLog
) -> Turn:
    """The turn of this run's `placement.mode`."""
    if config.placement.mode == "colocated":
        return ColocatedTurn(config, learner, servers, metrics)
    return Turn()
