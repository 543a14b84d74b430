"""Run by test_steps.py inside a job: `driver.py OUT ACTION` starts stand-ins as a run's learner and
server, through the product's own Launcher, then does ACTION with them.

Each stand-in writes OUT/<role>-<node>.json, holds OUT's entry of /dev/shm mapped, and starts a
child in a session of its own.
"""

import asyncio
import json
import mmap
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

from megarl.config.schema import Config
from megarl.launch.launcher import Launcher
from megarl.launch.slurm import SlurmSteps
from megarl.launch.topology import make_topology
from megarl.nodes import Seat


def stand_in(out: Path, role: str, argv: list[str]) -> int:
    """One engine process."""
    node = os.environ["SLURMD_NODENAME"]
    name = f"{out.name}_{role}_{node}"
    child = subprocess.Popen(["sleep", "300"], start_new_session=True)
    with open(f"/dev/shm/{name}", "w+b") as file:
        file.truncate(mmap.PAGESIZE)
        mapping = mmap.mmap(file.fileno(), mmap.PAGESIZE)
    facts = {
        "node": node,
        "pids": [os.getpid(), child.pid],
        "gpus": os.environ.get("CUDA_VISIBLE_DEVICES"),
        "run_id": os.environ["MEGARL_RUN_ID"],
        "key": os.environ.get("KEY"),
        "argv": argv,
        "cwd": os.getcwd(),
    }
    partial = out / f"{name}.partial"
    partial.write_text(json.dumps(facts))
    partial.rename(out / f"{role}-{node}.json")
    while not (out / f"fail-{role}-{node}").exists():
        time.sleep(0.05)
    mapping.close()
    return 7


async def drive(out: Path, action: str) -> int:
    """The controller's part."""
    python = out / "python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} {__file__} {out} stand-in learner "$@"\n')
    python.chmod(0o755)
    config = Config.model_validate(
        {"actor": {"model": "m"}, "launch": {"learner_python": str(python)}}
    )
    topology = make_topology(config, os.environ)
    num_stand_ins = 2
    if action == "learner on two nodes":
        topology = replace(topology, learner=Seat(topology.nodes, None))
        num_stand_ins = 3
    launcher = Launcher(config, out, topology, SlurmSteps(), ["r1"])
    learner = await launcher.start_learner()
    argv = [sys.executable, __file__, str(out), "stand-in", "server"]
    server = await launcher.spawn(argv, {"KEY": "k"}, "server-0", out / "server.log")
    while len(list(out.glob("*.json"))) < num_stand_ins:
        await asyncio.sleep(0.05)
    (out / "pids").write_text(f"{os.getpid()} {learner.pid} {server.pid}")
    if action == "kill server":
        server.kill()
        await asyncio.wait_for(server.wait(), 5)
        (out / "learner-runs").write_text(str(learner.returncode is None))
    elif action == "learner on two nodes":
        (out / "returncode").write_text(str(await learner.wait()))
    elif action == "hold":
        await asyncio.sleep(300)
    before = time.monotonic()
    await launcher.end_all()
    (out / "ended").write_text(str(time.monotonic() - before))
    return 3


if __name__ == "__main__":
    where, what = Path(sys.argv[1]), sys.argv[2]
    if what == "stand-in":
        sys.exit(stand_in(where, sys.argv[3], sys.argv[4:]))
    signal.alarm(120)
    sys.exit(asyncio.run(drive(where, what)))
