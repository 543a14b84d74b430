"""`megarl check sync`: the engines of a run, started to check one weight sync, and ended.

Owns where that happens and what is printed. What is checked is `controller/spoiled_sync.py`'s.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
from dataclasses import replace
from pathlib import Path

from megarl import run_paths
from megarl.actor.shape import read_shape
from megarl.compat import SGLANG_VERSION
from megarl.config.bounds import probe_bound
from megarl.config.capability import planned
from megarl.config.explain import explain_run
from megarl.config.record import environment_record
from megarl.config.schema import Config
from megarl.config.served import served_block
from megarl.controller.spoiled_sync import SyncCheck, check_checkable, check_sync
from megarl.launch.folder import open_run_folder, write_environment
from megarl.launch.run import EngineRun, logging_to
from megarl.launch.topology import make_topology
from megarl.learner.client import LearnerClient
from megarl.reshard.fabric import DEFAULT, FABRICS
from megarl.rollout.pool import ServerPool

SUFFIX = ".check-sync"
HELD = {
    "retract": "running requests wait, and go on with their KV cache computed anew",
    "in_place": "running requests wait, and go on with the KV cache of the old weights",
    "abort": "running requests end, and are asked again",
}


def explain_sync(config: Config) -> str:
    """What a sync of `config` will do, from settings alone: the plan as a page, and the order."""
    sync = config.weight_sync
    probe = "no log-probs are compared"
    if sync.probe_tokens and config.placement.mode != "colocated":
        bound = probe_bound(config)
        probe = (
            f"each server scores {sync.probe_tokens} tokens, within {bound:g} nats of the "
            "learner's in the mean"
        )
    return (
        f"{explain_run(config, None, FABRICS[DEFAULT])}\n\n"
        f"mode      weight_sync.mode = {sync.mode}\n"
        f"exact     {_can_write(config)}\n"
        f"pause     weight_sync.pause = {sync.pause}: {HELD[sync.pause]}\n"
        f"probe     {probe}\n"
        f"deadline  deadline.sync_s = {config.deadline.sync_s:g}\n"
    )


def _can_write(config: Config) -> str:
    """What is known of writing into such servers in place, and what a sync does then."""
    if config.rollout.urls:
        return "servers of rollout.urls say at start what they are"
    device = "cpu" if config.launch.device == "cpu" else "cuda"
    row = planned(config, read_shape(config.actor.model).architecture, device)
    text = f"{row.verdict} for SGLang {SGLANG_VERSION} on {device}: {row.why}"
    if config.launch.device == "auto":
        text += (
            "\ndevice    launch.device = auto is planned as cuda; where the run finds no GPU it is "
            "cpu: give --launch.device cpu to see that"
        )
    return text


def run_check_sync(config: Config) -> tuple[int, str]:
    """Check the weight sync of `config`; returns the exit status and what was found, in lines.

    0 where all is well, 1 where something is wrong, 130 after Ctrl-C. Logs are in a folder of its
    own beside that of the run, which is not touched. Raises MegarlError where an engine fails.
    """
    check_checkable(config)
    run_dir = (Path(config.run.dir) / f"{config.run.name}{SUFFIX}").absolute()
    topology = replace(make_topology(config, os.environ), critic=None)  # nobody asks its ranks
    found: list[SyncCheck] = []
    start_empty = served_block(config) is not None

    async def work(learner: LearnerClient, servers: ServerPool) -> None:
        found.append(await check_sync(learner, servers, start_empty))

    try:
        with open_run_folder(config, run_dir) as folder:
            shutil.rmtree(run_dir / run_paths.LOGS, ignore_errors=True)  # of an earlier check
            logging_to(run_dir / run_paths.LOGS / "controller.log")
            write_environment(run_dir, environment_record(config))
            status = asyncio.run(EngineRun(config, folder, topology, work).run())
    except KeyboardInterrupt:
        return 128 + signal.SIGINT, ""
    if status:
        return status, ""
    (check,) = found
    verdict = "not as it should be" if check.wrong else "as it should be"
    lines = [*check.facts, *(f"wrong: {line}" for line in check.wrong)]
    lines.append(f"weight sync: {verdict}; logs: {run_dir / 'logs'}")
    return (1 if check.wrong else 0), "\n".join(lines) + "\n"
