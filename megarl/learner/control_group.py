"""The control group: how a verb reaches every learner rank, and how the ranks agree on its outcome.

Runs on Gloo, never on NCCL: an idle NCCL kernel would hold a GPU. Waiting idle is unlimited. Knows
nothing of what a verb does.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist

from megarl.errors import LearnerError
from megarl.run_paths import LEARNER

Result = TypeVar("Result")

UNLIMITED = timedelta(days=3650)
GRACE_S = 5.0  # a failed rank's wait for the others, who may wait for it in vain
_RECORD_BYTES = 4096
_POLL_S = 0.02


@dataclass(frozen=True, slots=True)
class RankError:
    """An exception of one rank: where it happened and what it said."""

    rank: int
    host: str
    pid: int
    place: str
    kind: str
    message: str
    lost_peer: bool = False
    role: str = LEARNER

    def __str__(self) -> str:
        where = f"{self.role} rank {self.rank} (host {self.host}, pid {self.pid}) in {self.place}"
        return f"{where}: {self.kind}: {self.message}"


class PeerLostError(LearnerError):
    """Another rank is gone, or waits in a collective that this rank will not join."""


class ControlGroup:
    """A Gloo group of all ranks. Needs an initialised default process group; a collective call."""

    def __init__(self) -> None:
        self._group = dist.new_group(backend="gloo", timeout=UNLIMITED)
        self._rank = dist.get_rank()
        self._world_size = dist.get_world_size()

    def broadcast(self, payload: bytes | None) -> bytes:
        """Rank 0's `payload`, on every rank; the others pass None and wait without limit.

        Raises PeerLostError where a rank is gone.
        """
        try:
            size = torch.tensor([len(payload or b"")])
            dist.broadcast(size, src=0, group=self._group)
            data = torch.empty(int(size), dtype=torch.uint8)
            if payload:
                data = torch.frombuffer(bytearray(payload), dtype=torch.uint8)
            dist.broadcast(data, src=0, group=self._group)
        except RuntimeError as error:
            raise PeerLostError(f"the control group broke while idle: {_line(error)}") from error
        return data.numpy().tobytes()

    def agree(self, error: RankError | None) -> tuple[RankError, ...]:
        """Every rank's error in the verb that has just ended; empty where all succeeded.

        Collective. A rank with an error waits GRACE_S for the others, which may be inside a
        collective that it left. Raises PeerLostError where they do not come, or are gone.
        """
        count = torch.tensor([0 if error is None else 1])
        try:
            work = dist.all_reduce(count, group=self._group, async_op=True)
            if error is not None:
                deadline = time.monotonic() + GRACE_S
                while not work.is_completed():
                    if time.monotonic() > deadline:
                        raise PeerLostError(
                            f"the other ranks did not end the verb within {GRACE_S:.0f} s"
                        )
                    time.sleep(_POLL_S)
            work.wait()
            if int(count) == 0:
                return ()
            return self._gather(error)
        except RuntimeError as lost:
            raise PeerLostError(f"a rank left during the verb: {_line(lost)}") from lost

    def _gather(self, error: RankError | None) -> tuple[RankError, ...]:
        record = torch.zeros(_RECORD_BYTES, dtype=torch.uint8)
        if error is not None:
            data = _record(error)
            record[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        records = [torch.empty_like(record) for _ in range(self._world_size)]
        dist.all_gather(records, record, group=self._group)
        texts = [record.numpy().tobytes().rstrip(b"\0") for record in records]
        return tuple(RankError(**json.loads(text)) for text in texts if text)


def together(work: Callable[[], Result], device: torch.device) -> Result:
    """`work()`, or an error on every rank where it fails on one: none waits in a collective.

    Collective over all ranks, through `device`.
    """
    result, error = None, None
    try:
        result = work()
    except Exception as caught:  # noqa: BLE001  raised again below, after all ranks know
        error = caught
    failed = torch.tensor([float(error is not None)], device=device)
    dist.all_reduce(failed)
    if error is not None:
        raise error
    if failed.item() or result is None:
        raise PeerLostError(f"{int(failed.item())} other learner ranks refused this verb")
    return result


def is_lost_peer(error: BaseException) -> bool:
    """Whether `error` only says that another rank is gone, so that it is not the first cause."""
    if isinstance(error, PeerLostError | dist.DistNetworkError | dist.DistBackendError):
        return True
    if isinstance(error.__cause__, RuntimeError) and is_lost_peer(error.__cause__):
        return True
    text = str(error)
    return isinstance(error, RuntimeError) and ("gloo/transport" in text or "by peer" in text)


def _record(error: RankError) -> bytes:
    """JSON of `error`, its message cut to what a record holds."""
    facts = asdict(error)
    data = json.dumps(facts).encode()
    while len(data) > _RECORD_BYTES:
        excess = len(data) - _RECORD_BYTES
        facts["message"] = facts["message"][: -excess - 3] + "..."
        data = json.dumps(facts).encode()
    return data


def _line(error: BaseException) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
