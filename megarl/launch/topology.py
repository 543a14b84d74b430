"""Which role runs on which node: from the settings and, inside a Slurm job, the job's own
variables.

Owns the finding of nodes and the placement of learner and servers on them. Starts nothing.
"""

from __future__ import annotations

import os
import re
import socket
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from megarl.config.check_machine import Kind, launch_kind
from megarl.config.layouts import critic_settings
from megarl.config.schema import Config
from megarl.errors import ConfigError, LaunchError
from megarl.nodes import LOOPBACK, NODE_VARIABLE, Device, Node, Seat, node_name, visible_gpus
from megarl.run_paths import CRITIC

SCONTROL_S = 30.0  # a busy slurmctld answers late


@dataclass(frozen=True, slots=True)
class Topology:
    """Where everything runs; the controller itself is on the first node of a job."""

    kind: Kind
    device: Device
    nodes: tuple[Node, ...]
    learner: Seat
    servers: tuple[Seat, ...]
    critic: Seat | None = None
    """Where the critic has ranks of its own."""

    def seat(self, role: str) -> Seat:
        """That of the learner, or of a critic with ranks of its own."""
        return self.critic if role == CRITIC and self.critic is not None else self.learner

    def describe(self) -> str:
        """One line for the log, such as `learner on n1, servers on n2, n2`."""
        learner = "+".join(node.name for node in self.learner.nodes)
        servers = ", ".join(seat.nodes[0].name for seat in self.servers)
        where = f"on {servers}" if servers else "by their URLs"
        if self.critic is not None:
            learner += f", critic on {'+'.join(node.name for node in self.critic.nodes)}"
        return f"learner on {learner}, servers {where}"


def make_topology(config: Config, environ: Mapping[str, str]) -> Topology:
    """Find the nodes and place the roles of `config` on them.

    Raises ConfigError where they do not fit, LaunchError where Slurm does not answer.
    """
    kind = launch_kind(config, environ)
    nodes = slurm_nodes(environ) if kind == "slurm" else local_nodes(environ)
    device = launch_device(config, nodes)
    learner, servers = place(config, nodes, device)
    critic = place_critic(config, nodes, device, learner)
    topology = Topology(kind, device, nodes, learner, servers, critic)
    _check_mode(config, topology)
    return topology


def launch_device(config: Config, nodes: Sequence[Node]) -> Device:
    """`cuda` where the first node has GPUs for us, unless the setting says which."""
    if config.launch.device == "auto":
        return "cuda" if nodes[0].num_gpus else "cpu"
    return config.launch.device


def local_nodes(environ: Mapping[str, str]) -> tuple[Node, ...]:
    """This machine, reached over loopback only, as one node.

    For trials MEGARL_NODE may name several, as in `a,b`: the machine then stands for all of them,
    and weights travel between them as between machines. Raises ConfigError for that with GPUs,
    which no two nodes can share.
    """
    names = node_name(environ).split(",")
    num_cpus = len(os.sched_getaffinity(0))
    num_gpus = visible_gpus(environ)
    if num_gpus and len(names) > 1:
        raise ConfigError(
            f"{NODE_VARIABLE} names {len(names)} nodes, and this machine has {num_gpus} GPU(s), "
            "which they cannot share; name one node, or hide the GPUs (CUDA_VISIBLE_DEVICES=)"
        )
    return tuple(Node(name, LOOPBACK, name, num_cpus, num_gpus) for name in names)


def slurm_nodes(environ: Mapping[str, str]) -> tuple[Node, ...]:
    """The nodes of the surrounding job, in Slurm's order. Raises LaunchError."""
    names = _scontrol("hostnames", environ["SLURM_JOB_NODELIST"]).split()
    cpus = expand_counts(environ["SLURM_JOB_CPUS_PER_NODE"])
    num_gpus = int(environ.get("SLURM_GPUS_ON_NODE") or 0)  # of this node; the others have as many
    nodes = []
    for name, num_cpus in zip(names, cpus, strict=True):
        facts = node_facts(_scontrol("node", name))
        host = facts.get("NodeHostName", name)
        nodes.append(Node(name, resolve(facts.get("NodeAddr", name)), host, num_cpus, num_gpus))
    return tuple(nodes)


