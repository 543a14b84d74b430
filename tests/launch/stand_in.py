"""Run by test_run.py: `stand_in.py RUN BEHAVIOR` is a controller whose engines are this file too.

The learner's Python is a script that runs this file, so that all of launch/ is the product's own.
"""

import asyncio
import contextlib
import errno
import json
import os
import signal
import sys
import time
from pathlib import Path

FAILURE = "learner rank 1 (host h, pid 7) was ended by SIGKILL in step/forward for 0.1 s"


def learner(run_dir: Path, behavior: str) -> int:
    """What megarl.learner.agent leaves in a run folder."""
    if behavior == "stubborn":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    Path(f"/dev/shm/megarl_{os.environ['MEGARL_RUN_ID']}_g0_r0").write_bytes(b"arena")
    if behavior == "starts slowly":
        (run_dir / "starting").touch()
        time.sleep(60)
    endpoint = run_dir / "endpoints" / "learner.json"
    endpoint.parent.mkdir(parents=True, exist_ok=True)
    endpoint.write_text(
        json.dumps({"url": "http://127.0.0.1:1", "api_key": "k", "pid": os.getpid()})
    )
    if behavior.startswith("learner dies"):
        while not (run_dir / "training").exists():
            time.sleep(0.02)
        if behavior == "learner dies":
            (run_dir / "logs" / "learner-failure.json").write_text(
                json.dumps({"text": FAILURE, "verb": "step", "phase": "forward"})
            )
        print("last words", flush=True)
        return 9
    time.sleep(60)
    return 0


class Servers:
    """A pool of one server that is a sleeping process."""

    def __init__(  # type: ignore[no-untyped-def]
        self, config, run_dir, spawn, device, seats
    ) -> None:
        self._spawn, self._log = spawn, run_dir / "logs" / "server-0.0.log"
        assert [(seat.address, seat.gpus) for seat in seats] == [("127.0.0.1", None)]

    async def start(self) -> None:
        self._process = await self._spawn(["sleep", "60"], {}, "server-0", self._log)

    async def aclose(self) -> None:
        self._process.kill()
        await self._process.wait()


class Client:
    """A learner that answers `shutdown`."""

    def __init__(self, url, api_key, deadlines, failure_file) -> None:  # type: ignore[no-untyped-def]
        pass

    async def __aenter__(self) -> "Client":
        return self

    async def __aexit__(self, *_: object) -> None:
        pass

    async def shutdown(self) -> None:
        pass


def controller(run_dir: Path, behavior: str) -> int:
    """run_training with stand-ins for what talks to the engines."""
    from megarl.config.schema import Config
    from megarl.launch import run

    async def train(config, where, inputs, reward, learner, servers, ending) -> None:  # type: ignore[no-untyped-def]
        (run_dir / "training").touch()
        if behavior == "disk full":
            raise OSError(errno.ENOSPC, "No space left on device")
        await ending.unless(asyncio.sleep(0 if behavior == "done" else 60))

    def load_inputs(config) -> None:  # type: ignore[no-untyped-def]
        (run_dir / "reading").touch()
        while behavior == "reads slowly" and not (run_dir / "read").exists():
            time.sleep(0.01)

    run.load_inputs = load_inputs  # type: ignore[assignment]
    run.note_on = lambda config, inputs: ""  # type: ignore[assignment]
    run.train, run.LearnerClient = train, Client  # type: ignore[assignment,misc]
    run_dir.mkdir(exist_ok=True)
    rollout = {}
    if behavior == "no server":
        rollout = {"urls": ["http://127.0.0.1:9"]}  # nobody listens there
    else:
        run.ServerPool = Servers  # type: ignore[assignment,misc]
    if behavior != "wrong reward":
        run.Scorer = lambda config: contextlib.nullcontext()  # type: ignore[assignment,misc]
    run.SHUTDOWN_S = 0.1
    python = run_dir / "python"
    python.write_text(
        f"#!/bin/sh\nexec {sys.executable} {__file__} {run_dir} '{behavior}' learner\n"
    )
    python.chmod(0o755)
    launch = {"device": "cpu", "kind": "local", "learner_python": str(python)}
    if behavior == "time limit":
        launch["time_limit_s"] = 301.0  # and the last 300 are for the end
    if behavior == "no time":
        launch["time_limit_s"] = 300.0
    reward = {"kind": "function", "function": f"{__file__}:nope"}
    groups = {"actor": {"model": "m"}, "launch": launch, "reward": reward, "rollout": rollout}
    config = Config.model_validate({**groups, "deadline": {"server_answer_s": 0.5}})
    return run.run_training(config, run_dir)


if __name__ == "__main__":
    role = learner if sys.argv[3:] == ["learner"] else controller
    sys.exit(role(Path(sys.argv[1]), sys.argv[2]))
