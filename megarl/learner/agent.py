"""A node's elastic agent: starts its learner ranks, watches them, ends all when one fails.

Owns who failed first, and says so. A thin shell around torch's elastic launcher, without restarts:
a learner that lost a rank resumes from a checkpoint. Knows nothing of verbs. When it ends, nothing
that it started is left.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import psutil
from torch.distributed.elastic.multiprocessing import LogsDest, LogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.api import Std
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from megarl import run_paths
from megarl.config.fp8 import environment, environment_faults
from megarl.config.layouts import critic_settings
from megarl.config.load import read_config
from megarl.config.precision import PrecisionConfig
from megarl.config.schema import Config
from megarl.errors import ConfigError
from megarl.learner.failure import Exit, cgroup_oom_kills, describe, first_failure, memory_now
from megarl.learner.parent import PARENT_PID, die_with_parent, leave
from megarl.learner.phases import read_phases, remove_old, write_json
from megarl.linux import adopt_orphans
from megarl.nodes import node_name

log = logging.getLogger(__name__)

SHUTDOWN_S = 3  # from SIGTERM to SIGKILL; elastic's own default is 30
OTHER_NODE_S = 3.0  # a node whose ranks only lost a peer waits so long for the account of the cause


class _OwnOutput(LogsSpecs):
    """Ranks write to this process's own output, and elastic keeps no files."""

    def __init__(self) -> None:
        super().__init__(os.devnull, Std.NONE, Std.NONE, None)

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        for env in envs.values():
            env["TORCHELASTIC_ERROR_FILE"] = ""
        inherited, none = dict.fromkeys(envs, ""), dict.fromkeys(envs, os.devnull)
        return LogsDest(inherited, dict(inherited), error_files=none)

    @property
    def root_log_dir(self) -> str:
        return os.devnull


def launch(
    config: Config,
    command: Sequence[str],
    run_dir: Path,
    num_nodes: int = 1,
    node_rank: int = 0,
    rendezvous: str = "",
    role: str = run_paths.LEARNER,
) -> int:
    """Run `command` as every rank of this node until all have ended; returns the exit status.

    `rendezvous` is HOST:PORT of node rank 0, where there are several nodes. On a failure the
    account stands in RUN/logs/learner-failure.json, or `role`'s. Must be called in the main thread.
    """
    logs = run_dir / run_paths.LOGS
    logs.mkdir(parents=True, exist_ok=True)
    if node_rank == 0:
        remove_old(run_dir, role)
    set_environment(num_nodes, config.learner.precision)
    oom_kills = cgroup_oom_kills()
    try:
        settings = elastic_config(config, num_nodes, node_rank, rendezvous, role)
        elastic_launch(settings, command[0])(*command[1:])
    except ChildFailedError as error:
        exits = {
            rank: Exit(failure.pid, failure.exitcode) for rank, failure in error.failures.items()
        }
        report(exits, run_dir, oom_kills, role)
        return 1
    except SignalException as ended:
        log.warning("%s ended signal=%s", role, ended.sigval.name)
        return 128 + int(ended.sigval)
    finally:
        end_descendants()
    return 0


def elastic_config(
    config: Config, num_nodes: int, node_rank: int, rendezvous: str, role: str = run_paths.LEARNER
) -> LaunchConfig:
    """torch's launch settings for this node.

    One node: a rendezvous of its own on a free loopback port. Several: static, so that node ranks
    are those that the launcher gave, and node rank 0 holds the store.
    """
    several = num_nodes > 1
    return LaunchConfig(
        min_nodes=num_nodes,
        max_nodes=num_nodes,
        nproc_per_node=config.learner_processes // num_nodes,
        run_id=f"{config.run.name}-{role}",
        role=role,
        rdzv_backend="static" if several else "c10d",
        rdzv_endpoint=rendezvous if several else "127.0.0.1:0",
        rdzv_configs={"rank": node_rank, "timeout": int(config.deadline.learner_start_s)},
        max_restarts=0,
        monitor_interval=0.1,
        logs_specs=_OwnOutput(),
        local_addr=None if several else "127.0.0.1",
        shutdown_timeout=SHUTDOWN_S,
    )


