"""Calls to one SGLang server, one method each: pause, open, update, close, label, resume, score.

Owns their paths, which key opens them, and what an answer must be. Knows nothing of the order in
which they are made, nor of what an update carries.
"""

from __future__ import annotations

import json
import logging
import math
import time
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from http.client import HTTPException
from typing import Any, Literal

from megarl.actor.config_fields import is_finite
from megarl.errors import MALFORMED, NoAnswerError, WeightSyncError, in_words
from megarl.types import ServerEndpoint
from megarl.weight_sync.connection import Connection

log = logging.getLogger(__name__)

PauseMode = Literal["retract", "in_place", "abort"]

SELECTOR = "target"  # a draft model is not the policy
SHORTEST_S = 0.05
ANSWER_S = 60.0  # for calls that move no weights: a scheduler answers between two forward passes
CLOSING_S = 5.0  # for leaving a server as it must be left after the deadline has passed
ALREADY_OPEN = "already open"  # SGLang's word for a session that a dead sender has left
SESSION_LOST = ("no weight-update session is open", "must run between begin_weight_update")
"""SGLang's words for a session that is not open any more."""


class ServerCalls:
    """HTTP calls to one server, each bounded by what is left until `until`, a time of
    `time.monotonic`.

    Every call raises WeightSyncError for an answer other than 200, NoAnswerError for none in time.
    """

    def __init__(self, server: ServerEndpoint, until: float) -> None:
        self._server, self._until = server, until
        self._connection = Connection(server.url)

    def info(self) -> Mapping[str, Any]:
        """What the server was started with and its scheduler's state; answered while paused."""
        return self._json("/server_info", self._call("GET", "/server_info", None, is_admin=False))

    def pause(self, mode: PauseMode, at_least_s: float = 0.0) -> None:
        """Give no token until `resume`; `weight_sync.pause` says what becomes of requests.

        A paused server may be paused again. "abort" waits until the last request has ended.
        """
        at_most_s = math.inf if mode == "abort" else ANSWER_S
        self.post("/pause_generation", {"mode": mode}, at_least_s, at_most_s)

    def resume(self) -> None:
        """Give tokens again: first to requests that a pause held, then to those that waited."""
        self.post("/continue_generation", {}, at_most_s=ANSWER_S)

    def begin(self) -> None:
        """Open an update session; one that an earlier sender left open is ended first."""
        try:
            self.post("/begin_weight_update", {"selector": SELECTOR}, at_most_s=ANSWER_S)
        except WeightSyncError as error:
            if ALREADY_OPEN not in str(error):
                raise
            log.warning("abandoned update session ended server=%s", self._server.name)
            self.end()
            self.post("/begin_weight_update", {"selector": SELECTOR}, at_most_s=ANSWER_S)

    def update(self, body: Mapping[str, Any]) -> None:
        """One update from tensors, of the policy alone. What the answer says is no proof of it."""
        self.post("/update_weights_from_tensor", {**body, "selector": SELECTOR})

    def end(self) -> None:
        """Close the update session, also when the deadline has passed: a server may serve again."""
        self.post("/end_weight_update", {}, at_least_s=CLOSING_S)

    def set_version(self, label: str, at_least_s: float = 0.0) -> None:
        """Name the weights. Tokens sampled from now on carry `label`, also in running requests."""
        body = {"new_version": label, "abort_all_requests": False}  # SGLang's default ends them
        self.post("/update_weight_version", body, at_least_s, ANSWER_S)

    def score(self, token_ids: Sequence[int]) -> list[float]:
        """Log-probs of `token_ids[1:]`, each after the tokens before it, at temperature 1, in nats.

        Computed anew: a cached prefix is not used. Waits while the server is paused.
        """
        body = {
            "input_ids": list(token_ids),
            "return_logprob": True,
            "logprob_start_len": 0,
            "sampling_params": {"max_new_tokens": 0, "temperature": 1.0},
        }
        reply = self._json("/generate", self._call("POST", "/generate", body, is_admin=False))
        try:
            pairs = [(pair[0], int(pair[1])) for pair in reply["meta_info"]["input_token_logprobs"]]
        except MALFORMED as error:
            raise WeightSyncError(
                f"/generate answered without input log-probs ({error!r}); is it SGLang 0.5.23?"
            ) from error
        if [token for _, token in pairs] != list(token_ids):
            raise WeightSyncError(
                f"/generate scored {len(pairs)} tokens that are not the {len(token_ids)} sent"
            )
        for position, (logprob, token) in enumerate(pairs[1:], start=1):
            if not is_finite(logprob):
                raise WeightSyncError(
                    f"the log-prob of token {token} at position {position} is {logprob}"
                )
        return [float(logprob) for logprob, _ in pairs[1:]]

    def post(
        self,
        route: str,
        body: Mapping[str, Any],
        at_least_s: float = 0.0,
        at_most_s: float = math.inf,
    ) -> str:
        """The answer's text, of any other route that the admin key opens."""
        return self._call(
            "POST", route, body, is_admin=True, at_least_s=at_least_s, at_most_s=at_most_s
        )

    def close(self) -> None:
        """Drop the connection."""
        self._connection.close()

    def _call(
        self,
        method: str,
        route: str,
        body: Mapping[str, Any] | None,
        *,
        is_admin: bool,
        at_least_s: float = 0.0,
        at_most_s: float = math.inf,
    ) -> str:
        left = min(max(self._until - time.monotonic(), at_least_s), at_most_s)
        if left < SHORTEST_S:
            raise WeightSyncError(f"the deadline passed before {route}; raise deadline.sync_s")
        key = self._server.admin_key if is_admin else ""
        key = key or self._server.api_key
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        try:
            sent = None if body is None else json.dumps(body).encode()
            status, text = self._connection.call(method, route, sent, headers, left)
        except TimeoutError as error:
            remedy = "" if left == at_most_s else ", or raise deadline.sync_s"
            raise NoAnswerError(
                f"{route} did not answer within {left:.1f} s; see that server's log{remedy}"
            ) from error
        except (OSError, HTTPException) as error:
            raise NoAnswerError(
                f"{route}: no answer, the server has ended or is unreachable ({in_words(error)})"
            ) from error
        if status != HTTPStatus.OK:
            is_lost = any(word in text for word in SESSION_LOST)
            why = "the server was started anew, or another learner syncs it; " if is_lost else ""
            raise WeightSyncError(f"{route} answered {status}: {why}{text[:500]}")
        return text

    def _json(self, route: str, text: str) -> Mapping[str, Any]:
        try:
            found = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise WeightSyncError(f"{route} did not answer with JSON: {text[:200]!r}") from error
        if not isinstance(found, dict):
            raise WeightSyncError(f"{route} answered with {type(found).__name__}, not an object")
        return found
