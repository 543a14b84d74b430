"""One of two ranks of a run that saves and exports two versions, and may be killed meanwhile.

Its arguments are MODEL, RUN, RANK and MOMENT: before the so manieth change of a file or folder in
RUN that RANK makes, it kills itself; 0 is never. First it looks at what an earlier start has left,
and continues from it. Of version v every weight is v. Rank 0 prints how many changes each made.
"""

from __future__ import annotations

import asyncio
import io
import json
import os
import signal
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import torch
import torch.distributed as dist
from safetensors.torch import load_file

from megarl.config.schema import Config
from megarl.controller.checkpoints import Checkpoints
from megarl.controller.exports import Exports
from megarl.controller.resume import whole_checkpoints
from megarl.controller.training import restore_newest
from megarl.learner.client import LearnerClient
from megarl.learner.distributed import stop
from megarl.learner.learner import Learner
from megarl.observe.metrics import MetricsLog
from megarl.observe.progress import Progress

VERSIONS = 2  # that a start makes
CHANGES = ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.truncate")
MADE = "made"  # beside RUN: the newest version that was saved for sure


class Moments:
    """Counts this rank's changes of files and folders, and ends it before one of them."""

    def __init__(self, folder: Path, fatal: int) -> None:
        self.count, self._folder, self._fatal = 0, str(folder), fatal
        sys.addaudithook(self._audited)
        for name in ("fsync", "pwrite"):
            setattr(os, name, self._watched(getattr(os, name)))

    def pass_one(self) -> None:
        self.count += 1
        if self.count == self._fatal:
            os.kill(os.getpid(), signal.SIGKILL)

    def _audited(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event in CHANGES and str(arguments[0]).startswith(self._folder):
            flags = arguments[2] if event == "open" else os.O_WRONLY
            if isinstance(flags, int) and flags & (os.O_WRONLY | os.O_RDWR):
                self.pass_one()

    def _watched(self, work: Any) -> Any:
        def passing(*arguments: Any) -> Any:
            self.pass_one()
            return work(*arguments)

        return passing


class Caller:
    """The learner of both ranks, from the side of a controller in rank 0."""

    def __init__(self, learner: Learner) -> None:
        self.learner = learner

    def __getattr__(self, verb: str) -> Any:
        async def call(*arguments: Any) -> Any:
            words = [str(each) if isinstance(each, Path) else each for each in arguments]
            dist.broadcast_object_list([(verb, words)], src=0)
            return self.run(verb, words)

        return call

    def run(self, verb: str, words: list[Any]) -> Any:
        """The verb on this rank."""
        if verb != "fill":
            return getattr(self.learner, verb)(*words)
        for weight in self.learner.weights.values():
            weight.fill_(words[0])
        return None

    def serve(self) -> None:
        """On rank 1: run what rank 0 says, until it says "stop"."""
        while True:
            told: list[Any] = [None]
            dist.broadcast_object_list(told, src=0)
            verb, words = told[0]
            if verb == "stop":
                return
            self.run(verb, words)


async def course(config: Config, run_dir: Path, caller: Caller) -> None:
    """What rank 0 has both ranks do."""
    client, told = cast(LearnerClient, caller), io.StringIO()
    metrics, progress = MetricsLog(run_dir.parent), Progress(VERSIONS, told)
    checkpoints = Checkpoints(config, run_dir, client, metrics, progress)
    exports = Exports(config, run_dir, client, metrics, progress)
    made = run_dir.parent / MADE
    known = int(made.read_text()) if made.exists() else 0
    prompts = SimpleNamespace(restore=lambda state: None)
    loop = SimpleNamespace(
        learner=client, checkpoints=checkpoints, exports=exports, metrics=metrics,
        progress=progress, prompts=prompts,
    )  # fmt: skip
    saved = await restore_newest(cast(Any, loop), run_dir)
    start = saved.version if saved else 0
    assert start >= known, (start, known)
    assert told.getvalue() == "", told.getvalue()  # nothing that looks whole is damaged
    if saved:
        weights = caller.learner.weights.values()
        assert all(bool((weight == start).all()) for weight in weights if weight.numel()), start
    look_at_exports(run_dir, start)
    for version in range(start + 1, start + VERSIONS + 1):
        await caller.fill(version)
        await exports.export(version)
        await checkpoints.save(version, {})
        await caller.fill(-1)  # the next step, while files are written
        await checkpoints.settle()
        made.write_text(str(version))
    whole = [path.name for path in whole_checkpoints(run_dir / "checkpoints")]
    found = sorted(path.name for path in (run_dir / "checkpoints").iterdir())
    assert found == whole == [f"v{v:06d}" for v in (version - 1, version)], found
    assert not told.getvalue(), told.getvalue()


def look_at_exports(run_dir: Path, start: int) -> None:
    """See that every folder that looks like an export is one, and that there are all to `start`."""
    found = {int(path.name[1:]): path for path in (run_dir / "export").glob("v??????")}
    assert set(range(1, start + 1)) <= found.keys(), (start, sorted(found))
    for version, folder in found.items():
        names = {path.name for path in folder.iterdir()}
        assert names == {"model.safetensors", "config.json"}, names
        tensors = load_file(folder / "model.safetensors")
        assert all(bool((tensor == version).all()) for tensor in tensors.values()), folder
    assert not list((run_dir / "export").glob("*.partial"))


def main() -> None:
    """Recover, and go on."""
    model, run_dir, fatal_rank, moment = (each(a) for each, a in zip(
        (str, Path, int, int), sys.argv[1:], strict=True
    ))  # fmt: skip
    rank = int(os.environ["RANK"])
    torch.set_num_threads(1)
    run_dir.mkdir(parents=True, exist_ok=True)
    config = Config.model_validate(
        {
            "actor": {"model": model},
            "learner": {"parallel": {"tp": 2}, "precision": {"params": "fp32"}},
            "loop": {"versions": 10**6},
        }
    )
    caller = Caller(Learner(config, run_dir))
    moments = Moments(run_dir, moment if rank == fatal_rank else 0)
    if rank == 0:
        asyncio.run(course(config, run_dir, caller))
        dist.broadcast_object_list([("stop", [])], src=0)
    else:
        caller.serve()
    counts: list[int] = [0, 0]
    dist.all_gather_object(counts, moments.count)
    print(json.dumps(counts))
    stop()


if __name__ == "__main__":
    main()
