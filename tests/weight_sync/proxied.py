"""A real SGLang server behind a proxy that can fail any call: the fake server's side of a bench."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import psutil
import requests

from megarl.weight_sync.control import LOAD_FORMAT
from tests.weight_sync import fake_server, hurt_server, tiny
from tests.weight_sync.fake_server import IS_GONE, UPDATE, Answer, NoAnswer
from tests.weight_sync.scenarios import PROBE
from tests.weight_sync.servers import RealServer
from tests.weight_sync.tiny import SHAPE

GETS = ("/server_info", "/get_model_info")
ANSWER_S = 120.0
HELD_S = 5.0  # that a call for tokens is held by a paused server
PROBE_S = 1.5  # for a server that gives no tokens to show it


class Schedulers:
    """The processes of a server's ranks."""

    def __init__(self, real: RealServer) -> None:
        self._real = real
        family = psutil.Process(real.process.pid).children(recursive=True)
        found = [child for child in family if "sglang::scheduler" in " ".join(child.cmdline())]
        self.processes = [Scheduler(child.pid) for child in sorted(found, key=_name)]
        assert len(self.processes) == real.endpoint.tp, [child.cmdline() for child in family]

    def kill(self) -> None:
        """End the whole server."""
        self._real.kill()


class Scheduler:
    """One rank's process."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._process = psutil.Process(pid)

    def is_alive(self) -> bool:
        """Whether it runs, or is stopped."""
        return self._process.is_running() and self._process.status() != psutil.STATUS_ZOMBIE

    def join(self) -> None:
        """Until it has ended."""
        psutil.wait_procs([self._process], timeout=10)


class ProxiedServer(fake_server.Server):
    """A real server of the tiny policy on `nodes`."""

    def __init__(self, name: str, nodes: Sequence[str], model: Path, folder: Path) -> None:
        self._model, self._folder = model, folder
        self._faults_path = folder / f"{name}.faults.json"
        super().__init__(name, nodes, self._start_real)

    def _start_real(self, tp: int) -> Schedulers:
        self._faults_path.write_text("{}")
        name, number = self.endpoint.name, len(list(self._folder.glob(f"{self.endpoint.name}*")))
        self.real = RealServer(
            name,
            self._model,
            tp,
            self._folder / f"{name}.{number}.log",
            module=hurt_server.__name__,
            environment={hurt_server.VARIABLE: str(self._faults_path)},
        )
        self.real.wait()
        return Schedulers(self.real)

    def _carry_out(self, route: str, body: dict[str, Any]) -> Answer:
        if route == UPDATE:
            self.payloads.append(body["serialized_named_tensors"])
            told = {rank: asdict(fault) for rank, fault in enumerate(self.faults) if fault}
            self._faults_path.write_text(json.dumps(told))
        if route == PROBE:
            told = {key: value for key, value in body.items() if key != IS_GONE}
            return self._forward(route, told, HELD_S)
        return self._forward(route, body, ANSWER_S)

    def _forward(self, route: str, body: dict[str, Any], limit_s: float) -> Answer:
        keys = self.real.endpoint
        key = keys.api_key if route in ("/generate", "/server_info") else keys.admin_key
        try:
            answer = requests.request(
                "GET" if route in GETS else "POST",
                keys.url + route,
                json=None if route in GETS else body,
                headers={"Authorization": f"Bearer {key}"},
                timeout=limit_s,
            )
        except requests.RequestException as error:
            raise NoAnswer from error
        return answer.status_code, answer.text

    def deliver(self, payloads: list[str]) -> None:
        """Another update, from nobody knows where."""
        body = {"serialized_named_tensors": payloads, "load_format": LOAD_FORMAT}
        self._forward(UPDATE, {**body, "selector": "target"}, ANSWER_S)

    @property
    def label(self) -> str:
        """What its weights are called."""
        return self.real.label()

    @label.setter
    def label(self, label: str) -> None:
        """A new engine names itself."""

    def holds(self, seed: int) -> bool:
        """Whether every rank holds exactly its slices of the weights of `seed`."""
        wanted = tiny.on_server(SHAPE, self.endpoint.tp, tiny.weights(SHAPE, seed))
        return self.real.checksums() == [
            {name: tiny.sha256(tensor) for name, tensor in mine.items()} for mine in wanted
        ]

    @property
    def is_paused(self) -> bool:
        """Whether it gives no tokens."""
        body = {"input_ids": [1], "sampling_params": {"max_new_tokens": 1}}
        try:
            self._forward("/generate", body, PROBE_S)
        except NoAnswer:
            return True
        return False


def _name(process: psutil.Process) -> str:
    return " ".join(process.cmdline())
