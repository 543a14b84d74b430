"""The client's words when nobody answers. What a running service answers: test_service_errors."""

import json

import pytest

from megarl.config.schema import DeadlineConfig
from megarl.errors import CheckpointError, ConfigError, LearnerError
from megarl.learner.client import LearnerClient, _error, _error_of

NOBODY = "http://127.0.0.1:9"  # the discard port: nothing listens there


async def test_unreachable_learner_is_named_with_verb_and_url() -> None:
    async with LearnerClient(NOBODY, "key", DeadlineConfig()) as client:
        with pytest.raises(LearnerError, match=r"^info: the learner at .*:9 is unreachable: "):
            await client.info()
        with pytest.raises(LearnerError, match=r"^health: "):
            await client.health()


async def test_account_of_the_launcher_is_quoted_once_it_is_there(tmp_path) -> None:
    account = tmp_path / "learner-failure.json"
    account.write_text(json.dumps({"text": "learner rank 3 was ended by SIGKILL in step/forward"}))
    async with LearnerClient(NOBODY, "key", DeadlineConfig(), account) as client:
        with pytest.raises(LearnerError, match=r"^save: learner rank 3 was ended by SIGKILL"):
            await client.save("/x", 1)


async def test_missing_account_names_the_folder_of_the_logs(tmp_path) -> None:
    account = tmp_path / "learner-failure.json"
    client = LearnerClient(NOBODY, "key", DeadlineConfig(), account)
    assert str(tmp_path) in await client._gone("step", "closed", wait_s=0.0)


def test_errors_about_input_keep_their_class_and_others_are_the_learners() -> None:
    assert type(_error("load", "CheckpointError", "x: not there")) is CheckpointError
    assert type(_error("load", "ConfigError", "no such field")) is ConfigError
    assert type(_error("load", "ValueError", "load: bad")) is LearnerError
    assert str(_error("load", "ValueError", "load: bad")) == "load: bad"
    assert _error_of(502, b"<html>") == ("LearnerError", "status 502: b'<html>'")
