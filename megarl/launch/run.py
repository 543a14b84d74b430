"""One run from its start to its end: engines up side by side, the loop on them, everything gone
after.

Owns the order, the watch over the learner, and what signals do. How processes start is
`launcher.py`'s, what the loop does `controller/`'s, which server may be asked `rollout/`'s.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import logging
import os
import signal
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

from megarl import run_paths
from megarl.config.layouts import critic_settings
from megarl.config.record import environment_record
from megarl.config.schema import Config
from megarl.controller.colocated import kept_at_start
from megarl.controller.ending import Ending
from megarl.controller.training import finished_version, load_inputs, note_on, train
from megarl.controller.with_critic import LearnerWithCritic
from megarl.errors import LaunchError, LearnerError
from megarl.launch.cleanup import run_prefix, sweep_run
from megarl.launch.early_end import check_time_limit, end_at_usr1, watch_the_clock
from megarl.launch.folder import RunFolder, open_run_folder, write_environment
from megarl.launch.launcher import Launcher
from megarl.launch.local import LocalSteps
from megarl.launch.process import Process, describe_status
from megarl.launch.slurm import SlurmSteps
from megarl.launch.tempdir import own_temp_folder
from megarl.launch.topology import Topology, make_topology
from megarl.learner.client import CriticClient, LearnerClient
from megarl.learner.phases import read_phases, remove_old
from megarl.observe.metrics import read_rows
from megarl.observe.progress import Progress, end_table
from megarl.reward.scorer import Scorer
from megarl.rollout.pool import ServerPool
from megarl.rollout.server import log_end

log = logging.getLogger(__name__)

Work = Callable[[LearnerClient, ServerPool], Coroutine[Any, Any, None]]
"""What is done on engines that are up."""

Facts = dict[str, str]  # what rank 0 wrote of its service: url, api_key, pid

POLL_S = 0.1
ACCOUNT_S = 10.0  # from the learner's silence to the end of its launcher, which says why
SHUTDOWN_S = 10.0  # of a learner whose work is done
CANCEL_S = 3.0  # for the loop to put its things away
LOG_LINES = 15
NO_ROOM = (errno.ENOSPC, errno.EDQUOT)
OF_DISKS = (*NO_ROOM, errno.EROFS, errno.EACCES, errno.EPERM, errno.EIO, errno.EFBIG, errno.ESTALE)
ON_CPUS = "on CPUs servers release memory by name only; this shows the order, and frees nothing"
ENDED_EARLY = os.EX_TEMPFAIL  # 75: not done, and the same command goes on
CONTINUE = "the same command continues from the last checkpoint"


def run_training(config: Config, run_dir: Path) -> int:
    """Run or continue the training of `config` in `run_dir`; returns the exit status.

    0 when it is finished, 130 after Ctrl-C, 143 after SIGTERM, 75 where it was saved and ended
    before its time limit or by SIGUSR1. Raises MegarlError for everything else, after every process
    and shared-memory entry of the run is gone.
    """
    run_dir, ending = run_dir.absolute(), Ending()
    end_at_usr1(ending)
    try:
        inputs = load_inputs(config)
        if note := note_on(config, inputs):
            Progress(config.loop.versions).note(note)
        topology = make_topology(config, os.environ)
        with open_run_folder(config, run_dir) as folder:
            logging_to(run_dir / run_paths.LOGS / "controller.log")
            if finished_version(run_dir) >= config.loop.versions:
                Progress(config.loop.versions).note(
                    f"{run_dir} has reached version {config.loop.versions}: nothing to do. To go "
                    "on, raise --loop.versions; to start anew, give another --run.name or remove "
                    f"the folder\n{end_table(read_rows(run_dir / 'metrics.jsonl'), run_dir)}"
                )
                return 0
            check_time_limit(config)
            write_environment(run_dir, environment_record(config))
            reward = Scorer(config)

            async def work(learner: LearnerClient, servers: ServerPool) -> None:
                await train(config, run_dir, inputs, reward, learner, servers, ending)

            run = EngineRun(config, folder, topology, work, before=reward, ending=ending)
            status = asyncio.run(run.run())
            if ending.reason and not status and finished_version(run_dir) < config.loop.versions:
                Progress(config.loop.versions).note(f"ended early: {ending.reason}")
                status = ENDED_EARLY
            if status:
                Progress(config.loop.versions).note(_how_to_go_on(run_dir))
            return status
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except OSError as error:
        if error.errno not in OF_DISKS:
            raise
        where = error.filename or run_dir
        remedy = "make room there" if error.errno in NO_ROOM else "mend that"
        text = f"{where}: cannot be used: {error.strerror}; {remedy}. {CONTINUE}"
        raise LaunchError(text) from error
    finally:
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # until this process is gone too


def _how_to_go_on(run_dir: Path) -> str:
    version = finished_version(run_dir)
    if version:
        return f"ended; the same command continues from version {version}, the last checkpoint"
    return "ended; the same command starts anew, as no checkpoint was saved (checkpoint.every)"


def logging_to(path: Path) -> None:
    """Write megarl's log to `path`, and its warnings to standard error as well."""
    path.parent.mkdir(parents=True, exist_ok=True)
    to_file = logging.FileHandler(path)
    to_file.setFormatter(logging.Formatter("%(asctime)s %(name)s %(levelname)s %(message)s"))
    to_stderr = logging.StreamHandler()
    to_stderr.setLevel(logging.WARNING)
    logger = logging.getLogger("megarl")
    logger.setLevel(logging.INFO)
    logger.handlers = [to_file, to_stderr]


