"""Acknowledgements: what each server rank says of one sync, and the store that carries it.

SGLang drops a loader's return value and answers "Success" whatever happened, so that receivers
write here instead. Owns the acknowledgement and the store. Knows nothing of what the sums are sums
of.
"""

from __future__ import annotations

import json
import math
import socket
import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from datetime import timedelta

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from megarl.actor.config_fields import is_integer
from megarl.errors import MALFORMED, NoAnswerError, WeightSyncError, in_words
from megarl.weight_sync.transport import stores

_POLL_S = 0.002
_REASONS_S = 3.0  # for others to say why, once one has refused and the verdict is known


@dataclass(frozen=True, slots=True)
class Ack:
    """One rank's word on one sync. `sums` are its checksums, in the order of `coverage.held`.

    `token` is the control message's. `ok` says that the rank did all it was asked; the sums say
    what it has. Times are wall seconds of copying and of summing. `moved_bytes` are by link: those
    that a server rank wrote, or that a learner rank (which has no sums) sent by network.
    """

    token: str
    ok: bool
    error: str = ""
    sums: tuple[int, ...] = ()
    host: str = ""
    pid: int = 0
    copy_s: float = 0.0
    check_s: float = 0.0
    moved_bytes: Mapping[str, int] = field(default_factory=dict)

    def to_json(self) -> str:
        """The acknowledgement as text."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str | bytes) -> Ack:
        """The inverse of `to_json`. Raises WeightSyncError where `text` is none."""
        try:
            fields = json.loads(text)
            ack = cls(**{**fields, "sums": tuple(fields["sums"])})
            is_one = isinstance(ack.ok, bool) and isinstance(ack.token, str)
            if not is_one or not all(is_integer(s) and 0 <= s < 2**64 for s in ack.sums):
                raise TypeError("a field is of another type")
            return ack
        except MALFORMED as error:
            raise WeightSyncError(
                f"{text[:80]!r} is no acknowledgement ({error}); use one version of megarl in "
                "learner and rollout"
            ) from error


class AckBoard:
    """The store on learner rank 0, bound to one address only."""

    def __init__(self, host: str) -> None:
        listener = socket.create_server((host, 0), family=_family(host), backlog=1024)
        port = int(listener.getsockname()[1])
        self.address = (host, port)
        self._store = TCPStore(
            host,
            port,
            is_master=True,
            wait_for_workers=False,
            timeout=timedelta(seconds=stores.CONNECT_S),
            master_listen_fd=listener.detach(),
        )

    def wait(self, keys: Mapping[str, str], token: str, until: float) -> dict[str, Ack]:
        """The acknowledgements under `keys` (by who gives it), once all are there.

        Where one refuses, the others are not waited for but for a moment: one that has ended says
        nothing.
        `until` is a time of `time.monotonic`. Raises NoAnswerError where it passes, naming those
        that are missing, and WeightSyncError where an acknowledgement is not of this sync.
        """
        acks: dict[str, Ack] = {}
        refused_until = math.inf
        while True:
            acks.update(self.said({who: key for who, key in keys.items() if who not in acks}))
            for who, ack in acks.items():
                if ack.token != token:
                    why = ack.error or "acknowledged with a token that was not given to it"
                    raise WeightSyncError(f"{who}: {why}; another process writes to this store")
                if not ack.ok:
                    refused_until = min(refused_until, time.monotonic() + _REASONS_S)
            if len(acks) == len(keys):
                return acks
            missing = ", ".join(who for who in keys if who not in acks)
            if time.monotonic() > refused_until:
                refusals = "; ".join(f"{w}: {a.error}" for w, a in acks.items() if not a.ok)
                raise WeightSyncError(f"refused by {refusals}; nothing was heard from {missing}")
            if time.monotonic() > until:
                raise NoAnswerError(
                    f"no acknowledgement from {missing} within the deadline; see the logs of "
                    "those processes, or raise deadline.sync_s"
                )
            time.sleep(_POLL_S)

    def said(self, keys: Mapping[str, str]) -> dict[str, Ack]:
        """The acknowledgements under `keys` that are there already.

        What is none is told of as a refusal without a token.
        """
        return {who: self._read(key) for who, key in keys.items() if self._store.check([key])}

    def _read(self, key: str) -> Ack:
        try:
            return Ack.from_json(self._store.get(key))
        except (WeightSyncError, RuntimeError) as error:  # no acknowledgement, or gone by now
            return Ack("", False, in_words(error))

    def put(self, key: str, value: str) -> None:
        """Write what nobody has written before; what stands there stays."""
        self._store.compare_set(key, "", value)

    def clear(self) -> None:
        """Remove everything: for the time between two publishes."""
        self.forget(self._store.list_keys())

    @property
    def num_keys(self) -> int:
        """How many entries the store has."""
        return int(self._store.num_keys())

    def forget(self, keys: Iterable[str]) -> None:
        """Remove what has been read, so that the store does not grow."""
        for key in keys:
            self._store.delete_key(key)


def _family(host: str) -> socket.AddressFamily:
    return socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0][0]
