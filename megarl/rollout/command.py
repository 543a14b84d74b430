"""How one SGLang server is started: its command line and the variables added to its environment.

Owns the flags, on a CPU and on GPUs. Knows nothing of processes, health or routing. Keys travel in
the environment, which only the same user can read; SGLang's arguments would be visible to everyone.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass, field

from megarl.config.capability import WEIGHT_LOADER
from megarl.config.schema import Config
from megarl.config.served import model_overrides, served_block, served_dtype
from megarl.nodes import ADMIN_KEY_VARIABLE, API_KEY_VARIABLE, Device
from megarl.rollout import engine_args

MODULE = "megarl.compat.sglang_server"
DTYPES = {"fp32": "float32", "bf16": "bfloat16"}
SEEDS_PER_SERVER = 1000  # more than a server's restarts, so that no two servers share a seed

IN_PLACE_SWITCHES = ("--disable-radix-cache", "--disable-overlap-schedule")
"""What a server needs that keeps the KV cache of running requests over a weight sync."""


@dataclass(frozen=True, slots=True)
class ServerPlace:
    """Which server it is, where it listens, and what opens it."""

    index: int
    incarnation: int
    host: str
    port: int
    api_key: str = field(repr=False)
    admin_key: str = field(repr=False)


@dataclass(frozen=True, slots=True)
class ServerCommand:
    """`argv`, and the variables to add to the environment of the process that starts it."""

    argv: tuple[str, ...]
    env: dict[str, str] = field(repr=False)


def server_command(config: Config, place: ServerPlace, device: Device) -> ServerCommand:
    """The command of one server of this run. Raises ConfigError for unusable engine_args."""
    rollout = config.rollout
    seed = config.run.seed + SEEDS_PER_SERVER * place.index + place.incarnation
    values: dict[str, object] = {
        "--model-path": config.actor.model,
        "--device": device,
        "--dtype": DTYPES[served_dtype(config)],
        "--tp-size": rollout.parallel.tp,
        **_more_parallel(config),
        **_float8(config),
        "--host": place.host,
        "--port": place.port,
        "--random-seed": seed,
        "--max-running-requests": rollout.max_inflight_samples,
        "--custom-weight-loader": WEIGHT_LOADER,
        "--log-level": "warning",
    }
    if rollout.max_total_tokens:
        values["--max-total-tokens"] = rollout.max_total_tokens
    if device == "cpu":
        values["--attention-backend"] = "torch_native"
    switches = ["--skip-tokenizer-init", "--skip-server-warmup"]
    if device == "cpu":
        switches.append("--sleep-on-idle")  # else the idle scheduler takes a whole core
    elif config.placement.mode == "colocated":
        switches.append("--enable-memory-saver")  # without it nothing is freed on a release
    if config.weight_sync.pause == "in_place":
        # KV cache of older weights stays with its request; with overlap, a token that was sampled
        # before the pause is counted after it, under the label of the new weights (seen).
        switches += IN_PLACE_SWITCHES
    own = [word for flag, value in values.items() for word in (flag, str(value))]
    python = config.launch.rollout_python or sys.executable
    return ServerCommand(
        argv=(python, "-m", MODULE, *own, *switches, *engine_args.flags(rollout.engine_args)),
        env=_environment(config, place, device),
    )


def _float8(config: Config) -> dict[str, object]:
    """The flags of a server of float8: no weights until the first sync, which brings them.

    actor.model has none in float8, and SGLang would cast its weights into float8 without scales.
    """
    block = served_block(config)
    if block is None:
        return {}
    return {"--load-format": "dummy", "--json-model-override-args": model_overrides(block)}


def _more_parallel(config: Config) -> dict[str, object]:
    """The flags of expert and attention data parallelism, where there is any.

    Source: sglang 0.5.23, arg_groups/fields/parallel.py; --dp-size with --enable-dp-attention is
    the older spelling of --attn-dp-size.
    """
    parallel = config.rollout.parallel
    sizes = {"--ep-size": parallel.ep, "--attn-dp-size": parallel.attention_dp}
    return {flag: size for flag, size in sizes.items() if size > 1}


def _environment(config: Config, place: ServerPlace, device: Device) -> dict[str, str]:
    added = {
        API_KEY_VARIABLE: place.api_key,
        ADMIN_KEY_VARIABLE: place.admin_key,
        "HF_HUB_OFFLINE": "1",  # models are folders; nothing is looked up
        "TOKENIZERS_PARALLELISM": "false",
        # Seconds. Above aiohttp's 15, so that the client lets go of idle connections first: a
        # request that crosses the server's closing is lost ("Server disconnected").
        "SGLANG_TIMEOUT_KEEP_ALIVE": "120",
    }
    if device == "cuda" and config.placement.mode == "colocated":
        # Else the tag cuda_graph frees nothing (runner_backend/full_cuda_graph_backend.py).
        added["SGLANG_MEMORY_SAVER_CUDA_GRAPH"] = os.environ.get(
            "SGLANG_MEMORY_SAVER_CUDA_GRAPH", "1"
        )
    if device == "cpu":
        added["OMP_NUM_THREADS"] = os.environ.get("OMP_NUM_THREADS", "1")
        added["TORCHDYNAMO_DISABLE"] = "1"  # compiling would make the first request take 19 s
        # Waits 5 s for a stack dump of a dead scheduler before the server's other processes end.
        added["SGLANG_PYSPY_DUMP_BEFORE_CRASH"] = "0"
        tp = config.rollout.parallel.tp
        if tp > 1:
            cores = sorted(os.sched_getaffinity(0))
            added["SGLANG_CPU_OMP_THREADS_BIND"] = cores_of_ranks(cores, place.index, tp)
    return added


def cores_of_ranks(cores: list[int], index: int, tp: int) -> str:
    """One core for each TP rank of server `index`, going round where there are too few.

    SGLang binds ranks to NUMA nodes by itself, and refuses more ranks than nodes.

    >>> cores_of_ranks([0, 1, 2, 3], index=1, tp=2), cores_of_ranks([4], index=0, tp=2)
    ('2|3', '4|4')
    """
    return "|".join(str(cores[(index * tp + rank) % len(cores)]) for rank in range(tp))
