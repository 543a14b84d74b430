"""Which policy versions each server process has proved, and that a response has tokens of no other.

A version is committed on a process by the report of a sync that verified it there. Owns that record
and the check of responses against it. Knows nothing of routing or of how a version is proved.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from megarl.errors import RolloutError
from megarl.rollout.client import NO_VERSION, Completion
from megarl.types import ServerEndpoint

Process = tuple[str, int]


class ProvedVersions:
    """The versions that server processes (name, incarnation) proved in this run."""

    def __init__(self) -> None:
        self._proved: dict[Process, set[int]] = defaultdict(set)

    def prove(self, endpoint: ServerEndpoint, version: int) -> None:
        """Record that this process proved `version`."""
        self._proved[_process(endpoint)].add(version)

    def check(
        self,
        endpoint: ServerEndpoint,
        completions: Sequence[Completion],
        response_ids: Sequence[str],
    ) -> None:
        """Raise RolloutError where a token was sampled from weights that this process never proved.

        The weights that servers start with count as proved until any version has been committed.
        """
        proved = self._proved.get(_process(endpoint), set())
        if not self._proved:
            proved = {NO_VERSION}
        for completion, response_id in zip(completions, response_ids, strict=True):
            for span in completion.version_spans:
                if span.version not in proved:
                    raise RolloutError(
                        f"{response_id} from {endpoint.name}, incarnation {endpoint.incarnation}: "
                        f"tokens {span.start} to {span.end} were sampled from "
                        f"{_words(span.version)}, which that process never proved "
                        f"(proved: {sorted(proved) or 'none'}); it is not used. Was the server "
                        "synced or resumed by another program?"
                    )


def _process(endpoint: ServerEndpoint) -> Process:
    return endpoint.name, endpoint.incarnation


def _words(version: int) -> str:
    return "the weights it was started with" if version == NO_VERSION else f"version {version}"
