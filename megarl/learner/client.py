"""The controller's side of learner and critic: one method per verb, over HTTP. No torch here.

Owns the call, its deadline, and the words of an error: verb, phase, rank, and the launcher's
account of a dead rank. Knows nothing of how the learner computes.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import aiohttp

from megarl import errors
from megarl.config.schema import DeadlineConfig
from megarl.errors import LearnerError, MegarlError
from megarl.learner.verbs import ANSWER_MARGIN_S, PEER_LOST, VERBS_OF, Numbers, deadline_s
from megarl.learner.wire import decode, encode
from megarl.run_paths import CRITIC, LEARNER
from megarl.types import Batch, CriticScores, MinibatchPlan, ServerEndpoint, SyncReport

FAILURE_WAIT_S = 15.0  # the launcher ends the other ranks before it writes what happened
_POLL_S = 0.1


class ServiceClient:
    """Calls the ranks of `role` at `url`. `failure_file` is the launcher's account of a dead rank,
    such as RUN/logs/learner-failure.json, which is quoted when they are gone. Use as an async
    context manager, or call `close`."""

    role = LEARNER

    def __init__(
        self,
        url: str,
        api_key: str,
        deadlines: DeadlineConfig,
        failure_file: Path | None = None,
    ) -> None:
        self._url = url.rstrip("/")
        self._headers = {"Authorization": f"Bearer {api_key}"}
        self._deadlines = deadlines
        self._failure_file = failure_file
        self._session: aiohttp.ClientSession | None = None

    async def info(self) -> dict[str, int]:
        """Sizes of the mesh and world_size; of the learner ep, etp and version too."""
        result: dict[str, int] = await self._call("info")
        return result

    async def step(self, minibatch: MinibatchPlan) -> dict[str, float]:
        """One optimizer step; returns loss/* or value/*, grad_norm, lr and what else is made."""
        result: dict[str, float] = await self._call("step", minibatch)
        return result

    async def save(self, path: str | Path, version: int) -> None:
        """Write weights, optimizer and random state to folder `path`, whole or not at all."""
        await self._call("save", str(path), version)

    async def begin_save(self, path: str | Path, version: int) -> None:
        """Begin such a save, and return when training may go on: files are written meanwhile."""
        await self._call("begin_save", str(path), version)

    async def end_save(self, wait: bool = True) -> bool:
        """Whether no save is under way any more; with `wait`, it returns only then.

        Raises CheckpointError, once, where the save failed.
        """
        ended: bool = await self._call("end_save", wait)
        return ended

    async def check_saved(self, path: str | Path) -> str:
        """How files in folder `path` are not as `save` wrote them; "" where they are."""
        damage: str = await self._call("check_saved", str(path))
        return damage

    async def load(self, path: str | Path) -> int:
        """Continue from what `save` wrote to `path`; returns the version that was saved."""
        version: int = await self._call("load", str(path))
        return version

    async def peaks(self) -> dict[str, int]:
        """`memory/*` of the phases since the last call: predicted and measured bytes."""
        result: dict[str, int] = await self._call("peaks")
        return result

    async def shutdown(self) -> None:
        """End the service and all its ranks with exit status 0."""
        await self._call("shutdown")

    async def health(self) -> dict[str, object]:
        """{"state": "idle"} or {"state": "busy", "verb", "running_s"}; does not wait for a verb."""
        timeout = aiohttp.ClientTimeout(total=ANSWER_MARGIN_S)
        try:
            async with self._http().get(f"{self._url}/health", timeout=timeout) as response:
                facts: dict[str, object] = json.loads(await response.read())
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
            raise LearnerError(await self._gone("health", error)) from error
        if response.status != 200:
            raise LearnerError(f"{self._label('health')}: {facts.get('message')}")
        return facts

    async def close(self) -> None:
        """Close the connection; the learner runs on."""
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()

    async def _call(self, name: str, *arguments: object) -> Any:
        verb = VERBS_OF[self.role][name]
        limit_s = deadline_s(verb, self._deadlines) + ANSWER_MARGIN_S
        try:
            async with self._http().post(
                f"{self._url}/verb/{name}",
                data=encode(verb.arguments, arguments),
                timeout=aiohttp.ClientTimeout(total=limit_s),
            ) as response:
                body = await response.read()
        except TimeoutError as error:
            reason = f"no answer within {limit_s:.0f} s, and the service named no rank"
            raise LearnerError(await self._gone(name, reason, wait_s=0.0)) from error
        except (aiohttp.ClientError, OSError) as error:
            raise LearnerError(await self._gone(name, error)) from error
        if response.status != 200:
            kind, message = _error_of(response.status, body)
            if kind == PEER_LOST:
                raise LearnerError(await self._gone(name, message))
            raise _error(self._label(name), kind, message)
        return decode(verb.result, body)

    def _http(self) -> aiohttp.ClientSession:
        if self._session is None:
            self._session = aiohttp.ClientSession(headers=self._headers)
        return self._session

    async def _gone(self, name: str, reason: object, wait_s: float = FAILURE_WAIT_S) -> str:
        """The words for a learner that is gone: the launcher's account where there is one."""
        account = await self._account(wait_s)
        if account:
            return f"{self._label(name)}: {account}"
        text = (str(reason) or type(reason).__name__).splitlines()[0]
        where = f"; see {self._failure_file.parent}" if self._failure_file else ""
        return f"{self._label(name)}: the {self.role} at {self._url} is unreachable: {text}{where}"

    def _label(self, name: str) -> str:
        """What an error says of a call: the verb, and whose it is but for the learner's."""
        return name if self.role == LEARNER else f"{name} of the {self.role}"

    async def _account(self, wait_s: float) -> str:
        if self._failure_file is None:
            return ""
        deadline = time.monotonic() + wait_s
        while True:
            try:
                return str(json.loads(self._failure_file.read_text())["text"])
            except (OSError, ValueError, KeyError):
                if time.monotonic() >= deadline:
                    return ""
            await asyncio.sleep(_POLL_S)


class LearnerClient(ServiceClient):
    """The learner's verbs."""

    async def score(self, batch: Batch) -> dict[str, float]:
        """Passes before the first optimizer step on `batch`; returns the mismatch/* metrics."""
        result: dict[str, float] = await self._call("score", batch)
        return result

    async def logprobs(
        self, sequences: Sequence[tuple[Sequence[int], Sequence[int]]]
    ) -> list[list[float]]:
        """Log-probs in nats of each response's tokens, at the sampling temperature.

        `sequences` are (prompt token ids, response token ids).
        """
        pairs = tuple((tuple(prompt), tuple(response)) for prompt, response in sequences)
        result: list[list[float]] = await self._call("logprobs", pairs)
        return result

    async def publish(self, version: int, servers: Sequence[ServerEndpoint]) -> SyncReport:
        """Send the weights as `version` to the servers; the report says who proved to have them."""
        result: SyncReport = await self._call("publish", version, tuple(servers))
        return result

    async def export(self, path: str | Path) -> int:
        """Write the policy as Hugging Face folder `path`, whole or not at all; returns its bytes.

        Raises CheckpointError where `path` is there already, or cannot be written.
        """
        num_bytes: int = await self._call("export", str(path))
        return num_bytes

    async def offload(self, parts: Sequence[str]) -> None:
        """Take parts of the state ("gradients", "optimizer", "weights") off the device."""
        await self._call("offload", tuple(parts))

    async def onload(self, parts: Sequence[str]) -> None:
        """Bring parts back that `offload` took away."""
        await self._call("onload", tuple(parts))

    async def memory(self) -> dict[str, int]:
        """Bytes that the ranks take, by kind; of each the rank that has most."""
        result: dict[str, int] = await self._call("memory")
        return result

    async def token_rewards(self) -> Numbers:
        """What tokens of the batch that was scored are rewarded with, for a critic elsewhere."""
        result: Numbers = await self._call("token_rewards")
        return result

    async def take_advantages(self, advantages: Numbers) -> None:
        """Give the learner what a critic elsewhere made of the batch that was scored."""
        await self._call("take_advantages", advantages)


class CriticClient(ServiceClient):
    """The verbs of a critic with ranks of its own."""

    role = CRITIC

    async def score(self, batch: Batch, rewards: Numbers) -> CriticScores:
        """Values and advantages of `batch`, before its first optimizer step. `rewards` are what
        tokens are rewarded with besides their samples' rewards, or empty."""
        result: CriticScores = await self._call("score", batch, rewards)
        return result


def _error_of(status: int, body: bytes) -> tuple[str, str]:
    """Class name and text of an answer other than 200."""
    try:
        facts = json.loads(body)
        return str(facts["error"]), str(facts["message"])
    except (ValueError, KeyError, TypeError):
        return "LearnerError", f"status {status}: {body[:200]!r}"


def _error(label: str, kind: str, message: str) -> MegarlError:
    """The exception to raise: errors about input keep their class, others are the learner's."""
    text = message if message.startswith(label) else f"{label}: {message}"
    found = getattr(errors, kind, LearnerError)
    if isinstance(found, type) and issubclass(found, MegarlError):
        return found(text)
    return LearnerError(text)
