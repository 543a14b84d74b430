"""Each call to a server: its path and key, and the words for every answer but a good one."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from megarl.errors import NoAnswerError, WeightSyncError
from megarl.weight_sync import server_calls
from megarl.weight_sync.exchange import hand_over
from megarl.weight_sync.probe import Probe
from megarl.weight_sync.server_calls import ServerCalls
from tests.weight_sync.web import Web

TOKENS = (5, 9, 7)


@pytest.fixture
def web() -> Iterator[Web]:
    made = Web()
    yield made
    made.close()


def calls_to(web: Web, within_s: float = 10.0) -> ServerCalls:
    return ServerCalls(web.endpoint, time.monotonic() + within_s)


def scoring(logprobs: list[Any], tokens: tuple[int, ...] = TOKENS) -> Callable[[Any], Any]:
    pairs = [[logprob, token, None] for logprob, token in zip(logprobs, tokens, strict=True)]
    text = json.dumps({"meta_info": {"input_token_logprobs": pairs}})
    return lambda body: (200, text)


def test_control_calls_carry_the_admin_key_and_generation_the_other(web: Web) -> None:
    web.answers["/generate"] = scoring([None, -1.0, -2.0])
    calls = calls_to(web)
    calls.info()
    calls.pause("retract")
    assert calls.score(TOKENS) == [-1.0, -2.0]
    keys = {path: key for _, path, _, key in web.asked}
    assert keys == {
        "/server_info": "user-key",
        "/pause_generation": "admin-key",
        "/generate": "user-key",
    }


BAD_SCORES = {
    "no log-probs": (lambda body: (200, "{}"), "without input log-probs"),
    "other tokens": (scoring([None, -1.0, -2.0], (5, 9, 8)), "not the 3 sent"),
    "not a number": (scoring([None, -1.0, None]), "token 7 at position 2 is None"),
}


@pytest.mark.parametrize("case", BAD_SCORES)
def test_score_that_cannot_be_compared_is_refused(web: Web, case: str) -> None:
    web.answers["/generate"], words = BAD_SCORES[case]
    with pytest.raises(WeightSyncError, match=words):
        calls_to(web).score(TOKENS)


def test_session_that_was_left_open_is_ended_and_opened_again(web: Web) -> None:
    left = ["a weight-update session is already open"]
    web.answers["/begin_weight_update"] = lambda body: (400, left.pop()) if left else (200, "{}")
    calls_to(web).begin()
    assert web.routes == ["begin_weight_update", "end_weight_update", "begin_weight_update"]


def test_late_answer_names_the_call_and_the_setting(web: Web) -> None:
    web.answers["/begin_weight_update"] = lambda body: time.sleep(1.0) or (200, "{}")
    with pytest.raises(NoAnswerError, match=r"/begin_weight_update did not.*deadline\.sync_s"):
        calls_to(web, within_s=0.2).begin()


def test_call_that_moves_no_weights_waits_no_longer_than_a_scheduler_may_take(
    web: Web, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_calls, "ANSWER_S", 0.2)
    web.answers["/begin_weight_update"] = lambda body: time.sleep(1.0) or (200, "{}")
    with pytest.raises(NoAnswerError) as error:
        calls_to(web, within_s=300.0).begin()
    assert "within 0.2 s" in str(error.value) and "deadline" not in str(error.value)


def test_closed_connection_says_that_the_server_has_ended(web: Web) -> None:
    web.answers["/pause_generation"] = lambda body: None
    with pytest.raises(NoAnswerError, match="has ended or is unreachable"):
        calls_to(web).pause("retract")


def test_deadline_that_passed_before_a_call_does_not_blame_the_server(web: Web) -> None:
    with pytest.raises(WeightSyncError, match="passed before /pause_generation") as error:
        calls_to(web, within_s=-1.0).pause("retract")
    assert not isinstance(error.value, NoAnswerError)
    assert web.asked == []


def probe(bound: float = 0.1) -> Probe:
    return Probe(TOKENS, (-1.0, -2.0), bound)


def test_order_of_a_sync_is_pause_open_write_close_label_resume_probe(web: Web) -> None:
    web.answers["/generate"] = scoring([None, -1.05, -2.0])
    calls = calls_to(web)
    written, difference = hand_over(
        calls, "3.ab", "retract", lambda: calls.post("/write", {}), probe
    )
    assert (written, round(difference or 0, 6)) == ("{}", 0.05)
    assert web.routes == [
        "pause retract",
        "begin_weight_update",
        "pause retract",  # again: another learner may have resumed it
        "write",
        "end_weight_update",
        "update 3.ab",
        "continue_generation",
        "generate",
    ]


def test_label_leaves_running_requests_alone_which_sglang_would_end_by_default(web: Web) -> None:
    calls_to(web).set_version("3")
    (asked,) = web.asked
    assert asked[2] == {"new_version": "3", "abort_all_requests": False}


def test_refused_write_closes_the_session_and_neither_labels_nor_resumes(web: Web) -> None:
    def write() -> None:
        raise WeightSyncError("checksums differ")

    with pytest.raises(WeightSyncError, match="checksums differ"):
        hand_over(calls_to(web), "3.ab", "retract", write, probe)
    opened = ["pause retract", "begin_weight_update", "pause retract"]
    assert web.routes == [*opened, "end_weight_update"]


def test_server_that_fails_the_probe_is_stopped_and_names_no_version(web: Web) -> None:
    web.answers["/generate"] = scoring([None, -1.0, -5.0])
    with pytest.raises(WeightSyncError, match="most for token 7 at position 2, -5 on the server"):
        hand_over(calls_to(web), "3.ab", "retract", lambda: None, probe)
    assert web.routes[-3:] == ["generate", "pause abort", "update 3.ab-refused"]


def test_server_that_cannot_be_stopped_again_is_lost(web: Web) -> None:
    web.answers["/generate"] = scoring([None, -1.0, -5.0])
    web.answers["/pause_generation"] = lambda body: (
        (200, "{}") if body["mode"] == "retract" else (500, "scheduler is gone")
    )
    with pytest.raises(NoAnswerError, match="not the learner's.*nor could it be paused again"):
        hand_over(calls_to(web), "3.ab", "retract", lambda: None, probe)


def test_without_a_probe_nothing_is_scored(web: Web) -> None:
    assert hand_over(calls_to(web), "3.ab", "abort", lambda: 7, lambda: None) == (7, None)
    assert web.routes[0] == "pause abort" and web.routes[-1] == "continue_generation"
