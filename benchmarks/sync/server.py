"""One real SGLang server, started as a run starts it, and the calls that a benchmark makes."""

from __future__ import annotations

import json
import os
import secrets
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import requests

from benchmarks.sync.cases import Case
from benchmarks.sync.counting import COUNT_FILE
from megarl.config.schema import Config
from megarl.launch import cleanup
from megarl.rollout.command import ServerPlace, server_command
from megarl.types import ServerEndpoint

ROOT = Path(__file__).parents[2]
START_S = 300.0
CALL_S = 600.0


class Server:
    """A server of `case` on a CPU. `loader` is one more weight loader, which writes to `counts`.

    Raises SystemExit, with the end of its log, where it does not start.
    """

    def __init__(self, case: Case, config: Config, log: Path, loader: str, counts: Path) -> None:
        with socket.create_server(("127.0.0.1", 0)) as probe:
            port = probe.getsockname()[1]
        keys = secrets.token_hex(8), secrets.token_hex(8)
        self.endpoint = ServerEndpoint("server-0", f"http://127.0.0.1:{port}", case.tp, 0, *keys)
        command = server_command(config, ServerPlace(0, 0, "127.0.0.1", port, *keys), "cpu")
        argv = list(command.argv)
        at = argv.index("--custom-weight-loader") + 2
        argv.insert(at, loader)
        if case.is_random:
            argv += ["--load-format", "dummy"]
        self._log = log
        with log.open("wb") as output:
            self.process = subprocess.Popen(
                argv,
                stdout=output,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                env={
                    **os.environ,
                    **command.env,
                    "PYTHONPATH": str(ROOT),
                    COUNT_FILE: str(counts),
                },
                start_new_session=True,
            )
        self._wait()

    def _wait(self) -> None:
        until = time.monotonic() + START_S
        while time.monotonic() < until and self.process.poll() is None:
            try:
                if requests.get(f"{self.endpoint.url}/health", timeout=30).status_code == 200:
                    return
            except requests.RequestException:
                pass
            time.sleep(0.2)
        self.kill()
        raise SystemExit(f"the server did not start:\n{self._log.read_text()[-3000:]}")

    def post(self, route: str, body: object, admin: bool = True) -> Any:
        """The answer to one call, which must be a success."""
        answer = requests.post(
            self.endpoint.url + route, json=body, headers=self._headers(admin), timeout=CALL_S
        )
        if answer.status_code != requests.codes.ok:
            raise RuntimeError(f"{route} answered {answer.status_code}: {answer.text[:500]}")
        return answer.json() if answer.text.startswith(("{", "[")) else answer.text

    def first_token(self) -> str:
        """Sample one token; returns the label of the weights that made it."""
        body = {"input_ids": [1, 2, 3], "sampling_params": {"max_new_tokens": 1}}
        return str(self.post("/generate", body, admin=False)["meta_info"]["weight_version"])

    def stream(self, num_tokens: int) -> Iterator[float]:
        """When (perf_counter) each token of one long response arrived."""
        body = {
            "input_ids": [1, 2, 3],
            "sampling_params": {"max_new_tokens": num_tokens, "ignore_eos": True},
            "stream": True,
        }
        with requests.post(
            self.endpoint.url + "/generate",
            json=body,
            headers=self._headers(admin=False),
            timeout=CALL_S,
            stream=True,
        ) as answer:
            if answer.status_code != requests.codes.ok:
                raise RuntimeError(f"no stream: {answer.status_code} {answer.text[:500]}")
            for line in answer.iter_lines():
                if line.startswith(b"data: {"):
                    json.loads(line[6:])
                    yield time.perf_counter()

    def score(self, token_ids: Sequence[int]) -> float:
        """Seconds of having the server score tokens, as a log-prob probe does."""
        start = time.perf_counter()
        body = {"input_ids": list(token_ids), "return_logprob": True, "logprob_start_len": 0}
        self.post("/generate", {**body, "sampling_params": {"max_new_tokens": 1}}, admin=False)
        return time.perf_counter() - start

    def num_mapped(self, prefix: str) -> int:
        """Files of shared memory whose names begin so, over all processes of the server."""
        main = psutil.Process(self.process.pid)
        paths = {
            (process.pid, region.path)
            for process in (main, *main.children(recursive=True))
            for region in process.memory_maps()
        }
        return sum(Path(path).name.startswith(prefix) for _, path in paths)

    def _headers(self, admin: bool) -> dict[str, str]:
        key = self.endpoint.admin_key if admin else self.endpoint.api_key
        return {"Authorization": f"Bearer {key}"}

    def kill(self) -> None:
        """End all its processes, and remove what SGLang leaves in /dev/shm."""
        kill(self.process)


def kill(process: subprocess.Popen[bytes]) -> None:
    """End a server, the leader of its process group, and remove what SGLang leaves in /dev/shm."""
    if process.poll() is not None:
        return
    main = psutil.Process(process.pid)
    family = [main, *main.children(recursive=True)]
    files = cleanup.used_by(member.pid for member in family)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    psutil.wait_procs(family, timeout=10)
    cleanup.sweep(files)
