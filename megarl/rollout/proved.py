"""Which publishes each server process has proved, and that a response has tokens of no other.

A publish is committed on a process by the report of a sync that verified it there, under a label
that no other publish has: neither an earlier attempt at its version nor another run's. Owns that
record and the check of responses against it. Knows nothing of routing or of how it is proved.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from megarl.errors import RolloutError
from megarl.rollout.calls import UNSYNCED_LABEL
from megarl.rollout.client import Completion
from megarl.types import ServerEndpoint

Process = tuple[str, int]


class ProvedVersions:
    """The labels of weights that server processes (name, incarnation) proved in this run."""

    def __init__(self) -> None:
        self._proved: dict[Process, dict[str, None]] = defaultdict(dict)  # in their order

    def prove(self, endpoint: ServerEndpoint, label: str) -> None:
        """Record that this process proved the weights that it calls `label`."""
        self._proved[_process(endpoint)][label] = None

    def check(
        self,
        endpoint: ServerEndpoint,
        completions: Sequence[Completion],
        response_ids: Sequence[str],
    ) -> None:
        """Raise RolloutError where a token was sampled from weights that this process never proved.

        The weights that servers start with count as proved until any others have been committed.
        """
        proved = self._proved.get(_process(endpoint), {})
        if not self._proved:
            proved = {UNSYNCED_LABEL: None}
        for completion, response_id in zip(completions, response_ids, strict=True):
            for span, label in zip(completion.version_spans, completion.labels, strict=True):
                if label not in proved:
                    raise RolloutError(
                        f"{response_id} from {endpoint.name}, incarnation {endpoint.incarnation}: "
                        f"tokens {span.start} to {span.end} were sampled from {_words(label)}, "
                        "which that process never proved to this run "
                        f"(last proved: {next(reversed(proved), 'none')}); it is not used. Was "
                        "the server synced or resumed by another program?"
                    )


def _process(endpoint: ServerEndpoint) -> Process:
    return endpoint.name, endpoint.incarnation


def _words(label: str) -> str:
    return "the weights it was started with" if label == UNSYNCED_LABEL else f"version {label}"
