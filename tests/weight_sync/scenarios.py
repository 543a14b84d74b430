"""Randomized faults of a weight sync: what goes wrong, where, when, and what must be said of it."""

from __future__ import annotations

import random
from dataclasses import dataclass

from megarl.reshard.mesh import LearnerMesh

SHORT_S = 2.0  # deadline.sync_s of a publish that is meant to pass it
LONG_S = 60.0  # of all others

BEGIN, UPDATE, END = "/begin_weight_update", "/update_weights_from_tensor", "/end_weight_update"
LABEL, PROBE = "/update_weight_version", "/generate"
PAUSE, RESUME = "/pause_generation", "/continue_generation"
ROUTES = (PAUSE, BEGIN, UPDATE, END, LABEL, RESUME, PROBE)


@dataclass(frozen=True, slots=True)
class Setting:
    """Where a learner's ranks and its servers' ranks run."""

    mesh: LearnerMesh
    learner: str  # one letter a rank: its node
    servers: tuple[str, ...]
    shares: bool = False  # the learner's parameters lie in shared memory

    @property
    def has_messages(self) -> bool:
        """Whether anything goes between nodes."""
        return any(set(nodes) - set(self.learner) for nodes in self.servers)

    @property
    def has_arenas(self) -> bool:
        """Whether a server is beside a learner rank."""
        return any(set(nodes) & set(self.learner) for nodes in self.servers)


SETTINGS: dict[str, Setting] = {
    "apart": Setting(LearnerMesh(tp=2), "aa", ("bb",)),
    "beside": Setting(LearnerMesh(tp=2), "aa", ("aa", "a")),
    "stages, two servers apart": Setting(LearnerMesh(pp=2), "aa", ("bb", "c")),
    "one server rank beside": Setting(LearnerMesh(pp=2), "aa", ("ab",)),
    "one learner rank beside": Setting(LearnerMesh(tp=2), "ab", ("bb",)),
    "replicas on two nodes": Setting(LearnerMesh(dp=2), "ab", ("bc", "a")),
    "one beside, one apart": Setting(LearnerMesh(tp=2), "aa", ("aa", "b")),
    "in place": Setting(LearnerMesh(tp=2), "aa", ("aa", "a"), shares=True),
    "in place and apart": Setting(LearnerMesh(pp=2), "aa", ("ab",), shares=True),
    "replicas beside": Setting(LearnerMesh(dp=2), "aa", ("aa",)),
}


@dataclass(frozen=True, slots=True)
class Kind:
    """One kind of fault.

    `where`: "learner" and "server" are inside a rank, "call" is around a call. `words` must be in
    what is said of it (any of them). With `waits` nothing but the deadline ends it.
    """

    where: str
    words: str
    waits: bool = False
    # A sync may never fail of it: it is mended, nobody looks there, or it comes when all is done.
    is_harmless: bool = False
    needs: str = ""  # "messages" or "arenas"
    routes: tuple[str, ...] = ROUTES
    moments: tuple[str, ...] = ("before", "after")


LATE = r"in time|within|deadline|no time left"
GONE = r"has ended|unreachable|closed the connection|refused by|not begun"
_AT_UPDATE = {"routes": (UPDATE,), "moments": ("before",)}
_AT_ARENA = {"routes": (BEGIN, UPDATE), "moments": ("before",), "needs": "arenas"}

