"""`megarl check sync`: one sync into servers whose weights were spoiled, judged from outside.

Owns the order of the check and its words. What a sync proves by itself is `weight_sync/`'s; here
SGLang's own checksums of what it loaded from the checkpoint are compared with those of what the
learner, which read the same checkpoint by megarl's layouts, has written over spoiled weights.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from megarl.config.schema import Config
from megarl.errors import ConfigError, RolloutError
from megarl.learner.client import LearnerClient
from megarl.rollout import calls
from megarl.rollout.pool import ServerPool
from megarl.types import ServerEndpoint, ServerSync, SyncReport

VERSION = 0
MOST_NAMED = 5  # tensors of one server in one sentence
Sums = Sequence[Mapping[str, str]]
"""For each rank of a server, SGLang's checksum of each tensor by its name."""


@dataclass(frozen=True, slots=True)
class SyncCheck:
    """What was found: `facts` in any case, and what is `wrong`, nothing where all is well."""

    facts: tuple[str, ...]
    wrong: tuple[str, ...]


def check_checkable(config: Config) -> None:
    """Raise ConfigError where the check cannot be made with these settings."""
    if config.placement.mode == "colocated":
        raise ConfigError(
            "megarl check sync needs learner and servers at the same time; add "
            "--placement.mode disaggregated, with devices for both"
        )


async def check_sync(
    learner: LearnerClient, servers: ServerPool, start_empty: bool = False
) -> SyncCheck:
    """Spoil the weights of all servers, publish the learner's, and compare with what was loaded.

    The learner must hold the checkpoint that the servers were started with. Servers that start
    empty have loaded nothing: what the sync proves by itself is then all. Raises RolloutError
    where a server does not answer, WeightSyncError where the learner cannot publish at all.
    """
    endpoints = servers.endpoints()
    loaded = {server.name: await calls.checksums(servers.http, server) for server in endpoints}
    for server in endpoints:
        await calls.spoil_weights(servers.http, server)
        spoilt = await calls.checksums(servers.http, server)
        if spoilt == loaded[server.name]:
            raise RolloutError(
                f"{server.name}: its weights are the same after they were spoiled, so that a sync "
                "would prove nothing; is it SGLang 0.5.23?"
            )
    servers.hold(endpoints)
    report = await learner.publish(VERSION, endpoints)
    results = {result.server: result for result in report.servers}
    facts, wrong = [_told(report)], []
    for server in endpoints:
        found = await calls.checksums(servers.http, server)
        known = [{} for _ in found] if start_empty else loaded[server.name]
        mine = findings(server, results[server.name], known, found)
        wrong += mine
        if not mine:
            facts.append(_well(server, results[server.name], found, start_empty))
    return SyncCheck(tuple(facts), tuple(wrong))


def findings(server: ServerEndpoint, result: ServerSync, loaded: Sums, found: Sums) -> list[str]:
    """What is wrong with one server, in words; nothing where all is well.

    >>> server = ServerEndpoint("server-0", "", tp=1, incarnation=0)
    >>> proved = ServerSync("server-0", 0, verified=True)
    >>> findings(server, proved, [{"a": "1", "b": "2"}], [{"a": "1", "b": "2"}])
    []
    >>> for line in findings(server, proved, [{"a": "1", "b": "2"}], [{"a": "1", "b": "9"}]):
    ...     print(line)
    server-0, rank 0: 1 of 2 tensors are not what SGLang itself loads from actor.model: b. \
The sync proved them to be the learner's, so the learner read that checkpoint in another way
    """
    lines = [] if result.verified else [result.error]
    for rank, (before, after) in enumerate(zip(loaded, found, strict=True)):
        wrong = [name for name in sorted(before) if after.get(name) != before[name]]
        if not wrong:
            continue
        named = ", ".join(wrong[:MOST_NAMED])
        more = f" and {len(wrong) - MOST_NAMED} more" if len(wrong) > MOST_NAMED else ""
        line = (
            f"{server.name}, rank {rank}: {len(wrong)} of {len(before)} tensors are not what "
            f"SGLang itself loads from actor.model: {named}{more}"
        )
        if result.verified:
            line += (
                ". The sync proved them to be the learner's, so the learner read that checkpoint "
                "in another way"
            )
        lines.append(line)
    return lines


def _told(report: SyncReport) -> str:
    return (
        f"{report.moved_bytes} bytes written into {len(report.servers)} server(s) in "
        f"{report.took_s:.2f} s; they hold {report.minimum_bytes} bytes"
    )


def _well(server: ServerEndpoint, result: ServerSync, found: Sums, start_empty: bool) -> str:
    num_tensors = sum(len(rank) for rank in found)
    probe = "no log-probs were compared (weight_sync.probe_tokens = 0)"
    if result.probe_max_abs_logprob is not None:
        probe = f"log-probs within {result.probe_max_abs_logprob:.2g} nats of the learner's"
    tensors = f"{server.name}: all {num_tensors} tensors of {len(found)} rank(s)"
    if start_empty:
        return (
            f"{tensors} were proved by the sync alone: servers of float8 load nothing themselves; "
            f"{probe}"
        )
    return f"{tensors} are what SGLang itself loads from actor.model; {probe}"