def _scontrol(what: str, name: str) -> str:
    command = ["scontrol", "show", what, name, *(["--oneliner"] if what == "node" else [])]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, check=True, timeout=SCONTROL_S
        )
    except FileNotFoundError as error:
        raise LaunchError("scontrol is not on the PATH; add Slurm's bin") from error
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
        stderr = (error.stderr or "").strip() if isinstance(error.stderr, str) else ""
        raise LaunchError(
            f"`{' '.join(command)}` failed: {stderr or error}; see that it "
            "answers on this node, or set launch.kind=local for a run on this node alone"
        ) from error
    return done.stdout


def node_facts(line: str) -> dict[str, str]:
    """The KEY=VALUE words of `scontrol show node --oneliner`.

    >>> node_facts("NodeName=n1 NodeAddr=10.0.0.1 NodeHostName=vm State=IDLE")["NodeAddr"]
    '10.0.0.1'
    """
    pairs = (word.partition("=") for word in line.split())
    return {key: value for key, mark, value in pairs if mark}


def expand_counts(text: str) -> tuple[int, ...]:
    """Slurm's run-length form of a count per node.

    >>> expand_counts("4(x2),3")
    (4, 4, 3)
    """
    counts: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part)
        if match is None:
            raise LaunchError(f"SLURM_JOB_CPUS_PER_NODE is {text!r}; expected a form like 4(x2),3")
        counts += [int(match[1])] * int(match[2] or 1)
    return tuple(counts)


def resolve(address: str) -> str:
    """A node's address as an IP address: binding and connecting mean the same interface."""
    try:
        return str(socket.getaddrinfo(address, None, type=socket.SOCK_STREAM)[0][4][0])
    except OSError as error:
        raise LaunchError(
            f"the node address {address} does not resolve here: {error.strerror}; "
            "name it in DNS or /etc/hosts, or set NodeAddr in slurm.conf"
        ) from error


def place(config: Config, nodes: Sequence[Node], device: Device) -> tuple[Seat, tuple[Seat, ...]]:
    """The learner's seat and each server's. Pure. Raises ConfigError where they do not fit.

    The learner takes the first node or nodes, the servers the others, in turn; everything shares
    the only node where there is one. Where the two are colocated, server ranks take the learner's
    places in order, each server on one node. On CPUs a learner spreads where its ranks outnumber a
    node's CPUs and there are nodes to spare; on GPUs each rank needs one of its own.
    """
    if device == "cpu":
        return _place_on_cpus(config, nodes)
    return _place_on_gpus(config, nodes)