KINDS: dict[str, Kind] = {
    "learner drop": Kind("learner", LATE, True, needs="messages"),
    "learner double": Kind("learner", LATE, True, needs="messages"),
    "learner change": Kind("learner", "checksums differ", needs="messages"),
    "learner short": Kind("learner", f"checksums differ|{LATE}|{GONE}", True, needs="messages"),
    "learner long": Kind("learner", f"checksums differ|{LATE}|{GONE}", True, needs="messages"),
    "learner swap": Kind("learner", f"checksums differ|{LATE}|{GONE}", True, needs="messages"),
    "learner reorder": Kind("learner", LATE, True, True, needs="messages"),
    "learner mistag": Kind("learner", LATE, True, needs="messages"),
    "learner late": Kind("learner", LATE, True, needs="messages"),
    "learner hang": Kind("learner", LATE, True, needs="messages"),
    "learner kill": Kind("learner", GONE, needs="messages"),
    "learner stop": Kind("learner", LATE, True, needs="messages"),
    "learner nan": Kind("learner", "not finite|checksums differ"),
    "learner raise": Kind("learner", "no room"),
    "learner kill early": Kind("learner", GONE),
    "server drop": Kind("server", LATE, True, needs="messages"),
    "server double": Kind("server", LATE, True, needs="messages"),
    "server change": Kind("server", "checksums differ", needs="messages"),
    "server short": Kind("server", f"checksums differ|{LATE}|{GONE}", True, needs="messages"),
    "server long": Kind("server", f"checksums differ|{LATE}|{GONE}", True, needs="messages"),
    "server swap": Kind("server", f"checksums differ|{LATE}|{GONE}", True, needs="messages"),
    "server reorder": Kind("server", LATE, True, True, needs="messages"),
    "server mistag": Kind("server", LATE, True, needs="messages"),
    "server late": Kind("server", LATE, True, needs="messages"),
    "server hang": Kind("server", LATE, True, needs="messages"),
    "server kill": Kind("server", GONE, needs="messages"),
    "server stop": Kind("server", LATE, True, needs="messages"),
    "server flip": Kind("server", "checksums differ"),
    "server token": Kind("server", "token that was not given"),
    "server mute": Kind("server", "no acknowledgement from TP rank", True),
    "server slow": Kind("server", LATE, True),
    "server kill early": Kind("server", GONE),
    "server stop early": Kind("server", LATE, True),
    "server kill late": Kind("server", GONE),
    "error": Kind("call", "500"),
    "no answer": Kind("call", GONE),
    "slow call": Kind("call", LATE, is_harmless=True),
    "call hangs": Kind("call", LATE, True),
    "server dies": Kind("call", GONE),
    "server rebooted": Kind(
        "call", f"was started anew|log-probs are not|{GONE}", routes=ROUTES[:-1]
    ),
    "learner rank killed": Kind("call", GONE),
    "learner rank stopped": Kind("call", LATE, True),
    "server rank killed": Kind("call", GONE),
    "server rank stopped": Kind("call", LATE, True),
    "arena bit flipped": Kind("call", "checksums differ", **_AT_ARENA),  # type: ignore[arg-type]
    "arena stamp stale": Kind("call", "of another publish", **_AT_ARENA),  # type: ignore[arg-type]
    "arena nonce wrong": Kind("call", "another run", **_AT_ARENA),  # type: ignore[arg-type]
    "arena truncated": Kind("call", "stale or belongs", **_AT_ARENA),  # type: ignore[arg-type]
    "arena gone": Kind("call", "does not exist", is_harmless=True, **_AT_ARENA),  # type: ignore[arg-type]
    "arena files swapped": Kind("call", "another run", is_harmless=True, **_AT_ARENA),  # type: ignore[arg-type]
    "arena refs swapped": Kind(
        "call", "another layout|has nonce", needs="arenas", routes=(UPDATE,), moments=("before",)
    ),
    "payloads swapped": Kind("call", "got the message of TP rank", **_AT_UPDATE),  # type: ignore[arg-type]
    "ack forged": Kind("call", "token", routes=(UPDATE,), moments=("after",)),
    "ack garbled": Kind("call", "is no acknowledgement", routes=(UPDATE,), moments=("after",)),
    "ack lost": Kind(
        "call", "no acknowledgement from TP", True, routes=(UPDATE,), moments=("after",)
    ),
    "old update replayed": Kind("call", f"another publish|{GONE}", is_harmless=True),
    "update delivered twice": Kind("call", GONE, routes=(UPDATE,), is_harmless=True),
    "live weight poisoned": Kind("call", "log-probs are not", routes=(END, LABEL, RESUME)),
    "second learner": Kind(
        "call", f"another learner|is syncing this server|{LATE}", True, is_harmless=True
    ),
}


@dataclass(frozen=True, slots=True)
class Scenario:
    """One fault, wholly described."""

    setting: str
    kind: str
    server: int
    rank: int
    at: int
    route: str
    moment: str

    @property
    def limit_s(self) -> float:
        """The deadline of the publish that it hits."""
        return SHORT_S if KINDS[self.kind].waits else LONG_S


def applicable(setting: Setting) -> list[str]:
    """The kinds of fault that can happen there."""
    has = {"": True, "messages": setting.has_messages, "arenas": setting.has_arenas}
    return [name for name, kind in KINDS.items() if has[kind.needs]]


def scenarios(setting: str, count: int, seed: int) -> list[Scenario]:
    """`count` of them in one setting: every kind in turn, the rest of it drawn."""
    draw = random.Random(f"{seed} {setting}")
    kinds: list[str] = []
    while len(kinds) < count:
        some = applicable(SETTINGS[setting])
        draw.shuffle(some)
        kinds += some
    return [
        Scenario(
            setting,
            kind,
            draw.randrange(len(SETTINGS[setting].servers)),
            draw.randrange(4),
            draw.randrange(1 << 16),
            draw.choice(KINDS[kind].routes),
            draw.choice(KINDS[kind].moments),
        )
        for kind in kinds[:count]
    ]
