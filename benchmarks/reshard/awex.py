"""awex 0.9.0's own planner on the same two layouts. Its code comes from its published wheel.

Owns the translation of layouts to awex's metadata, one entry for each Hugging Face tensor, and
how its planner is called. awex is Apache-2.0; nothing of it is kept in this repository.

What awex cannot be told: which ranks share a node or a GPU, so that every operation of its plan is
a transfer between ranks. Its own converter gathers Megatron's fused qkv over the tensor-parallel
ranks and keeps it fused; here queries, keys and values are entries of their own, and no gather is
needed. Scales are tensors like others.
"""

from __future__ import annotations

import importlib
import os
import signal
import subprocess
import sys
import time
import types
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.reshard.shards import Replicas, tensors_by_name
from megarl.reshard.layout import Layout

VERSION = "0.9.0"
PACKAGES = ("awex", "awex.transfer", "awex.meta", "awex.sharding", "awex.util")
MAX_REPEATS = 3
ENOUGH_S = 10.0  # no planner call is repeated once so much time went into it


class AwexError(Exception):
    """awex could not be fetched."""


@dataclass(frozen=True, slots=True)
class AwexPlan:
    """What awex's planner took and moves. Times are medians of `num_runs`, of one run at least.

    `cut_off` says that the global plan had not ended after `global_s`; then it has no bytes.
    """

    num_tensors: int
    local_s: dict[str, float]
    global_s: float
    cut_off: bool
    num_runs: int
    num_operations: int
    sent_bytes: dict[int, int]


def fetch(folder: Path) -> Path:
    """The folder with awex's modules, downloaded by pip where it is not there."""
    found = folder / f"awex-{VERSION}"
    if not (found / "awex").is_dir():
        found.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "pip", "download", f"awex=={VERSION}", "--no-deps"]
        done = subprocess.run(
            [*command, "--quiet", "--dest", str(found)], capture_output=True, text=True
        )
        wheels = sorted(found.glob("*.whl"))
        if done.returncode or not wheels:
            raise AwexError(
                f"pip could not download awex {VERSION}: {done.stderr.strip()[-300:]}; use "
                "--no-awex, or put its wheel into " + str(found)
            )
        with zipfile.ZipFile(wheels[-1]) as wheel:
            wheel.extractall(found)
    return found


def plan_with_awex(
    source: Layout,
    destination: Layout,
    server_size: int,
    ranks: tuple[int, int],
    folder: Path,
    limit_s: float,
) -> AwexPlan:
    """Time awex's planner: the plan of one receiver and of one sender, then the plan of all ranks.

    `ranks` are (destination rank, source rank) of the two local plans. All servers must be equal:
    awex is told of the first, `server_size` ranks, and of their number. Call it in a process that
    is not used for anything else.
    """
    api = _Api(folder)
    num_destination, num_source = len(destination.rank_ids), len(source.rank_ids)
    theirs = api.metas(
        tensors_by_name(destination, range(server_size), every=True), num_destination
    )
    mine = api.metas(tensors_by_name(source, source.rank_ids, every=False), num_source)
    with _quiet():
        builder = api.plan.TransferPlanBuilder(
            infer_world_size=num_destination,
            train_world_size=num_source,
            num_infer_engines=num_destination // server_size,
        )
        local_s: dict[str, float] = {}
        for name, rank in (("receiver", ranks[0]), ("sender", num_destination + ranks[1])):
            local = partial(builder.build_local_transfer_plan, theirs, mine, rank)
            local_s[name], _, _ = _timed(local, limit_s)
        whole = partial(builder.build_weights_mapping_operations, theirs, mine)
        global_s, runs, operations = _timed(whole, limit_s)
    sent: dict[int, int] = {}
    for operation in operations or ():
        size = operation.send_shard_meta.dtype.itemsize
        for extent in operation.overlap_shape:
            size *= extent
        rank = operation.send_rank - num_destination
        sent[rank] = sent.get(rank, 0) + size
    cut_off = operations is None
    count = 0 if operations is None else len(operations)
    return AwexPlan(len(mine), local_s, global_s, cut_off, runs, count, sent)


class _Api:
    """awex's modules, loaded without its packages' __init__, which import whole engines."""

    def __init__(self, folder: Path) -> None:
        for name in PACKAGES:
            package = types.ModuleType(name)
            package.__path__ = [str(folder.joinpath(*name.split(".")))]
            sys.modules[name] = package
        self.plan: Any = importlib.import_module("awex.transfer.transfer_plan")
        self.meta: Any = importlib.import_module("awex.meta.weight_meta")
        self.sharding: Any = importlib.import_module("awex.sharding.param_sharding").ShardingType
        torch: Any = importlib.import_module("torch")
        self.types = {
            "policy": torch.bfloat16,
            "float32": torch.float32,
            "float8": torch.float8_e4m3fn,
        }

    def metas(self, tensors: Iterator[tuple[str, str, Replicas]], world: int) -> list[Any]:
        """awex's metadata of each tensor."""
        return [
            self._meta(name, precision, replicas, world) for name, precision, replicas in tensors
        ]

    def _meta(self, name: str, precision: str, replicas: Replicas, world: int) -> Any:
        kinds = self.sharding
        made = []
        for replica in replicas:
            cut = len(replica) > 1
            kind = kinds.TP_SHARDING if cut else kinds.NO_SHARDING
            shards = []
            for rank, box in replica:
                shape = tuple(end - start for start, end in box)
                num_elements = 1
                for extent in shape:
                    num_elements *= extent
                shards.append(
                    self.meta.ParameterShardMeta(
                        tp_rank=0,
                        attn_tp_rank=0,
                        pp_rank=0,
                        ep_rank=0,
                        ep_tp_rank=0,
                        global_rank=rank,
                        world_size=world,
                        engine_rank=0,
                        name=name,
                        shape=shape,
                        numel=num_elements,
                        dtype=self.types[precision],
                        global_offset=tuple(start for start, _ in box),
                        sharding_type=kind,
                        num_shards=len(replica),
                        sharding_dim=0,
                    )
                )
            made.append(self.meta.ParameterReplicaMeta(shards=shards))
        whole = tuple(
            max(box[dim][1] for _, box in replicas[0]) for dim in range(len(replicas[0][0][1]))
        )
        num_elements = 1
        for extent in whole:
            num_elements *= extent
        return self.meta.ParameterMeta(
            name=name,
            global_numel=num_elements,
            global_shape=whole,
            dtype=self.types[precision],
            shards=[shard for replica in made for shard in replica.shards],
            replicas=made,
        )


class _CutOffError(Exception):
    """The time limit has passed."""


def _timed(call: Callable[[], Any], limit_s: float) -> tuple[float, int, Any]:
    """(seconds, runs, result) of a call; the result is None where it was cut off at the limit."""
    took: list[float] = []
    result: Any = None
    while len(took) < MAX_REPEATS and sum(took) < ENOUGH_S:
        result = None  # the result before is freed outside the timing
        start = time.perf_counter()
        try:
            with _alarm(limit_s):
                result = call()
        except _CutOffError:
            return time.perf_counter() - start, len(took) + 1, None
        took.append(time.perf_counter() - start)
    return median(took), len(took), result


@contextmanager
def _alarm(limit_s: float) -> Iterator[None]:
    def ring(signum: int, frame: object) -> None:
        raise _CutOffError

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, limit_s)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@contextmanager
def _quiet() -> Iterator[None]:
    """awex's logger writes to stdout."""
    with Path(os.devnull).open("w") as nowhere, redirect_stdout(nowhere):
        yield