class EngineRun:
    """One start of both engines, for `work` on them. `before` is entered before any of them starts,
    and left at the end: what is wrong with a reward costs no start of engines. `ending` is asked
    for by the clock.
    """

    def __init__(
        self,
        config: Config,
        folder: RunFolder,
        topology: Topology,
        work: Work,
        before: AbstractAsyncContextManager[object] | None = None,
        ending: Ending | None = None,
    ) -> None:
        self._ending = ending
        steps = SlurmSteps() if topology.kind == "slurm" else LocalSteps()
        self._progress = Progress(config.loop.versions)
        self._config = config
        self._folder = folder
        self._topology = topology
        self._use, self._before = work, before or contextlib.nullcontext()
        self._launcher = Launcher(config, folder.path, topology, steps, folder.run_ids)
        self._signum = 0

    async def run(self) -> int:
        """Work until done, a failure or a signal; leave nothing behind. Returns the exit status."""
        log.info("placed kind=%s %s", self._topology.kind, self._topology.describe())
        work = asyncio.create_task(self._work())
        try:
            self._catch_signals(work)
            with own_temp_folder(run_prefix(self._folder.run_id)):
                await work
        except BaseException:
            if not self._signum:
                raise
        finally:
            await self._launcher.end_all()
            for run_id in self._folder.run_ids:
                sweep_run(run_id)
        return 128 + self._signum if self._signum else 0

    def _catch_signals(self, work: asyncio.Task[None]) -> None:
        """The first SIGINT or SIGTERM ends the run in order, the second one at once."""

        def received(signum: int) -> None:
            if self._signum:
                self._launcher.kill_all()
                for run_id in self._folder.run_ids:
                    sweep_run(run_id)
                os._exit(128 + signum)
            self._signum = signum
            log.warning("ending the run signal=%s", signal.Signals(signum).name)
            self._launcher.ask_all_to_end()
            work.cancel()

        loop = asyncio.get_running_loop()
        for signum in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(signum, received, signum)
        if self._ending is not None:
            watch_the_clock(self._config, self._ending)

    async def _work(self) -> None:
        if self._ending and self._ending.reason:
            return
        async with self._before:
            await self._engines()

    async def _engines(self) -> None:
        """Start both engines, work on them, end them.

        They start side by side, but for servers that are there first. Those given by their URLs are
        only asked, which takes seconds. Colocated ones start first, as SGLang sizes its KV cache by
        the memory that it finds, and give what they can before the learner takes its own.
        """
        run_dir = self._folder.path
        topology = self._topology
        roles = [run_paths.LEARNER] + ([run_paths.CRITIC] if topology.critic else [])
        for role in roles:
            remove_old(run_dir, role)  # here too: the learner's launcher may end before it does
        servers = ServerPool(
            self._config, run_dir, self._launcher.spawn, topology.device, topology.servers
        )
        try:
            self._tell_start()
            is_colocated = self._config.placement.mode == "colocated"
            are_there = bool(self._config.rollout.urls)
            if are_there:
                await self._servers_ready(servers)
            if is_colocated:
                if self._topology.device == "cpu":
                    self._progress.note(f"placement.mode=colocated: {ON_CPUS}")
                await self._servers_ready(servers)
                await servers.hold_starts()
                is_resumed = finished_version(run_dir) > 0
                await servers.occupation.give(kept_at_start(self._config, is_resumed))
            ranks = {run_paths.LEARNER: await self._launcher.start_learner()}
            if topology.critic:
                ranks[run_paths.CRITIC] = await self._launcher.start_critic()
            engines = [self._timed(self._ranks_ready(role), f"{role} ready") for role in roles]
            if not is_colocated and not are_there:
                engines.append(self._servers_ready(servers))
            found = await self._while_alive(ranks, self._unless_ending(_all(*engines)))
            if found is None:
                return
            facts = dict(zip(roles, found, strict=False))
            async with contextlib.AsyncExitStack() as stack:
                learner = await self._client(facts, stack)
                await self._while_alive(ranks, self._use(learner, servers))
                await learner.shutdown()
                with contextlib.suppress(TimeoutError):
                    ends = asyncio.gather(*(process.wait() for process in ranks.values()))
                    await asyncio.wait_for(ends, SHUTDOWN_S)
        finally:
            await servers.aclose()

    async def _unless_ending(self, work: Coroutine[Any, Any, Any]) -> Any:
        """The result of `work`; None where the run is to end first, which has nothing to save."""
        return await (self._ending.unless(work) if self._ending else work)

    def _tell_start(self) -> None:
        critic = ""
        if self._topology.critic:
            critic = f"{critic_settings(self._config).learner_processes} critic ranks, "
        self._progress.note(
            f"starting {self._config.learner_processes} learner ranks, {critic}and "
            f"{self._config.rollout.servers} rollout server(s): {self._topology.describe()}; "
            f"logs: {self._folder.path / 'logs'}".replace("ranks, and", "ranks and")
        )

    async def _client(
        self, facts: Mapping[str, Facts], stack: contextlib.AsyncExitStack
    ) -> LearnerClient:
        """The learner, with the critic behind it that has ranks of its own; closed by `stack`."""
        run_dir, deadline = self._folder.path, self._config.deadline
        url, key = (facts[run_paths.LEARNER][name] for name in ("url", "api_key"))
        failure = run_dir / run_paths.failure(run_paths.LEARNER)
        if run_paths.CRITIC not in facts:
            return await stack.enter_async_context(LearnerClient(url, key, deadline, failure))
        theirs, their_key = (facts[run_paths.CRITIC][name] for name in ("url", "api_key"))
        account = run_dir / run_paths.failure(run_paths.CRITIC)
        critic = await stack.enter_async_context(CriticClient(theirs, their_key, deadline, account))
        both = LearnerWithCritic(url, key, self._config, failure, critic)
        return await stack.enter_async_context(both)

    async def _ranks_ready(self, role: str) -> Facts:
        """Wait for the endpoint file of `role`. Raises LearnerError when its time is over."""
        endpoint = self._folder.path / run_paths.endpoint(role)
        deadline = time.monotonic() + self._config.deadline.learner_start_s
        while time.monotonic() < deadline:
            with contextlib.suppress(FileNotFoundError):
                facts: Facts = json.loads(endpoint.read_text())
                return facts
            await asyncio.sleep(POLL_S)
        raise LearnerError(
            f"the {role} did not answer within deadline.learner_start_s="
            f"{self._config.deadline.learner_start_s:g}; its ranks: {self._places(role)}; see "
            f"{self._folder.path / 'logs' / f'{role}.log'}"
        )

    async def _while_alive(
        self, ranks: Mapping[str, Process], work: Coroutine[Any, Any, Any]
    ) -> Any:
        """The result of `work`. Raises LaunchError with the first cause where the learner, or a
        critic with ranks of its own, ends first.

        An error of a call to one that is ending is its end, seen from the other side.
        """
        task = asyncio.create_task(work)
        deaths = {asyncio.create_task(process.wait()): role for role, process in ranks.items()}
        try:
            await asyncio.wait({task, *deaths}, return_when=asyncio.FIRST_COMPLETED)
            if task.done() and isinstance(task.exception(), LearnerError):
                first = asyncio.FIRST_COMPLETED
                await asyncio.wait(deaths, timeout=ACCOUNT_S, return_when=first)
            dead = next((death for death in deaths if death.done()), None)
            if dead and not (task.done() and task.exception() is None):
                role = deaths[dead]
                raise LaunchError(self._account(role, ranks[role], dead.result())) from (
                    task.exception() if task.done() else None
                )
            return await task
        finally:
            for each in (task, *deaths):
                each.cancel()
            await asyncio.wait({task, *deaths}, timeout=CANCEL_S)

    def _account(self, role: str, process: Process, returncode: int) -> str:
        """Why the learner or critic ended: rank, host, signal, phase and memory, where known."""
        path = self._folder.path / run_paths.failure(role)
        try:
            facts = json.loads(path.read_text())
            last = f"{facts['verb']}/{facts['phase']}" if facts["verb"] else "none, it was starting"
            text = f"{facts['text']}\nlast phase: {last}"
        except (OSError, ValueError, KeyError):
            seat = self._topology.seat(role)
            where = "+".join(node.name for node in seat.nodes)
            last = log_end(process.log_path, LOG_LINES)
            text = (
                f"the {role} on {where} {describe_status(returncode)} without an account; its "
                f"ranks: {self._places(role)}; the end of its log:\n{last}"
            )
        return f"{text}\nlog: {process.log_path}\n{CONTINUE}"

    async def _servers_ready(self, servers: ServerPool) -> None:
        await self._timed(servers.start(), "rollout servers ready")

    async def _timed(self, work: Awaitable[Any], what: str) -> Any:
        """The result of `work`, and a line on how long it took."""
        start_s = time.monotonic()
        result = await work
        self._progress.note(f"{what} after {time.monotonic() - start_s:.0f} s")
        return result

    def _places(self, role: str) -> str:
        phases = read_phases(self._folder.path / run_paths.LOGS, role).values()
        return ", ".join(f"{p.rank} in {p.place} on {p.host}" for p in phases) or "none started"


async def _all(*work: Awaitable[Any]) -> list[Any]:
    """The results of all; at the first error the others are cancelled."""
    tasks = [asyncio.ensure_future(one) for one in work]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        failed = [task for task in tasks if task.done() and task.exception() is not None]
        return [await task for task in failed or tasks]
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks, timeout=CANCEL_S)
