"""A critic with ranks of its own: a checkpoint is of both, and neither is left in the middle."""

from pathlib import Path

import pytest

from megarl.config.schema import Config
from megarl.controller.with_critic import LearnerWithCritic
from megarl.errors import CheckpointError
from megarl.learner.client import LearnerClient
from tests.learner import random_model


class Saves:
    """The verbs of saving of one side. `fails` names the verb that does."""

    def __init__(self, fails: str = "") -> None:
        self.fails, self.is_under_way, self.polls = fails, False, 0

    async def begin_save(self, path: object, version: int) -> None:
        assert not self.is_under_way
        if self.fails == "begin_save":
            raise CheckpointError("begin_save: no folder")
        self.is_under_way = True

    async def end_save(self, wait: bool) -> bool:
        self.polls += 1
        if self.is_under_way and not wait and self.polls < 2:
            return False
        is_last, self.is_under_way = self.is_under_way, False
        if self.fails == "end_save" and is_last:
            raise CheckpointError("end_save: disk full")
        return True


def both(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mine: Saves, theirs: Saves
) -> LearnerWithCritic:
    model = random_model.write(tmp_path / "model")
    config = Config.model_validate(
        {"actor": {"model": str(model)}, "advantage": {"estimator": "gae"}}
    )
    for verb in ("begin_save", "end_save"):
        ours = getattr(mine, verb)
        monkeypatch.setattr(LearnerClient, verb, lambda _, *given, ours=ours: ours(*given))
    return LearnerWithCritic("http://h", "k", config, tmp_path / "failure", theirs)  # type: ignore[arg-type]


async def test_save_has_ended_when_both_have(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine, theirs = Saves(), Saves()
    learner = both(tmp_path, monkeypatch, mine, theirs)
    await learner.begin_save("p", 1)
    theirs.polls = -1
    assert [await learner.end_save(False) for _ in range(3)] == [False, False, True]


@pytest.mark.parametrize("verb", ["begin_save", "end_save"])
@pytest.mark.parametrize("side", ["learner", "critic"])
async def test_failure_of_one_is_told_when_the_other_has_ended_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, verb: str, side: str
) -> None:
    mine, theirs = (Saves(verb if side == each else "") for each in ("learner", "critic"))
    learner = both(tmp_path, monkeypatch, mine, theirs)
    with pytest.raises(CheckpointError, match=verb):
        await learner.begin_save("p", 1)
        while not await learner.end_save(False):
            pass
    assert not mine.is_under_way and not theirs.is_under_way
    mine.fails = theirs.fails = ""
    await learner.begin_save("p", 2)
    assert await learner.end_save(True)
