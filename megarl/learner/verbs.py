"""The verbs of learner and critic: what each takes and returns, and how long it may last.

The tables that clients and services share. Imports neither torch nor megatron, and knows nothing
of how a verb is carried or carried out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megarl.config.schema import DeadlineConfig
from megarl.run_paths import CRITIC, LEARNER
from megarl.types import (
    Batch,
    CriticScores,
    MinibatchPlan,
    ServerEndpoint,
    SyncReport,
    TokenNumbers,
)

ANSWER_MARGIN_S = (
    15.0  # at most: what a verb itself waits for ends first, then service, then client
)
PEER_LOST = "PeerLostError"  # answered where the cause is on another rank: the launcher knows it

PARTS = ("gradients", "optimizer", "weights")
"""Parts of the learner's state that can leave the device: `offload` and `onload` take their
names."""

Sequences = tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]
"""(prompt token ids, response token ids) of each sequence."""


@dataclass(frozen=True, slots=True)
class Verb:
    """One call of the learner.

    `arguments` is a tuple type, in the order of the method's parameters. `deadline` names a field
    of DeadlineConfig. `changes_weights`: after an error a part of the weights may be changed, so
    the service ends. `needs`: parts of the state that must be on the device.
    """

    name: str
    arguments: Any
    result: Any
    deadline: str = "learner_verb_s"
    changes_weights: bool = False
    needs: tuple[str, ...] = ()


Numbers = tuple[TokenNumbers, ...]

_STEP = Verb("step", tuple[MinibatchPlan], dict[str, float], changes_weights=True, needs=PARTS)
_SAVE = Verb("save", tuple[str, int], None, needs=("optimizer", "weights"))
_BESIDE = (
    Verb("begin_save", tuple[str, int], None, needs=("optimizer", "weights")),
    Verb("end_save", tuple[bool], bool),
    Verb("check_saved", tuple[str], str, deadline="learner_start_s"),
)
_LOAD = Verb(
    "load",
    tuple[str],
    int,
    deadline="learner_start_s",
    changes_weights=True,
    needs=("optimizer", "weights"),
)
_ALL = (
    Verb("info", tuple[()], dict[str, int]),
    Verb("peaks", tuple[()], dict[str, int]),
    Verb("shutdown", tuple[()], None),
)
_LEARNER = (
    *_ALL,
    Verb("score", tuple[Batch], dict[str, float], needs=("weights",)),
    Verb("token_rewards", tuple[()], Numbers),
    Verb("take_advantages", tuple[Numbers], None),
    _STEP,
    Verb("logprobs", tuple[Sequences], list[list[float]], needs=("weights",)),
    Verb(
        "publish",
        tuple[int, tuple[ServerEndpoint, ...]],
        SyncReport,
        deadline="sync_s",
        needs=("weights",),
    ),
    _SAVE,
    *_BESIDE,
    Verb("export", tuple[str], int, needs=("weights",)),
    _LOAD,
    Verb("offload", tuple[tuple[str, ...]], None, changes_weights=True),
    Verb("onload", tuple[tuple[str, ...]], None, changes_weights=True),
    Verb("memory", tuple[()], dict[str, int]),
)
_CRITIC = (*_ALL, Verb("score", tuple[Batch, Numbers], CriticScores), _STEP, _SAVE, *_BESIDE, _LOAD)
VERBS: Mapping[str, Verb] = {verb.name: verb for verb in _LEARNER}
CRITIC_VERBS: Mapping[str, Verb] = {verb.name: verb for verb in _CRITIC}
VERBS_OF: Mapping[str, Mapping[str, Verb]] = {LEARNER: VERBS, CRITIC: CRITIC_VERBS}
"""By role: the learner's, and those of a critic with ranks of its own."""


def deadline_s(verb: Verb, deadlines: DeadlineConfig) -> float:
    """How long `verb` may take in the service, in seconds: a margin above its setting.

    >>> deadline_s(VERBS["publish"], DeadlineConfig(sync_s=300.0))
    315.0
    """
    limit_s: float = getattr(deadlines, verb.deadline)
    return limit_s + min(limit_s, ANSWER_MARGIN_S)