def set_environment(num_nodes: int, precision: PrecisionConfig) -> None:
    """What the ranks inherit: their launcher's pid, one thread each, loopback on one node, and what
    Transformer Engine reads.

    Raises ConfigError where a variable is set already that makes an FP8 recipe another one.
    """
    faults = list(environment_faults(precision, os.environ))
    if faults:
        raise ConfigError(faults)
    os.environ.update(environment(precision))
    os.environ[PARENT_PID] = str(os.getpid())
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # ranks share the cores of a node
    if num_nodes == 1:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")


def report(
    exits: dict[int, Exit], run_dir: Path, oom_kills_before: int, role: str = run_paths.LEARNER
) -> None:
    """Write the account of the first failing rank, unless another node has written the cause."""
    path = run_dir / run_paths.failure(role)
    phases = read_phases(run_dir / run_paths.LOGS, role)
    first = first_failure(exits, phases)
    if first is None:
        deadline = time.monotonic() + OTHER_NODE_S
        while not path.exists() and time.monotonic() < deadline:
            time.sleep(0.1)
        first = min(exits.items())
    rank, end = first
    phase = phases.get(rank)
    if phase is not None and phase.pid != end.pid:
        phase = None  # it died before it wrote its own
    memory = memory_now(phase, oom_kills_before)
    failure = describe(rank, end, phase, node_name(os.environ), memory, time.time(), role)
    log.error("%s", failure.text)
    if not path.exists():
        with contextlib.suppress(OSError):  # a full disk; the log has it, where that had room
            write_json(path, failure.facts())


def end_descendants() -> None:
    """Kill what the ranks left behind, such as helpers that a rank killed by force had started."""
    left = psutil.Process().children(recursive=True)
    for process in left:
        try:
            process.kill()
        except psutil.NoSuchProcess:
            continue
    psutil.wait_procs(left, timeout=SHUTDOWN_S)


def main(argv: Sequence[str] | None = None, module: str = "megarl.learner.service") -> int:
    """Entry: this node's part of the learner. Returns the exit status."""
    die_with_parent(signal.SIGTERM)
    adopt_orphans()
    parser = argparse.ArgumentParser(prog="python -m megarl.learner.agent", description=__doc__)
    parser.add_argument("--config", type=Path, required=True, help="RUN/config.toml")
    parser.add_argument("--run-dir", type=Path, required=True, help="the run folder")
    parser.add_argument("--nnodes", type=int, default=1, help="learner nodes")
    parser.add_argument("--node-rank", type=int, default=0, help="which of them this is")
    parser.add_argument("--rdzv", default="", help="HOST:PORT of node rank 0, with several nodes")
    roles = (run_paths.LEARNER, run_paths.CRITIC)
    parser.add_argument("--role", choices=roles, default=run_paths.LEARNER, help="whose ranks")
    options = parser.parse_args(argv)
    role: str = options.role
    logging.basicConfig(
        level=logging.INFO, format=f"%(asctime)s {role} launcher %(levelname)s %(message)s"
    )
    logging.getLogger("torch.distributed.elastic").setLevel(logging.ERROR)
    config = read_config(options.config)
    if role == run_paths.CRITIC:
        config = critic_settings(config)
    if config.learner_processes % options.nnodes:
        parser.error(
            f"{config.learner_processes} {role} ranks do not split over --nnodes {options.nnodes}"
        )
    if options.nnodes > 1 and not options.rdzv:
        parser.error("--nnodes above 1 needs --rdzv HOST:PORT of node rank 0")
    paths = ["--config", str(options.config), "--run-dir", str(options.run_dir)]
    command = [sys.executable, "-u", "-m", module, *paths, "--role", role]
    nodes = options.nnodes, options.node_rank, options.rdzv
    return launch(config, command, options.run_dir, *nodes, role)


if __name__ == "__main__":
    leave(main())