def place_critic(
    config: Config, nodes: Sequence[Node], device: Device, learner: Seat
) -> Seat | None:
    """The seat of a critic with ranks of its own: the learner's first node on CPUs; on GPUs the
    next free ones, beside the learner where all of them are there. None where it has no such ranks.

    Pure. Raises ConfigError where it does not fit.
    """
    if not config.critic_is_apart:
        return None
    if device == "cpu" or learner.gpus is None:
        return Seat(learner.nodes[:1], None)
    ranks, per_node = critic_settings(config).learner_processes, nodes[0].num_gpus
    start = learner.gpus[1]
    if start + ranks <= per_node:
        return Seat(learner.nodes[-1:], (start, start + ranks))
    count = -(-ranks // per_node)
    others = tuple(nodes[len(learner.nodes) :][:count])
    if len(others) < count or ranks % count:
        raise ConfigError(
            f"critic.ranks = own: its {ranks} rank(s) do not fit beside the learner, which has "
            f"{start} of {per_node} GPU(s) on its last node, nor evenly on {count} of the "
            f"{len(nodes) - len(learner.nodes)} other node(s); ask for more, or use other "
            "critic.gpus"
        )
    return Seat(others, (0, ranks // count))


def _place_on_cpus(config: Config, nodes: Sequence[Node]) -> tuple[Seat, tuple[Seat, ...]]:
    ranks, is_colocated = config.learner_processes, config.placement.mode == "colocated"
    most = len(nodes) if is_colocated else max(1, len(nodes) - 1)
    fewest = max(1, -(-ranks // max(1, nodes[0].num_cpus)))
    fits = [n for n in range(min(fewest, most), most + 1) if ranks % n == 0]
    num_learner_nodes = fits[0] if fits else 1
    if is_colocated:
        learner = Seat(tuple(nodes[:num_learner_nodes]), None)
        places = _shared(config, learner.nodes, ranks // num_learner_nodes)
        return learner, tuple(Seat((node,), None) for node, _ in places)
    others = nodes[num_learner_nodes:] or nodes
    servers = tuple(Seat((others[i % len(others)],), None) for i in range(config.started_servers))
    return Seat(tuple(nodes[:num_learner_nodes]), None), servers


def _place_on_gpus(config: Config, nodes: Sequence[Node]) -> tuple[Seat, tuple[Seat, ...]]:
    ranks, tp = config.learner_processes, config.rollout.parallel.tp
    per_node, is_colocated = nodes[0].num_gpus, config.placement.mode == "colocated"
    need = f"{ranks} learner + {config.started_servers} x {tp} rollout GPUs"
    need = f"{ranks} GPUs for learner and servers" if is_colocated else need
    have = f"{len(nodes)} node(s) with {per_node} GPU(s) each"
    num_learner_nodes = -(-ranks // per_node) if per_node else 0
    is_too_wide = tp > per_node and not is_colocated and config.started_servers > 0
    if not per_node or num_learner_nodes > len(nodes) or is_too_wide:
        raise ConfigError(
            f"the run needs {need}, there is {have}; ask for more, run smaller, or set "
            "launch.device = cpu"
        )
    if ranks % num_learner_nodes:
        raise ConfigError(
            f"{ranks} learner ranks do not split evenly over {num_learner_nodes} nodes "
            f"of {per_node} GPUs; use a multiple of {per_node} (placement.learner_gpus)"
        )
    on_each = ranks // num_learner_nodes
    learner = Seat(tuple(nodes[:num_learner_nodes]), (0, on_each))
    if is_colocated:
        places = _shared(config, learner.nodes, on_each)
        return learner, tuple(Seat((node,), (start, start + tp)) for node, start in places)
    critic = place_critic(config, nodes, "cuda", learner)
    taken_by_critic = {} if critic is None else dict.fromkeys(critic.nodes, critic.gpus)
    others = nodes[num_learner_nodes:]
    free = [(node, start) for node in others for start in _slots(0, per_node, tp)]
    free += [(node, start) for node in learner.nodes for start in _slots(on_each, per_node, tp)]
    free = [
        (node, at)
        for node, at in free
        if (gpus := taken_by_critic.get(node)) is None or at + tp <= gpus[0] or at >= gpus[1]
    ]
    if len(free) < config.started_servers:
        raise ConfigError(
            f"the run needs {need}, there is {have}, with room for {len(free)} server(s) "
            f"of tp {tp} beside learner and critic; ask for more nodes, or lower rollout.servers"
        )
    taken = free[: config.started_servers]
    return learner, tuple(Seat((node,), (start, start + tp)) for node, start in taken)


def _shared(config: Config, nodes: Sequence[Node], on_each: int) -> list[tuple[Node, int]]:
    """The node and first place of each server, over `on_each` places of a node. ConfigError."""
    tp, count = config.rollout.parallel.tp, config.rollout.servers
    places = [(node, start) for node in nodes for start in _slots(0, on_each, tp)]
    if len(places) < count:
        raise ConfigError(
            f"placement.mode=colocated: {count} server(s) of tp {tp} do not fit beside the "
            f"learner, which has {on_each} rank(s) on each of {len(nodes)} node(s): a server is on "
            f"one node, so there is room for {len(places)}; use fewer servers or a smaller "
            "rollout.parallel.tp"
        )
    taken = places[:count]
    idle = [node.name for node in nodes if node not in {node for node, _ in taken}]
    if idle:
        raise ConfigError(
            f"placement.mode=colocated: the learner is on {len(nodes)} nodes, and {count} "
            f"server(s) of tp {tp} leave {', '.join(idle)} without one; raise rollout.servers to "
            f"{len(places)}, or use fewer placement.learner_gpus"
        )
    return taken


def _slots(start: int, end: int, size: int) -> range:
    return range(start, end - size + 1, size)


def _check_mode(config: Config, topology: Topology) -> None:
    """Raise ConfigError where the seats are not what `weight_sync.mode` and the launcher need."""
    seats = (topology.learner, *topology.servers)
    names = sorted({node.name for seat in seats for node in seat.nodes})
    if config.weight_sync.mode == "shared" and len(names) > 1:
        raise ConfigError(
            f"weight_sync.mode=shared needs learner and servers on one node, and they are on "
            f"{', '.join(names)}; ask Slurm for one node (sbatch --nodes=1), or set "
            "weight_sync.mode=auto"
        )
    if topology.kind == "local" and len(topology.learner.nodes) > 1:
        raise ConfigError(
            f"launch.kind=local starts the learner on one node, and its "
            f"{config.learner_processes} ranks are on {len(topology.learner.nodes)}; name two "
            f"nodes at most in {NODE_VARIABLE}"
        )
